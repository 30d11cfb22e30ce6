"""How much a format loses on a weight."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ts_quant.codecs.base import DEFAULT_BLOCK_SIZE, Codec, QuantSpec, _plain, codec_named
from ts_quant.lowrank import column_scales
from ts_quant.tensor import QuantTensor

_CHUNK_VALUES = 1 << 22
_ROWS_AT_ONCE = 1 << 22


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

    Works in chunks of a few million values where the format allows it (nvfp4 and double_quant
    decode the whole weight), on the weight's device, and waits for it.

    Args:
        w: floating tensor of any shape.
        codec: a codec's name, as in `quantize`.
        block_size: values per scale.
        double_quant: as in `quantize`.
        name: the weight's name, for error messages.

    Raises:
        OptionError: an argument that is not accepted.
        NonFiniteWeightError: the weight holds NaN or infinity.
    """
    chosen = codec_named(codec)
    weight = _plain(w, name)
    spec = chosen.spec_for(weight.shape, block_size, double_quant)
    flat = weight.reshape(-1)
    # Layouts in which blocks share a number need the whole weight; the others go in chunks.
    whole = spec.scales in ("e4m3", "log8")
    step = max(_CHUNK_VALUES // spec.block_size, 1) * spec.block_size
    step = max(flat.numel(), 1) if whole else step
    lost = total = largest = 0.0
    for start in range(0, flat.numel(), step):
        part = flat[start : start + step]
        a, b, c = _chunk_error(chosen, part, spec, name)
        lost, total, largest = lost + a, total + b, max(largest, c)
    return ErrorStats(math.sqrt(lost / total) if total else 0.0, largest)


def _chunk_error(
    codec: Codec, part: Tensor, spec: QuantSpec, name: str | None
) -> tuple[float, float, float]:
    buffers = codec.encode_checked(part, spec, name)
    decoded = codec.decode(buffers, spec, part.shape, part.dtype)
    lost = total = largest = 0.0
    pairs = zip(decoded.split(_CHUNK_VALUES), part.split(_CHUNK_VALUES), strict=True)
    for got, exact in pairs:
        difference = got.double() - exact.double()
        sums = torch.stack(
            [difference.square().sum(), exact.double().square().sum(), difference.abs().max()]
        ).tolist()
        lost, total, largest = lost + sums[0], total + sums[1], max(largest, sums[2])
    return lost, total, largest


def squared_error(
    weight: Tensor, encoded: QuantTensor, second_moments: Tensor | None = None
) -> float:
    """|| (W - Q) diag(s) ||^2 / || W diag(s) ||^2, with s^2 = E[x^2] or 1; 0 for a W of zeros.

    Computed in fp32 products and fp64 sums, in slices of rows beside one decoded copy.
    """
    scale = None
    if second_moments is not None and weight.dim() == 2:
        scale = column_scales(second_moments, weight.shape[1], weight.device)
    flat = weight.detach().flatten(0, -2) if weight.dim() > 1 else weight.detach().reshape(1, -1)
    decoded = encoded.dequantize().reshape(flat.shape)
    step = max(_ROWS_AT_ONCE // max(flat.shape[1], 1), 1)
    lost = torch.zeros((), dtype=torch.float64, device=weight.device)
    total = torch.zeros_like(lost)
    for row in range(0, flat.shape[0], step):
        exact = flat[row : row + step].float()
        difference = decoded[row : row + step].float() - exact
        if scale is not None:
            difference, exact = difference * scale, exact * scale
        lost += difference.double().square().sum()
        total += exact.double().square().sum()
    whole = float(total)
    return float(lost) / whole if whole else 0.0
