"""Modules that wait for updates of their own weights before they run, and say how long."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from ts_core.device import resolve_device
from ts_core.device.base import Event
from ts_core.errors import OptionError, StateError
from ts_core.optim import read_guard
from ts_core.optim.adamw import OffloadAdamW
from ts_core.optim.ownership import owners
from ts_core.optim.read_guard import Flight
from ts_core.transfer import CopyEngine


class ParamReadyHooks:
    """A forward pre-hook on every module that holds parameters: it waits until they are updated.

    An OffloadAdamW's step() returns before its updates have run, and reads of a parameter wait by
    themselves. These hooks wait a moment earlier, for all parameters of a module at once, and
    count: `stats()` shows which modules waited for the optimizer, and how long. They also make
    such waits where reads do not (`optimizer.guard_params = False`, so that no parameter's class
    ever changes), and serve updates that are not OffloadAdamW's (`update()`).

    Args:
        module: whose parameters, those of its submodules included.
        optimizer: that updates them. Needed where its reads do not wait; they are found by
            themselves otherwise.

    Raises:
        OptionError: `module` is no module.
    """

    def __init__(self, module: nn.Module, optimizer: OffloadAdamW | None = None) -> None:
        if not isinstance(module, nn.Module):
            raise OptionError(f"module is a {type(module).__name__}. Pass a torch.nn.Module.")
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        self._flights = WeakTensorKeyDictionary()
        self._module = weakref.ref(module)
        self._host: ThreadPoolExecutor | None = None
        self._copies: CopyEngine | None = None
        self._waits: dict[str, list[float]] = {}
        self._handles: list[RemovableHandle] = []
        for name, inner in module.named_modules():
            if inner._parameters:
                hook = torch.compiler.disable(functools.partial(self._before, name))
                self._handles.append(inner.register_forward_pre_hook(hook))
        self._handles.append(module.register_state_dict_pre_hook(lambda *_: self.wait()))

    def update(
        self, params: Sequence[nn.Parameter], work: Callable[..., Any]
    ) -> Future[Event | None]:
        """Change parameters on a thread in the background; whoever reads them waits for that.

        Updates run one after another. In them write into the tensors that `work` gets: reading the
        parameters themselves there would wait for the update for ever.

        Args:
            params: plain parameters, on one device.
            work: called as work(*values) under no_grad, with each parameter's memory (a tensor of
                its shape and dtype), after everything queued on the caller's stream.

        Returns:
            Its future. What it raises is raised where one of the parameters is read.

        Raises:
            StateError: an OffloadAdamW updates some of the parameters.
        """
        if any(isinstance(o, OffloadAdamW) and o.takes_gradients for o in owners(params)):
            raise StateError(
                "an OffloadAdamW updates these parameters. Detach it (optimizer.detach()), or let "
                "it do the update."
            )
        for param in params:
            self._settle(param)
        if self._copies is None:
            self._copies = CopyEngine(resolve_device(params[0].device))
        if self._host is None:
            self._host = ThreadPoolExecutor(1, thread_name_prefix="trainstream-ready")
        copies = self._copies
        values = [param.data for param in params]
        behind = copies.record_compute()

        def run() -> Event | None:
            copies.device.host_wait(behind)
            with torch.no_grad():
                work(*values)
            return copies.record_compute()

        torch.autograd.graph.increment_version(list(params))
        job: Future[Event | None] = self._host.submit(run)
        guards = read_guard.can_guard(params) and not read_guard.compiled_code_in_use()
        flight = Flight(job, copies, guards)
        for param in params:
            self._flights[param] = flight
        if guards:
            read_guard.guard(params, flight)
        return job

    def wait(self, params: Sequence[nn.Parameter] | None = None) -> None:
        """Make the calling thread and its compute stream wait for updates in flight.

        Args:
            params: of these; None for all of the module.

        Raises:
            BaseException: what an update raised.
        """
        module = self._module()
        if params is None:
            params = [] if module is None else list(module.parameters())
        for param in params:
            for flight in self._flights_of(param):
                flight.wait()
            read_guard.wait_for(param)

    def pending(self) -> list[str]:
        """Names of the parameters whose new values are not there yet."""
        module = self._module()
        if module is None:
            return []
        return [
            name
            for name, param in module.named_parameters()
            if any(not flight.landed() for flight in self._flights_of(param))
        ]

    def stats(self) -> dict[str, dict[str, float]]:
        """By name of the modules that had to wait: waits (calls), seconds (of the host thread).

        A wait of the device's stream for a copy takes the host no time, and counts as a call.
        """
        return {
            name: {"waits": float(len(times)), "seconds": sum(times)}
            for name, times in self._waits.items()
        }

    def remove(self) -> None:
        """Wait for updates of `update()` and remove the hooks; counters stay."""
        if self._host is not None:
            self._host.shutdown()
            self._host = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _settle(self, param: nn.Parameter) -> None:
        """Wait for the last update; what it raised, if anything, has been seen or never will be."""
        for flight in self._flights_of(param):
            flight.settle()
            if flight.succeeded():
                flight.wait()
        read_guard.release([param])

    def _flights_of(self, param: nn.Parameter) -> list[Flight]:
        optimizer = None if self._optimizer is None else self._optimizer()
        found = [
            self._flights.get(param),
            read_guard.flight_of(param),
            None if optimizer is None else optimizer.flight_of(param),
        ]
        return [flight for flight in found if flight is not None]

    def _before(self, name: str, module: nn.Module, _: Any) -> None:
        params = [param for param in module._parameters.values() if param is not None]
        late = any(not f.landed() for param in params for f in self._flights_of(param))
        if not late:
            return
        begin = time.perf_counter()
        self.wait(params)
        self._waits.setdefault(name, []).append(time.perf_counter() - begin)
