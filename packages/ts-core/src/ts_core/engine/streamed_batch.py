"""Cutting a batch in microbatches, joining their results, and moving arguments to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ts_core.engine.streamed_autograd import fill_tensors, take_tensors
from ts_core.errors import DataError

Piece = tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]


def move(value: Any, device: torch.device) -> Any:
    """`value` with every tensor in it on `device` (differentiable)."""
    tensors: list[torch.Tensor] = []
    structure = take_tensors(value, tensors)
    return fill_tensors(structure, [tensor.to(device) for tensor in tensors])


def split(
    hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], count: int
) -> list[Piece]:
    """`count` pieces of a batch, sizes as equal as can be; fewer when the batch is smaller.

    Tensors in the arguments whose dimension 0 is the batch's size are cut with it; others go to
    every piece.

    Raises:
        DataError: the hidden state has no batch dimension, or an argument may be meant either way.
    """
    if count == 1:
        return [(hidden, args, kwargs)]
    if hidden.dim() == 0 or hidden.shape[0] == 0:
        raise DataError(
            f"microbatches={count} cuts dimension 0 of the hidden state, which has shape "
            f"{tuple(hidden.shape)}. Pass a batch, or use microbatches=1."
        )
    batch = hidden.shape[0]
    count = min(count, batch)
    tensors: list[torch.Tensor] = []
    structure = take_tensors((args, kwargs), tensors)
    cut: list[Sequence[torch.Tensor]] = []
    for tensor in tensors:
        if batch > 1 and tensor.dim() > 0 and tensor.shape[0] == batch:
            if tensor.dim() == 2 and tensor.shape[1] == batch:
                raise DataError(
                    f"an argument of shape {tuple(tensor.shape)} may be one matrix for every "
                    f"microbatch or one row per sample of the batch of {batch}. Pass "
                    f"tensor.unsqueeze(0) for the first, tensor.unsqueeze(1) for the second."
                )
            cut.append(torch.tensor_split(tensor, count))
        else:
            cut.append([tensor] * count)
    pieces: list[Piece] = []
    for k, piece in enumerate(torch.tensor_split(hidden, count)):
        mine, named = fill_tensors(structure, [parts[k] for parts in cut])
        pieces.append((piece, mine, named))
    return pieces


def join(results: Sequence[Any], pieces: Sequence[torch.Tensor]) -> Any:
    """One result from those of the microbatches: tensors are concatenated along the batch.

    Raises:
        DataError: a tensor in a result has no dimension 0 of its microbatch's size.
    """
    if len(results) == 1:
        return results[0]
    parts: list[list[torch.Tensor]] = []
    structures = []
    for result, piece in zip(results, pieces, strict=True):
        tensors: list[torch.Tensor] = []
        structures.append(take_tensors(result, tensors))
        parts.append(tensors)
        for tensor in tensors:
            if tensor.dim() == 0 or tensor.shape[0] != piece.shape[0]:
                raise DataError(
                    f"the last block returned a tensor of shape {tuple(tensor.shape)} for a "
                    f"microbatch of {piece.shape[0]}, which cannot be joined along the batch. "
                    f"Return per-sample values, or use microbatches=1."
                )
    joined = [torch.cat(together) for together in zip(*parts, strict=True)]
    return fill_tensors(structures[0], joined)
