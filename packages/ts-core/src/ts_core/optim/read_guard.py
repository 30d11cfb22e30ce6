"""Reads of a parameter whose update is still in flight wait for it, wherever they happen.

While its update runs, a parameter's class is a subclass of nn.Parameter with __torch_function__,
so that the first operation that touches it, from any thread, waits first. It is an ordinary
nn.Parameter again once the new values are there. A view taken before step() is not covered.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn

from ts_core.device.base import Event
from ts_core.transfer import CopyEngine

# Properties that say nothing of the values.
_HARMLESS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in (
        "grad",
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "is_leaf",
        "ndim",
        "layout",
        "grad_fn",
        "is_cuda",
        "is_sparse",
        "is_quantized",
        "is_meta",
        "_backward_hooks",
        "_post_accumulate_grad_hooks",
    )
    if hasattr(torch.Tensor, name)
) | frozenset(
    (
        torch.Tensor.grad.__set__,  # type: ignore[union-attr]
        torch.Tensor.numel,
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.stride,
        torch.Tensor.element_size,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
        torch.Tensor.is_contiguous,
        torch.Tensor.register_hook,
        torch.Tensor.register_post_accumulate_grad_hook,
        torch.Tensor.requires_grad_,
    )
)


class Flight:
    """An update on its way; holds no parameter.

    Args:
        job: the queued update; its result is the event of the new values' arrival on the device,
            or None when they are there as soon as it has run.
        copies: the link's engine, through which streams wait.
        guards: whether reads are to wait by themselves.
        on_host: the new values are in host memory, so that readers there wait too.
    """

    def __init__(
        self,
        job: Future[Event | None],
        copies: CopyEngine,
        guards: bool = True,
        on_host: bool = False,
    ) -> None:
        self._job = job
        self._copies = copies
        self._guards = guards
        self._on_host = on_host

    def wait(self) -> bool:
        """Make the calling thread, and its compute stream, wait for the new values.

        Returns:
            Whether they are there already, so that no other stream need wait either.

        Raises:
            BaseException: what the update raised, at every read until the next update.
        """
        event = self.result()
        if event is None:
            return True
        self._copies.wait_compute(event)
        if self._on_host:
            self._copies.device.host_wait(event)
        return event.query()

    # What a pager asks (`ts_core.store.homes.Writer`).

    def ran(self) -> bool:
        """Whether the host's part is over."""
        return self._job.done()

    def when_run(self, callback: Callable[[], None]) -> None:
        """Call back once it is, from the thread that ends it (or at once)."""
        self._job.add_done_callback(lambda _: callback())

    def result(self) -> Event | None:
        """Wait until it has run; the event of the device's part. Raises what the update raised."""
        error = self._job.exception()
        if error is not None:
            raise _again(error)
        return self._job.result()

    def landed(self) -> bool:
        """Whether the new values are there (an update that failed never lands)."""
        if not self.succeeded():
            return False
        event = self._job.result()
        return event is None or event.query()

    def succeeded(self) -> bool:
        """Whether the host's part is over, without an error."""
        return self._job.done() and self._job.exception() is None

    def guard(self, param: nn.Parameter) -> None:
        """Make reads of `param` wait, if they are to."""
        if self._guards and can_guard([param]):
            guard([param], self)

    def release(self, param: nn.Parameter) -> None:
        """Let reads of `param` go on."""
        release([param])

    def settle(self) -> None:
        """Block until the update has run, whatever came of it (readers learn of an error)."""
        self._job.exception()


def _again(error: BaseException) -> BaseException:
    """An update's error for one more reader.

    Raised itself, the original would gather the frames of every reader, and keep them.
    """
    try:
        fresh = copy.copy(error)
    except Exception:  # of a class that cannot be copied
        return error
    return fresh.with_traceback(error.__traceback__)


