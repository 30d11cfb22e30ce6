"""How much a format loses on a weight."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ts_quant.codecs.base import DEFAULT_BLOCK_SIZE, Codec, _plain, codec_named

_CHUNK_VALUES = 1 << 22


@dataclass(frozen=True)
class ErrorStats:
    """The difference between a weight and its decoded self.

    Attributes:
        relative: Frobenius norm of the difference over that of the weight; 0 for a weight of
            zeros or without elements.
        max_abs: largest absolute difference of one element, in the weight's units.
    """

    relative: float
    max_abs: float


def error(
    w: Tensor,
    codec: str = "nf4",
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
    double_quant: bool = False,
    name: str | None = None,
) -> ErrorStats:
    """Encode and decode a weight, and say what was lost, in the weight's own dtype.

    Works in chunks of a few million values, on the weight's device, and waits for it.

    Args:
        w: floating tensor of any shape.
        codec: "nf4" or "int8".
        block_size: values per scale.
        double_quant: not available in this version.
        name: the weight's name, for error messages.

    Raises:
        OptionError: an argument that is not accepted.
        NonFiniteWeightError: the weight holds NaN or infinity.
    """
    chosen = codec_named(codec)
    chosen.check_options(block_size, double_quant)
    flat = _plain(w, name).reshape(-1)
    step = max(_CHUNK_VALUES // block_size, 1) * block_size
    lost = total = largest = 0.0
    for start in range(0, flat.numel(), step):
        part = flat[start : start + step]
        a, b, c = _chunk_error(chosen, part, block_size, name)
        lost, total, largest = lost + a, total + b, max(largest, c)
    return ErrorStats(math.sqrt(lost / total) if total else 0.0, largest)


def _chunk_error(
    codec: Codec, part: Tensor, block_size: int, name: str | None
) -> tuple[float, float, float]:
    buffers = codec.encode_checked(part, block_size, name)
    exact = part.double()
    difference = codec.decode(buffers, block_size, part.shape, part.dtype).double() - exact
    sums = torch.stack(
        [difference.square().sum(), exact.square().sum(), difference.abs().max()]
    ).tolist()
    return sums[0], sums[1], sums[2]
