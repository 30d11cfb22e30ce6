"""The best low-rank fit of a matrix, where some columns matter more than others.

    minimize  || (E - B A) diag(s) ||_F   over  B [out, r], A [r, in]

With U S V' the singular value decomposition of E diag(s), the minimum (Eckart and Young 1936) is
B = U_r S_r^(1/2), A = S_r^(1/2) V_r' diag(1 / s). With s_j = sqrt(E[x_j^2]) the norm is the
expected size of the output error for uncorrelated inputs: the diagonal case of QERA (Zhang et al.
2024, arXiv:2410.06040). Without s it is the fit of LoftQ (Li et al. 2023, arXiv:2310.08659).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ts_quant.errors import OptionError

EXACT_SIDE = 256
"""Matrices whose shorter side is at most this are decomposed exactly, larger ones by sampling."""

_OVERSAMPLE = 8
_POWER_ITERATIONS = 3
_SMALLEST_SHARE = 1e-3
"""Column weights below this share of their root mean square are raised to it: a channel that was
silent in the data is not free to be wrong."""


@dataclass(frozen=True)
class LowRankFit:
    """A rank-r fit B @ A, with the largest singular direction first.

    Attributes:
        b: fp32 [out, r].
        a: fp32 [r, in].
        total: the squared norm of the (column-weighted) matrix that was fitted.
        singular: fp32 [r], singular values of the fitted part.
    """

    b: Tensor
    a: Tensor
    total: float
    singular: Tensor

    def left_over(self, rank: int) -> float:
        """The squared norm that remains if only the first `rank` directions are used."""
        return max(self.total - float(self.singular[:rank].double().square().sum()), 0.0)


def fit_low_rank(
    matrix: Tensor, rank: int, column_weights: Tensor | None = None, *, seed: int = 0
) -> LowRankFit:
    """Fit B @ A to `matrix`; see the module's docstring.

    Args:
        matrix: floating [out, in]; computed in fp32 on its device.
        rank: number of directions, at least 0; at most min(out, in) are used.
        column_weights: fp32 [in], positive; None weighs all columns the same.
        seed: of the sampling of large matrices, which leaves torch's own generators alone.

    Raises:
        OptionError: shapes that do not fit.
    """
    if matrix.dim() != 2:
        raise OptionError(
            f"a low-rank fit needs a matrix, not a tensor of shape {tuple(matrix.shape)}"
        )
    n_out, n_in = matrix.shape
    rank = min(rank, n_out, n_in)
    work = matrix.float()
    scale = None
    if column_weights is not None:
        scale = _usable_weights(column_weights, n_in, work.device)
        work = work * scale
    total = float(work.double().square().sum()) if work.numel() < 1 << 22 else _square_sum(work)
    if rank == 0:
        return LowRankFit(
            work.new_zeros(n_out, 0), work.new_zeros(0, n_in), total, work.new_zeros(0)
        )
    u, s, vh = _leading(work, rank, seed)
    root = s.sqrt()
    a = root[:, None] * vh
    if scale is not None:
        a = a / scale
    return LowRankFit(u * root, a, total, s)


def column_scales(second_moments: Tensor, n_in: int, device: torch.device) -> Tensor:
    """sqrt(E[x^2]) per input channel, silent channels raised; fp32 [in].

    Raises:
        OptionError: not one finite, non-negative number per input channel.
    """
    if not isinstance(second_moments, Tensor):
        raise OptionError(
            f"activation statistics must be a tensor with one number per input channel, not "
            f"{type(second_moments).__name__}"
        )
    moments = second_moments.detach().to(device, torch.float32)
    if moments.shape != (n_in,):
        raise OptionError(
            f"activation statistics of shape {tuple(second_moments.shape)} do not fit a weight "
            f"with {n_in} input channels; collect them from the same model"
        )
    if not bool((torch.isfinite(moments) & (moments >= 0)).all()):
        raise OptionError(
            "activation statistics must be finite and not negative (they are means of squares); "
            "collect them again, from data on which the model's activations are finite"
        )
    return _usable_weights(moments.sqrt(), n_in, device)


def _usable_weights(weights: Tensor, n_in: int, device: torch.device) -> Tensor:
    weights = weights.detach().to(device, torch.float32)
    if weights.shape != (n_in,):
        raise OptionError(
            f"column weights have shape {tuple(weights.shape)}; expected ({n_in},), one per column"
        )
    typical = weights.square().mean().sqrt()
    if float(typical) == 0.0:
        return torch.ones_like(weights)
    return weights.clamp_min(float(typical) * _SMALLEST_SHARE)


def _square_sum(matrix: Tensor) -> float:
    """Sum of squares in fp64, in slices of rows, to bound temporary memory."""
    step = max((1 << 22) // max(matrix.shape[1], 1), 1)
    return sum(
        float(matrix[row : row + step].double().square().sum())
        for row in range(0, matrix.shape[0], step)
    )


def _leading(matrix: Tensor, rank: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `rank` leading singular triples.

    Large matrices: Halko, Martinsson and Tropp 2011 (arXiv:0909.4061), algorithm 4.4: a random
    sketch, sharpened by power iterations, then an exact decomposition in the sketched space.
    """
    if min(matrix.shape) <= max(EXACT_SIDE, rank + _OVERSAMPLE):
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        return u[:, :rank], s[:rank], vh[:rank]
    generator = torch.Generator("cpu").manual_seed(seed)
    shape = (matrix.shape[1], rank + _OVERSAMPLE)
    sketch = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    basis = torch.linalg.qr(matrix @ sketch.to(matrix)).Q
    for _ in range(_POWER_ITERATIONS):
        back = torch.linalg.qr(matrix.t() @ basis).Q
        basis = torch.linalg.qr(matrix @ back).Q
    u, s, vh = torch.linalg.svd(basis.t() @ matrix, full_matrices=False)
    return (basis @ u)[:, :rank], s[:rank], vh[:rank]
