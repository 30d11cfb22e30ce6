"""Which columns of a matrix are worth keeping in bf16.

Keeping column j apart takes away the error of its own values, and makes every block smaller in
which it held the largest magnitude: the steps of a block are a fixed share of that magnitude, so
the squared error of its other values falls in proportion to its square. With s_j^2 = E[x_j^2] (or
1), a1 >= a2 the two largest magnitudes of a block, and kappa the squared error per value and per
a1^2 that the format was found to leave in this matrix,

    gain_j = sum_i s_j^2 (W - Q)_ij^2
           + sum over blocks whose a1 is in column j of  kappa (a1^2 - a2^2) sum of the others' s^2

This ranks the columns (each as if it were the only one, and of NVFP4 and MXFP4 too highly). The
errors of e4m3 codes do not depend on their block, so for fp8 the second term is left out. What a
choice of columns really leaves is measured by encoding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ts_quant.errors import OptionError
from ts_quant.lowrank import column_scales
from ts_quant.tensor import QuantTensor

_VALUES_AT_ONCE = 1 << 22


def channel_gains(
    weight: Tensor, encoded: QuantTensor, second_moments: Tensor | None = None
) -> Tensor:
    """fp64 [in]: by how much the squared error is expected to fall for each column kept apart.

    Args:
        weight: floating [out, in].
        encoded: the same, stored without outliers.
        second_moments: [in], E[x^2], or None.

    Raises:
        OptionError: no matrix and its stored self, or statistics that do not fit.
    """
    if not isinstance(encoded, QuantTensor) or weight.dim() != 2 or weight.shape != encoded.shape:
        raise OptionError(
            f"channels are ranked for a matrix and its QuantTensor; got a {type(weight).__name__} "
            f"of shape {tuple(weight.shape)} and a {type(encoded).__name__} of shape "
            f"{tuple(encoded.shape)}"
        )
    n_out, n_in = weight.shape
    if second_moments is None:
        squares = torch.ones(n_in, device=weight.device)
    else:
        squares = column_scales(second_moments, n_in, weight.device).square()
    decoded = encoded.dequantize()
    width = _width(encoded)
    gains = torch.zeros(n_in, dtype=torch.float64, device=weight.device)
    shrink = torch.zeros_like(gains)
    error = torch.zeros((), dtype=torch.float64, device=weight.device)
    size = torch.zeros_like(error)
    for first, last in _bands(n_out, n_in, width):
        exact = weight[first:last].detach().float()
        lost = (decoded[first:last].float() - exact).square_()
        gains += (lost * squares).sum(0, dtype=torch.float64)
        error += lost.sum(dtype=torch.float64)
        if width < 2:
            continue
        column = torch.arange(n_in, device=weight.device).repeat(last - first)
        padding = -exact.numel() % width
        blocks = torch.nn.functional.pad(exact.abs().view(-1), (0, padding)).view(-1, width)
        weights = torch.nn.functional.pad(squares.repeat(last - first), (0, padding))
        columns = torch.nn.functional.pad(column, (0, padding)).view(-1, width)
        top, place = blocks.topk(2, dim=1)
        owner = columns.gather(1, place[:, :1]).view(-1)
        others = weights.view(-1, width).sum(1) - squares[owner]
        fall = (top[:, 0].square() - top[:, 1].square()) * others
        shrink.index_add_(0, owner, fall.double())
        size += top[:, 0].square().sum(dtype=torch.float64) * width
    if width >= 2 and float(size):
        gains += shrink * (error / size)
    return gains


def worst_channels(
    weight: Tensor, encoded: QuantTensor, count: int, second_moments: Tensor | None = None
) -> Tensor:
    """int64 [count]: the columns with the largest `channel_gains`, the largest first.

    For `ts_quant.quantize(weight, codec, outlier_channels=...)`. All columns where there are fewer.

    Raises:
        OptionError: `count` is no int of at least 0, or as `channel_gains`.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise OptionError(f"count={count!r} is not accepted: use an int of at least 0")
    gains = channel_gains(weight, encoded, second_moments)
    return gains.argsort(descending=True, stable=True)[:count]


def _width(encoded: QuantTensor) -> int:
    """Values per scale along the flattened matrix; 0 where errors do not depend on the scale."""
    return 0 if encoded.codec == "fp8" else encoded.block_size


def _bands(n_out: int, n_in: int, width: int) -> list[tuple[int, int]]:
    """Ranges of rows that begin with a block, to bound temporary memory."""
    whole = width // math.gcd(n_in, width) if width else 1
    step = max(_VALUES_AT_ONCE // max(n_in, 1) // whole, 1) * whole
    return [(first, min(first + step, n_out)) for first in range(0, n_out, step)]
