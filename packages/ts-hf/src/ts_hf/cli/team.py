"""The processes of a run that torchrun started, or the only one."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ts_core.errors import NotAvailableError, OptionError, StateError, TrainStreamError

T = TypeVar("T")

FAILED = 2
_NEEDED = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def processes() -> int:
    """How many processes were started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


class Team:
    """Processes that train together; the first one decides, writes and prints.

    With one process everything here does nothing but call what it is given.

    Args:
        device: "cuda" (one GPU for each local process, NCCL) or "cpu" (gloo).

    Raises:
        OptionError: the environment is not torchrun's; fewer GPUs than processes.
        NotAvailableError: torch was built without torch.distributed.
    """

    def __init__(self, device: str) -> None:
        self.size = processes()
        self.rank = int(os.environ.get("RANK", "0")) if self.size > 1 else 0
        self._group: Any = None
        self._began = False
        if self.size > 1:
            self._join(device)

    def _join(self, device: str) -> None:
        if not dist.is_available():
            raise NotAvailableError("several processes need a torch with torch.distributed.")
        missing = [name for name in _NEEDED if name not in os.environ]
        if missing:
            raise OptionError(
                f"WORLD_SIZE={self.size} is set, but {', '.join(missing)} is not. Start several "
                f"processes with: torchrun --nproc-per-node {self.size} -m trainstream finetune "
                f"..., or unset WORLD_SIZE for one."
            )
        if device == "cuda":
            local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
            if local >= count:
                raise OptionError(
                    f"there are {count} GPUs here, and local process {local} has none. Start at "
                    f"most {count} processes (--nproc-per-node), or use device=cpu."
                )
            torch.cuda.set_device(local)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device == "cuda" else "gloo")
            self._began = True
        self._group = dist.new_group(backend="gloo")

    def __enter__(self) -> Team:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._began:
            dist.destroy_process_group()

    @property
    def first(self) -> bool:
        """Whether this is the process that decides, writes and prints."""
        return self.rank == 0

    def lead(self, work: Callable[[], T]) -> T:
        """What `work` returns in the first process, in all of them; only that one does it.

        Raises:
            Exception: what `work` raised, in the first process; the others end quietly.
        """
        if self.size == 1:
            return work()
        found: list[Any] = [None, False]
        error = None
        if self.first:
            try:
                found[0] = work()
            except Exception as raised:
                error, found[1] = raised, True
        dist.broadcast_object_list(found, 0, group=self._group)
        if error is not None:
            raise error
        if found[1]:
            raise SystemExit(FAILED)
        value: T = found[0]
        return value

    def together(self, work: Callable[[], T]) -> T:
        """`work` in every process; if it fails in one of them, all end, and the first one tells.

        `work` must not wait for the other processes.

        Raises:
            Exception: what `work` raised here; StateError in the first process for another's.
        """
        if self.size == 1:
            return work()
        error = None
        try:
            value = work()
        except Exception as raised:
            error = raised
        told = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        failed = [rank for rank, text in enumerate(told) if text is not None]
        if not failed:
            return value
        expected = isinstance(error, TrainStreamError)
        if error is not None and (self.first or not expected):
            raise error
        if self.first:
            raise StateError(f"process {failed[0]} of {self.size} failed: {told[failed[0]]}")
        raise SystemExit(FAILED)

    def gather(self, value: T) -> list[T]:
        """Every process's value, by rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each number summed over the processes."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self._group)
        numbers: list[float] = total.tolist()
        return numbers
