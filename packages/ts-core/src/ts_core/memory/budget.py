"""How much host memory one process may page-lock for the weights of a model."""

from __future__ import annotations

from dataclasses import dataclass

from ts_core.memory.ram import (
    in_container,
    in_wsl,
    local_processes,
    page_lock_limit_bytes,
    ram_limit_bytes,
)

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


def page_lock_budget() -> PageLockBudget:
    """40 % of the RAM that this process may use, shared between the processes of its run.

    Whether the system grants it shows when memory is page-locked: neither `ulimit -l` nor the
    limits of WSL and containers bind every driver, so none of them is taken for granted. What is
    refused stays pageable, with an event that names them (`limits_in_words`).
    """
    processes = local_processes()
    ram_bytes = ram_limit_bytes()
    why = f"{PAGE_LOCK_SHARE:.0%} of {ram_bytes / (1 << 30):.1f} GiB of RAM"
    if processes > 1:
        why += f", shared by {processes} processes"
    return PageLockBudget(int(PAGE_LOCK_SHARE * ram_bytes) // processes, why)


def limits_in_words() -> str:
    """What may be behind a refusal to page-lock memory, to be put after it; empty if nothing is."""
    found = []
    limit = page_lock_limit_bytes()
    if limit is not None and limit >= 0:
        found.append(f"ulimit -l is {limit >> 10} KiB")
    if in_wsl():
        found.append("WSL allows little page-locked memory")
    elif in_container():
        found.append("this is a container")
    if not found:
        return ""
    return f"; {', '.join(found)} (`trainstream doctor` says how to raise the limit)"
