"""How much host memory one process may page-lock for weights and optimizer state."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ts_core.memory.ram import ram_limit_bytes

PAGE_LOCK_SHARE = 0.4


@dataclass(frozen=True)
class PageLockBudget:
    """A limit and where it comes from.

    Attributes:
        size_bytes: the most bytes to page-lock.
        why: the limit in words, for events and errors.
    """

    size_bytes: int
    why: str


def page_lock_budget(environ: Mapping[str, str] | None = None) -> PageLockBudget:
    """40 % of the RAM that this process may use, shared between the processes of this machine.

    Whether the system grants it shows when memory is page-locked: neither `ulimit -l` nor the
    limits of WSL and containers bind every driver, so none of them is taken for granted. A refusal
    is an event that names them, and what is refused stays pageable.

    Args:
        environ: where the number of local processes is looked up; None for `os.environ`.
    """
    processes = local_processes(environ)
    ram_bytes = ram_limit_bytes()
    why = f"{PAGE_LOCK_SHARE:.0%} of {ram_bytes / (1 << 30):.1f} GiB of RAM"
    if processes > 1:
        why += f", shared by {processes} processes"
    return PageLockBudget(int(PAGE_LOCK_SHARE * ram_bytes) // processes, why)


def local_processes(environ: Mapping[str, str] | None = None) -> int:
    """Processes of this run on this machine, as torchrun or Slurm says; 1 when neither does."""
    values = os.environ if environ is None else environ
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        found = re.match(r"\s*(\d+)", values.get(name, ""))  # Slurm also writes "4(x2)"
        if found and int(found[1]) > 0:
            return int(found[1])
    return 1
