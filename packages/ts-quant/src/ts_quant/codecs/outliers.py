"""Outlier channels: a few columns of a matrix kept in bf16 beside the codes of the rest.

    stored   codes and scales of W with those columns set to zero, then
             outlier_values bf16 [out, c], outlier_channels int64 [c], rising
    decoded  the codes, with the columns written over

A column that holds large values widens the scale of every block it crosses. Without it the other
values of those blocks are stored with smaller steps, and the column itself is nearly exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ts_quant.codecs.base import Codec, QuantSpec
from ts_quant.errors import OptionError

if TYPE_CHECKING:
    from ts_quant.codecs.stored import BufferSize

NAMES = ("outlier_values", "outlier_channels")


def names(spec: QuantSpec) -> tuple[str, ...]:
    """Names of the two buffers, or none."""
    return NAMES if spec.outliers else ()


def sizes(spec: QuantSpec, shape: Sequence[int]) -> list[BufferSize]:
    """Dtype and shape of the two buffers of a weight of that shape, or none."""
    if not spec.outliers:
        return []
    return [(torch.bfloat16, (shape[0], spec.outliers)), (torch.int64, (spec.outliers,))]


def without(spec: QuantSpec) -> QuantSpec:
    """How the rest of the matrix is stored."""
    return replace(spec, outliers=0)


def put_back(buffers: Sequence[Tensor], out: Tensor) -> Tensor:
    """Write the outlier columns over those of `out` [out, in]; returns it.

    Allocates a copy of the columns where `out` is not bf16.
    """
    values, channels = buffers
    return out.index_copy_(
        1, channels.view(-1), values.view(out.shape[0], channels.numel()).to(out.dtype)
    )


def encode_with(
    codec: Codec, weight: Tensor, spec: QuantSpec, channels: Tensor, name: str | None
) -> tuple[QuantSpec, tuple[Tensor, ...]]:
    """The spec and the buffers of a matrix with these columns kept apart.

    Args:
        codec: of the rest.
        weight: plain floating [out, in].
        spec: of the rest.
        channels: int64 [c], from `checked`.
        name: the weight's name, for error messages.

    Raises:
        NonFiniteWeightError: the weight holds NaN or infinity, in whatever column.
    """
    values = weight.index_select(1, channels).to(torch.bfloat16)
    rest = weight.index_fill(1, channels, 0.0)
    buffers = codec.encode_checked(rest, spec, name)
    finite = weight.is_meta or bool(torch.isfinite(values).all())
    if not finite:  # then the whole weight says where, unless it rounded to bf16's infinity
        codec.encode_checked(weight, spec, name)
    largest = _LARGEST_OF_FP16 if weight.dtype is torch.float16 else _LARGEST
    values = values.clamp_(-largest, largest)
    return replace(spec, outliers=channels.numel()), (*buffers, values, channels)


def checked(channels: Tensor | Sequence[int], shape: Sequence[int], device: torch.device) -> Tensor:
    """int64 [c], rising, on the device.

    Raises:
        OptionError: the weight is no matrix, or the channels are not distinct columns of it.
    """
    at = channels.device if isinstance(channels, Tensor) else "cpu"
    given = torch.as_tensor(channels, device=at).detach()
    if len(shape) != 2:
        raise OptionError(
            f"outlier_channels are columns of a matrix; the weight has shape {tuple(shape)}"
        )
    whole = not given.numel() or not (given.is_floating_point() or given.dtype is torch.bool)
    if given.dim() != 1 or not whole:
        raise OptionError(
            f"outlier_channels has shape {tuple(given.shape)} and {given.dtype}; expected a list "
            f"of column numbers"
        )
    found = given.to(torch.int64).sort().values
    distinct = bool((found[1:] > found[:-1]).all())
    if not distinct or (found.numel() and not 0 <= int(found[0]) <= int(found[-1]) < shape[1]):
        raise OptionError(
            f"outlier_channels must be distinct column numbers from 0 to {shape[1] - 1}, not "
            f"{found.tolist()[:8]}"
        )
    return found.to(device)


_LARGEST = torch.finfo(torch.bfloat16).max
_LARGEST_OF_FP16 = 65280.0  # bf16's next, 65536, is infinite in fp16
