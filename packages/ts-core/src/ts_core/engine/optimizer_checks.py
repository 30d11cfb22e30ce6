"""Whether the optimizer that wrap() is given can be replaced, and is that of the model."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ts_core.engine.placement import left_out
from ts_core.errors import OptionError
from ts_core.optim import OffloadAdamW
from ts_core.schedule.plan import human

_NAMED = 3
# Options that both have, and what they are called there.
_OF_BOTH = {
    "optimizer_mode": "mode",
    "max_grad_norm": "max_grad_norm",
    "accumulation_steps": "accumulation_steps",
}


def check_trains(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that has none of what the model trains: nothing would be trained.

    Raises:
        OptionError: it is of another model, or of other parameters of this one.
    """
    trainable = sum(parameter.requires_grad for parameter in model.parameters())
    if trainable and len(left_out(model, optimizer)) == trainable:
        raise OptionError(
            f"the {_kind(optimizer)} has none of the {trainable} parameters of the model that "
            f"require a gradient, so nothing would be trained. Make it from this model's "
            f"parameters as they are now: after copying it, adding adapters, or replacing layers."
        )


def check_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Refuse a learning rate that the optimizer has its own of.

    Raises:
        OptionError: they differ.
    """
    own = [group["lr"] for group in optimizer.param_groups]
    if any(float(value) != lr for value in own):
        raise OptionError(
            f"lr={lr!r} is for the optimizer that wrap() makes where none is given, and the "
            f"{_kind(optimizer)} has lr={', '.join(str(float(value)) for value in own)}. Set it "
            f"there, and leave lr out."
        )


def say_left_out(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, say: Callable[[str], None]
) -> None:
    """Name the parameters that require a gradient and that the optimizer does not have."""
    missing = set() if optimizer is None else left_out(model, optimizer)
    left = [(name, p) for name, p in model.named_parameters() if id(p) in missing]
    if not left:
        return
    named = ", ".join(f"{name} {tuple(p.shape)}" for name, p in left[:_NAMED])
    size = sum(p.numel() * p.element_size() for _, p in left)
    more = ", ..." if len(left) > _NAMED else ""
    say(
        f"optimizer: {len(left)} parameters of {human(size)} require a gradient and are not in the "
        f"optimizer ({named}{more}): they are not trained, cannot stream, and their gradients "
        f"stay in memory. Freeze them (requires_grad_(False)) or give them to the optimizer"
    )


def say_kept(
    optimizer: torch.optim.Optimizer | None, options: Mapping[str, Any], say: Callable[[str], None]
) -> None:
    """Name options that were given to wrap() and that an OffloadAdamW has otherwise.

    One that joins a session keeps what it was made with where wrap() is given the default.
    """
    if not isinstance(optimizer, OffloadAdamW):
        return
    for name, attribute in _OF_BOTH.items():
        own = getattr(optimizer, attribute)
        if name in options and options[name] != own:
            say(
                f"{name}={options[name]!r}: the OffloadAdamW that was given keeps its own "
                f"{attribute}={own!r}. Make it with {attribute}={options[name]!r} to change that"
            )


def blocks_left_out(
    model: nn.Module, blocks: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None
) -> list[bool]:
    """Per block, whether it has matrices that require a gradient and are not in the optimizer."""
    missing = set() if optimizer is None else left_out(model, optimizer)
    return [any(p.dim() > 1 and id(p) in missing for p in block.parameters()) for block in blocks]


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
    # (One pass over what exists: gc.get_referrers takes as long for each holder of the optimizer.)
    return [
        _kind(value)
        for value in gc.get_objects()
        if issubclass(type(value), LRScheduler)
        and any(held is optimizer for held in vars(value).values())
    ]


def _kind(value: Any) -> str:
    return type(value).__name__
