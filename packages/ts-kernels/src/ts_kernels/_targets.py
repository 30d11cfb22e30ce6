"""Targets: shifting and counting."""

from __future__ import annotations

import torch
from torch import Tensor


def shifted(labels: Tensor, ignore_index: int) -> Tensor:
    """labels [..., T] moved one step left, so that position t holds the label of t + 1."""
    targets = torch.full_like(labels, ignore_index)
    targets[..., :-1] = labels[..., 1:]
    return targets


def count_targets(targets: Tensor, *, ignore_index: int = -100, shift: bool = False) -> Tensor:
    """How many targets count: the divisor of the mean, and what to add up for `num_items`.

    Args:
        targets: [..., T] integer.
        ignore_index: targets equal to this do not count.
        shift: leave out the first of each sequence, as `causal_lm_loss` does.

    Returns:
        0-d int64 tensor on the targets' device; the host does not wait for it.
    """
    if shift:
        targets = targets[..., 1:]
    return (targets != ignore_index).sum()


def divisor(num_items: int | Tensor, device: torch.device) -> int | Tensor:
    """`num_items`, but at least 1, so that a window in which nothing counts has loss 0 / 1.

    Raises:
        ValueError: a negative or non-integer number, or a tensor of several elements.
    """
    if isinstance(num_items, Tensor):
        if num_items.numel() != 1:
            raise ValueError(
                f"num_items has shape {tuple(num_items.shape)}; expected a tensor of one element. "
                f"Sum the counts of the window first."
            )
        return num_items.detach().reshape(()).to(device, non_blocking=True).clamp(min=1)
    if isinstance(num_items, bool) or not isinstance(num_items, int) or num_items < 0:
        raise ValueError(
            f"num_items is {num_items!r}; expected None, an integer of at least 0 or a tensor."
        )
    return max(num_items, 1)
