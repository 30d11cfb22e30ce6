"""The loop over chunks of rows that every loss on an output layer shares."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ts_kernels._checks import check_target_range
from ts_kernels._heads import Head, Wanted
from ts_kernels._softmax_rows import softmax_rows_


class Options(NamedTuple):
    """How to walk the rows. `softcap` None: logits are used as they are."""

    chunk_size: int
    ignore_index: int
    softcap: float | None


class RowLosses(NamedTuple):
    """losses [N] float32; hidden_grad [N, D]: the gradient of their (scaled) sum, or None."""

    losses: Tensor
    hidden_grad: Tensor | None


def walk_chunks(
    hidden: Tensor,
    head: Head,
    classes: int,
    targets: Tensor,
    options: Options,
    wanted: Wanted,
    grad_dtype: torch.dtype,
    scale: Tensor | None = None,
) -> RowLosses:
    """Cross-entropy of every row, and the gradients of sum(scale * loss) if any are wanted.

    Only `chunk_size` rows of logits exist at a time. Weight and bias gradients are left in
    `head`. Runs on the current stream; does not make the host wait for a CUDA device.

    Args:
        hidden: [N, D].
        head: the output layer.
        classes: its number of classes V.
        targets: [N] integer.
        grad_dtype: dtype of `hidden_grad`.
        scale: None, or [N] float32.

    Raises:
        ValueError: a target is out of range (CPU tensors; on CUDA the device asserts).
    """
    check_target_range(targets, classes, options.ignore_index)
    if targets.device.type == "cpu":
        kept = (targets != options.ignore_index).nonzero().squeeze(1)
        if kept.numel() < targets.numel():  # the host knows which rows count: skip the others
            return _walk_some(
                hidden, head, classes, targets, options, wanted, grad_dtype, scale, kept
            )
    rows = hidden.shape[0]
    losses = []
    hidden_grad = (
        torch.empty(hidden.shape, dtype=grad_dtype, device=hidden.device) if wanted.hidden else None
    )
    for start in range(0, rows, options.chunk_size):
        part = slice(start, min(start + options.chunk_size, rows))
        logits = head.logits(hidden[part])
        losses.append(
            softmax_rows_(
                logits,
                targets[part],
                ignore_index=options.ignore_index,
                softcap=options.softcap,
                write_grad=wanted.any,
                scale=None if scale is None else scale[part],
            )
        )
        if wanted.any:
            head.backward(logits, None if hidden_grad is None else hidden_grad[part])
        del logits
    if not losses:
        losses.append(hidden.new_empty(0, dtype=torch.promote_types(hidden.dtype, torch.float32)))
    return RowLosses(losses[0] if len(losses) == 1 else torch.cat(losses), hidden_grad)


def _walk_some(
    hidden: Tensor,
    head: Head,
    classes: int,
    targets: Tensor,
    options: Options,
    wanted: Wanted,
    grad_dtype: torch.dtype,
    scale: Tensor | None,
    kept: Tensor,
) -> RowLosses:
    """`walk_chunks` over the rows `kept` alone; the others have loss and gradient zero."""
    some = walk_chunks(
        hidden[kept],
        head,
        classes,
        targets[kept],
        options,
        wanted,
        grad_dtype,
        None if scale is None else scale[kept],
    )
    losses = some.losses.new_zeros(hidden.shape[0]).index_copy_(0, kept, some.losses)
    if some.hidden_grad is None:
        return RowLosses(losses, None)
    hidden_grad = some.hidden_grad.new_zeros(hidden.shape).index_copy_(0, kept, some.hidden_grad)
    return RowLosses(losses, hidden_grad)
