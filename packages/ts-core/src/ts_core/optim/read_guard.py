"""Reads of a parameter whose update is still in flight wait for it, wherever they happen.

While its update runs, a parameter's class is a subclass of nn.Parameter with __torch_function__,
so that the first operation that touches it, from any thread, waits first. It is an ordinary
nn.Parameter again once the new values are there. A view taken before step() is not covered.
"""

from __future__ import annotations

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
        event = self._job.result()
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


_flights: dict[int, tuple[weakref.ref[nn.Parameter], Flight]] = {}
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
            _flights[key] = (weakref.ref(param, functools.partial(_forget, key)), flight)
            param.__class__ = ParameterInFlight


def release(params: Sequence[nn.Parameter]) -> None:
    """Ordinary parameters again."""
    with _lock:
        for param in params:
            _flights.pop(id(param), None)
            if type(param) is ParameterInFlight:
                param.__class__ = nn.Parameter  # type: ignore[assignment]


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
    for entry in list(_flights.values()):
        param, flight = entry[0](), entry[1]
        flight.settle()
        event = flight.result() if flight.succeeded() else None
        if event is not None:
            event.synchronize()
        if param is not None and flight.succeeded():
            _release_landed(param, entry)


def _before_fork() -> None:
    """A child has none of the threads that would finish these updates."""
    for _, flight in list(_flights.values()):
        flight.settle()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)


def in_flight(param: nn.Parameter) -> bool:
    """Whether reads of `param` wait at present."""
    return type(param) is ParameterInFlight


def _forget(key: int, _: object) -> None:
    _flights.pop(key, None)


def _settle(values: Any) -> None:
    for value in values:
        if type(value) is ParameterInFlight:
            entry = _flights.get(id(value))
            if entry is None or entry[1].wait():
                _release_landed(value, entry)
        elif isinstance(value, list | tuple):
            _settle(value)
        elif isinstance(value, dict):
            _settle(value.values())


def _release_landed(param: nn.Parameter, entry: Any) -> None:
    """Release, unless another update has started meanwhile (another thread's step)."""
    with _lock:
        if _flights.get(id(param)) is entry:
            _flights.pop(id(param), None)
            param.__class__ = nn.Parameter
