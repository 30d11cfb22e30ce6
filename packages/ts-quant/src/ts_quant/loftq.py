"""LoftQ-style starts: a quantized weight and the low-rank fit of what quantization lost.

    Q_1 = quantize(W)                   B_1 A_1 = rank-r fit of W - Q_1
    Q_i = quantize(W - B_(i-1) A_(i-1)) B_i A_i = rank-r fit of W - Q_i        (Li et al. 2023)

The alternation need not improve at every step, so the best of its rounds is returned. With
activation statistics the fit weighs input channels by sqrt(E[x^2]) (see `ts_quant.lowrank`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ts_quant.codecs.base import DEFAULT_BLOCK_SIZE, codec_named
from ts_quant.errors import OptionError
from ts_quant.lowrank import LowRankFit, column_scales, fit_low_rank
from ts_quant.tensor import QuantTensor


@dataclass(frozen=True)
class LoftQResult:
    """A quantized weight, and factors that give back part of what it lost.

    Attributes:
        weight: the QuantTensor Q.
        b: fp32 [out, r].
        a: fp32 [r, in]; Q + b @ a approximates the original.
        error: relative error of Q alone (Frobenius, channels weighted if statistics were given).
        error_with_factors: relative error of Q + b @ a, likewise.
        rounds: number of the alternation round that was kept, from 1.
    """

    weight: QuantTensor
    b: Tensor
    a: Tensor
    error: float
    error_with_factors: float
    rounds: int


def loftq(
    w: Tensor,
    codec: str = "nf4",
    rank: int = 16,
    iters: int = 1,
    *,
    block_size: int = DEFAULT_BLOCK_SIZE,
    double_quant: bool = False,
    second_moments: Tensor | None = None,
    name: str | None = None,
    seed: int = 0,
) -> LoftQResult:
    """Quantize a weight and fit what was lost with rank-r factors.

    Adapters that compute `scaling * B A x` must start at B = b / sqrt(scaling), A = a /
    sqrt(scaling); `init_lora_from_error` does that for PEFT.

    Args:
        w: floating [out, in], on any device, where the work is done (in fp32).
        codec: the format.
        rank: directions to fit, at least 1.
        iters: rounds of the alternation, at least 1; with more than one, `weight` alone may be
            further from w than `quantize(w)`, and only weight + factors is what counts.
        block_size: values per scale.
        double_quant: one-byte scales.
        second_moments: [in], E[x^2] of each input channel (`error_stats`), or None.
        name: the weight's name, for error messages.
        seed: of the sampled decomposition of large weights.

    Raises:
        OptionError: an argument that is not accepted.
        NonFiniteWeightError: w holds NaN or infinity.
    """
    _check_count("rank", rank, 1)
    _check_count("iters", iters, 1)
    if w.dim() != 2:
        raise OptionError(f"loftq needs a matrix [out, in], not shape {tuple(w.shape)}")
    chosen = codec_named(codec)
    dense = w.detach()
    if isinstance(dense, QuantTensor):
        dense = dense.dequantize()
    exact = dense.float()
    scale = None
    if second_moments is not None:
        scale = column_scales(second_moments, w.shape[1], exact.device)
    size = fit_low_rank(exact, 0, scale).total
    target, best = dense, None
    for index in range(1, iters + 1):
        encoded = chosen.encode(target, block_size=block_size, double_quant=double_quant, name=name)
        fit = fit_low_rank(exact - encoded.dequantize(torch.float32), rank, scale, seed=seed)
        left = fit.left_over(rank)
        if best is None or left < best[2]:
            best = (encoded, fit, left, index)
        if index < iters:
            target = (exact - fit.b @ fit.a).to(dense.dtype)
    assert best is not None
    encoded, fit, left, index = best
    return LoftQResult(
        encoded,
        fit.b,
        fit.a,
        _relative(fit.total, size),
        _relative(left, size),
        index,
    )


def fit_error(
    w: Tensor, encoded: QuantTensor, rank: int, second_moments: Tensor | None = None
) -> LowRankFit:
    """The rank-r fit of w minus its encoded self."""
    lost = w.detach().float() - encoded.dequantize(torch.float32)
    scale = None
    if second_moments is not None:
        scale = column_scales(second_moments, w.shape[1], lost.device)
    return fit_low_rank(lost, rank, scale)


def _relative(part: float, whole: float) -> float:
    return math.sqrt(part / whole) if whole else 0.0


def _check_count(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"{name}={value!r} is not accepted: use an int of at least {least}")
