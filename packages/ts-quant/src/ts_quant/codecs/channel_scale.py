"""A factor per input channel beside the codes of a weight (AWQ's `pre_quant_scale`).

    decoded[..., j] = value[..., j] * channel_scale[j]        channel_scale fp32 [in]

Such checkpoints multiply the layer's inputs instead, y = (x * s) @ Q.T, which is x @ (Q * s).T: the
factors belong to the weight. So `dequantize`, `F.linear`, adapters, merging and `state_dict` all
see Q * s, and none of them needs to know. The codes' value is rounded to the output's dtype, then
multiplied in fp32 and rounded again: as often as inputs and weight are rounded the other way.
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

NAME = "channel_scale"
_VALUES_AT_ONCE = 1 << 20


def names(spec: QuantSpec) -> tuple[str, ...]:
    """Name of the buffer, or none."""
    return (NAME,) if spec.channel_scale else ()


def sizes(spec: QuantSpec, shape: Sequence[int]) -> list[BufferSize]:
    """Dtype and shape of the buffer of a weight of that shape, or none."""
    return [(torch.float32, (shape[-1],))] if spec.channel_scale else []


def without(spec: QuantSpec) -> QuantSpec:
    """How the codes are stored."""
    return replace(spec, channel_scale=False)


def check(value: object, shape: Sequence[int], outliers: int) -> bool:
    """The entry of a layout, refused where it cannot be.

    Raises:
        OptionError: it is no bool, the weight has no columns, or outlier channels are kept apart.
    """
    if not isinstance(value, bool):
        raise OptionError(f"layout's {NAME}={value!r} is not accepted: expected True or False")
    if value and (len(shape) < 2 or outliers):
        raise OptionError(
            f"layout's {NAME}=True is not accepted for a weight of shape {tuple(shape)} with "
            f"{outliers} outlier channels: expected a matrix or a stack of them, without outliers"
        )
    return value


def apply(scale: Tensor, out: Tensor) -> Tensor:
    """Multiply the columns of `out` [..., in] in place; returns it.

    On a GPU nothing is allocated; on a CPU a band of rows is multiplied at a time, since torch
    makes a fp32 copy of what it multiplies.
    """
    scale = scale.view(-1)
    plain = type(out) is Tensor and not torch.compiler.is_compiling()
    if not plain or out.device.type != "cpu" or out.dtype is torch.float32 or not out.numel():
        return out.mul_(scale)
    rows = out.view(-1, out.shape[-1])
    for band in rows.split(max(_VALUES_AT_ONCE // rows.shape[1], 1)):
        band.mul_(scale)
    return out


def encode_with(
    codec: Codec, weight: Tensor, spec: QuantSpec, scale: Tensor, name: str | None
) -> tuple[Tensor, ...]:
    """The buffers of new values for a weight that keeps its factors.

    Args:
        codec: of the codes.
        weight: plain floating [..., in].
        spec: with `channel_scale`.
        scale: fp32 [in].
        name: the weight's name, for error messages.

    Raises:
        NonFiniteWeightError: the weight, or what is left of it after dividing by the factors, holds
            NaN or infinity.
    """
    divided = weight.to(torch.float32).div(scale.view(-1)).to(weight.dtype)
    return (*codec.encode_checked(divided, without(spec), name), scale)
