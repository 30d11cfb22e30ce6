"""A recorder for tests: operators re-executed on the memory of their first run.

As with a CUDA graph no Python of the block runs in a replay, every tensor stays where it was, and
what the work allocated is worth nothing after a replay: here it is filled with NaN then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ts_core.engine.activation_meter import tensors_in
from ts_core.engine.replay.recorder import Recorded, Recorder
from ts_core.store.leaves import is_wrapper


class Tape(TorchDispatchMode):
    """Notes every operator that computes something, with its tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[tuple[Any, Any, Any, list[torch.Tensor]]] = []
        self.made: dict[int, torch.UntypedStorage] = {}

    def sees_inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """Kernels that look for a mode run as they would without this one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = {_storage(tensor) for tensor in tensors_in((args, kwargs))}
        result = func(*args, **kwargs)
        outputs = list(tensors_in(result))
        if func.overloadpacket is torch.ops.aten.set_:  # gives a tensor memory that is there
            return result
        views = all(_storage(tensor) in before for tensor in outputs)
        if func._schema.is_mutable or not views:
            self.entries.append((func, args, kwargs, outputs))
        for tensor in outputs:
            if _storage(tensor) not in before:
                self.made[_storage(tensor)] = tensor.untyped_storage()
        return result


class HostTape(Recorded):
    """A tape that can be run again."""

    def __init__(self, tape: Tape, counts: HostRecorder) -> None:
        self._tape = tape
        self._counts = counts
        self._poison()

    def replay(self) -> None:
        self._counts.replays += 1
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for func, args, kwargs, outputs in self._tape.entries:
                result = func(*args, **kwargs)
                for tensor, new in zip(outputs, tensors_in(result), strict=True):
                    if _storage(new) != _storage(tensor):
                        tensor.copy_(new)
        self._poison()

    def _poison(self) -> None:
        for storage in self._tape.made.values():
            whole = torch.empty(0, dtype=torch.uint8).set_(storage)
            whole.fill_(255)  # NaN in every floating dtype of 16 bits and more


class HostRecorder(Recorder):
    """Records on the CPU.

    Attributes:
        recordings: made so far.
        replays: run so far.
    """

    def __init__(self) -> None:
        self.recordings = 0
        self.replays = 0
        self._held = 0

    @property
    def generator(self) -> torch.Generator:
        return torch.default_generator

    def warm_up(self, work: Callable[[], None]) -> None:
        work()

    def record(self, work: Callable[[], None]) -> Recorded:
        tape = Tape()
        with tape:
            work()
        self.recordings += 1
        self._held = max(self._held, sum(storage.nbytes() for storage in tape.made.values()))
        return HostTape(tape, self)

    def place(self) -> Any:
        return threading.get_ident()

    def pool_bytes(self) -> int:
        return self._held

    def forget(self) -> None:
        self._held = 0


def _storage(tensor: torch.Tensor) -> int:
    return id(tensor) if is_wrapper(tensor) else tensor.untyped_storage()._cdata
