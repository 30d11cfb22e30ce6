"""Validation of arguments: says what was wrong, what was expected and what to do."""

from __future__ import annotations

import torch
from torch import Tensor

_TARGET_DTYPES = (torch.int64, torch.int32)


def check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """hidden [..., D] against an output layer weight [V, D], bias [V].

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    if not hidden.is_floating_point():
        raise ValueError(f"hidden has dtype {hidden.dtype}; expected a floating dtype.")
    if hidden.dim() < 1 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}; expected "
            f"hidden [..., D] and weight [V, D] with the same D. Pass the output layer's weight "
            f"as nn.Linear stores it."
        )
    if weight.shape[0] == 0:
        raise ValueError("weight has no rows; expected at least one class.")
    if bias is not None and bias.shape != (weight.shape[0],):
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}; expected ({weight.shape[0]},), one per class."
        )


def check_targets(targets: Tensor, hidden: Tensor, name: str) -> None:
    """Integer targets [...] for hidden [..., D].

    Raises:
        ValueError: another shape, dtype or device.
    """
    if targets.dtype not in _TARGET_DTYPES:
        raise ValueError(f"{name} has dtype {targets.dtype}; expected torch.int64 or int32.")
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"{name} has shape {tuple(targets.shape)}; expected {tuple(hidden.shape[:-1])}, one "
            f"for each row of hidden {tuple(hidden.shape)}."
        )
    if targets.device != hidden.device:
        raise ValueError(
            f"{name} is on {targets.device} and hidden on {hidden.device}; expected one device. "
            f"Move {name} with .to(hidden.device)."
        )


def check_options(chunk_size: int, logit_softcap: float | None) -> None:
    """Options that every loss of an output layer shares.

    Raises:
        ValueError: chunk_size is not an integer of at least 1, or the cap is not positive.
    """
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size!r}; expected an integer of at least 1.")
    if logit_softcap is not None and not logit_softcap > 0:
        raise ValueError(f"logit_softcap is {logit_softcap!r}; expected None or a number above 0.")


TARGET_MESSAGE = "ts_kernels: a target is outside [0, classes) and is not ignore_index"


def out_of_range(targets: Tensor, classes: int, ignore_index: int) -> Tensor:
    """[rows] bool: True where a target is neither a class nor `ignore_index`."""
    return ((targets < 0) | (targets >= classes)) & (targets != ignore_index)


def check_target_range(targets: Tensor, classes: int, ignore_index: int) -> None:
    """Refuses targets [rows] outside [0, classes) that are not `ignore_index`.

    Not on CUDA, where the host would have to wait: there the computation asserts it on the device.

    Raises:
        ValueError: a target is out of range.
    """
    if targets.is_cuda:
        return
    bad = out_of_range(targets, classes, ignore_index)
    if bool(bad.any()):
        position = int(bad.nonzero()[0, 0])
        raise ValueError(
            f"target {int(targets[position])} at row {position} is out of range; expected "
            f"0 <= target < {classes} (the rows of weight) or ignore_index={ignore_index}. Check "
            f"that the labels and the output layer belong to the same tokenizer."
        )