# The flight of a parameter is an attribute of it, as an update's error may lead back to the model.
_FLIGHT = "_trainstream_flight"
_flying: dict[int, weakref.ref[nn.Parameter]] = {}
_lock = threading.Lock()


class ParameterInFlight(nn.Parameter):
    """A parameter that is being updated; the first operation on it waits.

    Attributes:
        reads_wait: tells libraries that look at classes (ts-kernels) that it is an ordinary
            parameter otherwise.
    """

    reads_wait = True

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _HARMLESS:
            _settle(args)
            _settle(kwargs.values())
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def can_guard(params: Sequence[nn.Parameter]) -> bool:
    """Whether these are plain parameters, whose class may be changed for a while."""
    return all(type(param) in (nn.Parameter, ParameterInFlight) for param in params)


def guard(params: Sequence[nn.Parameter], flight: Flight) -> None:
    """Make operations on any of `params` (`can_guard`) wait for `flight`."""
    with _lock:
        for param in params:
            key = id(param)
            _flying[key] = weakref.ref(param, functools.partial(_forget, key))
            param.__dict__[_FLIGHT] = flight
            param.__class__ = ParameterInFlight


def release(params: Sequence[nn.Parameter]) -> None:
    """Ordinary parameters again."""
    with _lock:
        for param in params:
            _land(param)


def compiled_code_in_use() -> bool:
    """Whether torch.compile has compiled anything: its guards look at classes, so these must not
    change.

    Functions that were only decorated do not count: some libraries do that where they are imported.
    Parameters in flight when the first compilation begins become ordinary ones before it.
    """
    callback = sys.modules.get("torch._dynamo.callback")
    if callback is not None:
        handler = callback.callback_handler
        if _before_compiling not in handler.start_callbacks:
            handler.register_start_callback(_before_compiling)
    return bool(getattr(sys.modules.get("torch._dynamo.utils"), "curr_frame", 0))


def _before_compiling(_: object) -> None:
    for param, flight in _in_flight():
        flight.settle()
        event = flight.result() if flight.succeeded() else None
        if event is not None:
            event.synchronize()
        if flight.succeeded():
            _release_landed(param, flight)


def _before_fork() -> None:
    """A child has none of the threads that would finish these updates."""
    for _, flight in _in_flight():
        flight.settle()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)


def in_flight(param: nn.Parameter) -> bool:
    """Whether reads of `param` wait at present."""
    return type(param) is ParameterInFlight


def flight_of(param: nn.Parameter) -> Flight | None:
    """The update that reads of `param` wait for at present."""
    flight: Flight | None = param.__dict__.get(_FLIGHT) if in_flight(param) else None
    return flight


def wait_for(param: nn.Parameter) -> None:
    """Wait as a read of `param` does."""
    _settle([param])


def _forget(key: int, _: object) -> None:
    _flying.pop(key, None)


def _in_flight() -> list[tuple[nn.Parameter, Flight]]:
    params = [reference() for reference in list(_flying.values())]
    found = [(p, p.__dict__.get(_FLIGHT)) for p in params if p is not None]
    return [(param, flight) for param, flight in found if flight is not None]


def _land(param: nn.Parameter) -> None:
    _flying.pop(id(param), None)
    param.__dict__.pop(_FLIGHT, None)
    if type(param) is ParameterInFlight:
        param.__class__ = nn.Parameter  # type: ignore[assignment]


def _settle(values: Any) -> None:
    for value in values:
        if type(value) is ParameterInFlight:
            flight = value.__dict__.get(_FLIGHT)
            if flight is None or flight.wait():
                _release_landed(value, flight)
        elif isinstance(value, list | tuple):
            _settle(value)
        elif isinstance(value, dict):
            _settle(value.values())


def _release_landed(param: nn.Parameter, flight: Flight | None) -> None:
    """Release, unless another update has started meanwhile (another thread's step)."""
    with _lock:
        if param.__dict__.get(_FLIGHT) is flight:
            _land(param)
