"""A scheduler of the user's, made for the optimizer that wrapping replaces, drives the new one."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim.lr_scheduler import LRScheduler


@contextmanager
def parted(scheduler: Any, optimizer: Any) -> Iterator[None]:
    """Within it, `scheduler` drives nothing, since `optimizer` is being replaced.

    wrap() refuses an optimizer with a scheduler, which it knows no way to. Where that fails, the
    scheduler drives what it did.
    """
    mine = [one for one in _all_of(scheduler) if one.optimizer is optimizer]
    for one in mine:
        one.optimizer = None
    try:
        yield
    except BaseException:
        for one in mine:
            one.optimizer = optimizer
        raise


def rebind(scheduler: Any, optimizer: Any) -> None:
    """Let a scheduler that was made for the user's optimizer drive `optimizer`, its conversion."""
    for one in _all_of(scheduler):
        one.optimizer = optimizer
    original = optimizer.step
    if hasattr(original, "_wrapped_by_lr_sched"):
        return

    @functools.wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:  # the mark by which torch checks the call order
        optimizer._opt_called = True
        return original(*args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step


def _all_of(scheduler: Any) -> list[Any]:
    """A scheduler and those inside it: of SequentialLR, or in whatever attribute of another."""
    found: list[Any] = []
    left = [scheduler]
    while left:
        one = left.pop()
        if not hasattr(one, "optimizer") or any(one is other for other in found):
            continue
        found.append(one)
        for value in vars(one).values():
            inside = value if isinstance(value, list | tuple) else (value,)
            left += [inner for inner in inside if isinstance(inner, LRScheduler)]
    return found
