"""Whether the optimizer that wrap() is given can be replaced, and is that of the model."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ts_core.errors import OptionError


def check_unscheduled(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that is to be replaced while a scheduler drives it.

    The scheduler would go on with the old one, and the learning rate would not change any more.
    A group's `initial_lr` tells nothing: a loaded state dict may bring it.

    Raises:
        OptionError: a scheduler that still exists was made for it.
    """
    found = _schedulers_of(optimizer)
    if found:
        gc.collect()  # one that only a cycle still holds drives nothing
        found = _schedulers_of(optimizer)
    if found:
        raise OptionError(
            f"a scheduler ({', '.join(sorted(set(found)))}) was made for the {_kind(optimizer)} "
            f"that wrap() replaces, and would not reach the one that trains. Make it after wrap(), "
            f"from the optimizer that wrap() returns, and let go of this one (del scheduler)."
        )


def _schedulers_of(optimizer: torch.optim.Optimizer) -> list[str]:
    """Names of the types of the schedulers that drive `optimizer`."""
    found = []
    for holder in gc.get_referrers(optimizer):
        if isinstance(holder, dict):  # an object's attributes, before Python 3.11 or once asked for
            if holder.get("optimizer") is optimizer and "last_epoch" in holder:
                found.append("torch.optim.lr_scheduler")
        elif issubclass(type(holder), LRScheduler):
            found.append(_kind(holder))
    return found


def _kind(value: Any) -> str:
    return type(value).__name__
