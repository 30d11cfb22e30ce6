"""Turning a torch Adam optimizer into an OffloadAdamW, hyper-parameters and state included."""

from __future__ import annotations

from typing import Any

import torch

from ts_core.errors import OptionError
from ts_core.optim import checks
from ts_core.optim.adamw import OffloadAdamW


def convert_optimizer(optimizer: torch.optim.Optimizer, **options: Any) -> OffloadAdamW:
    """An OffloadAdamW with the groups, hyper-parameters and state of `optimizer`.

    Args:
        optimizer: torch.optim.AdamW or torch.optim.Adam (with weight_decay=0, since Adam's decay
            is another formula).
        **options: passed to OffloadAdamW.

    Raises:
        OptionError: another optimizer, or a flag that has no counterpart.
    """
    check_convertible(optimizer)
    kept = ("params", "lr", "betas", "eps", "weight_decay", "initial_lr", "param_names")
    groups = [
        {name: group[name] for name in kept if name in group} for group in optimizer.param_groups
    ]
    converted = OffloadAdamW(groups, **options)
    if optimizer.state:
        saved = optimizer.state_dict()
        for group in saved["param_groups"]:
            group["decoupled_weight_decay"] = True
        converted.load_state_dict(saved)
    return converted


def check_convertible(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what `convert_optimizer` would refuse, changing nothing."""
    if type(optimizer) not in (torch.optim.AdamW, torch.optim.Adam):
        raise OptionError(
            f"optimizer of type {type(optimizer).__name__} is not accepted. Use "
            f"torch.optim.AdamW, torch.optim.Adam, OffloadAdamW, or None to have one made."
        )
    for number, group in enumerate(optimizer.param_groups):
        for flag in checks.UNLIKE_PLAIN:
            if group.get(flag):
                raise OptionError(
                    f"param group {number} has {flag}=True, which OffloadAdamW does not have. "
                    f"Build the optimizer without it."
                )
        decoupled = group.get("decoupled_weight_decay", type(optimizer) is torch.optim.AdamW)
        if group["weight_decay"] and not decoupled:
            raise OptionError(
                f"param group {number} of torch.optim.Adam has weight_decay="
                f"{group['weight_decay']}, added to the gradient. OffloadAdamW decays weights "
                f"directly: use torch.optim.AdamW, or weight_decay=0."
            )
