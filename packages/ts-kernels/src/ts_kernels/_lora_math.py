"""The adapter's products of a LoRA linear layer, given the base layer's result or gradient.

    t = scaling * x A^T      y = base(x) + t B^T
    u = scaling * dy B       dA = u^T x      dB = dy^T t      dx = base's dx + u A

x [N, in], y and dy [N, out], A [r, in], B [out, r]. Hu et al., "LoRA", 2021.

The adapter multiplies in its own dtype, or autocast's. Where that is float32 and the layer is
bfloat16 on CUDA, float32 factors are split into bfloat16 parts (`_split`) instead of converting x
and dy to float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ts_kernels._precision import cast
from ts_kernels._split import factor_columns, factor_rows, merge_and_split, wide_product


class Adapter(NamedTuple):
    """A [r, in], B [out, r], in their own dtype; `dtype` is that of the products."""

    a: Tensor
    b: Tensor
    scaling: float
    dtype: torch.dtype


class AdapterGrads(NamedTuple):
    """Gradients by x (base's included), A and B; None where not wanted."""

    x: Tensor | None
    a: Tensor | None
    b: Tensor | None


def uses_split(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether float32 factors are split for bfloat16 tensor cores."""
    return x.is_cuda and x.dtype == torch.bfloat16 and dtype == torch.float32


def add_update_(y: Tensor, x: Tensor, adapter: Adapter) -> Tensor:
    """Adds t B^T to y [N, out] in place.

    Returns:
        t [N, r] in the products' dtype, or split in bfloat16 parts [N, 3 r], for `gradients`.
    """
    a, b, scaling, dtype = adapter
    if uses_split(x, dtype):
        t = merge_and_split(wide_product(x, factor_rows(a)[a.shape[0] :].t()), scaling)
        y.addmm_(t, factor_columns(b).t())
        return t
    t = scaled_product(cast(x, dtype), cast(a, dtype).t(), scaling)
    if y.dtype == dtype:
        y.addmm_(t, cast(b, dtype).t())
    else:
        y.add_(t @ cast(b, dtype).t())
    return t


def gradients(
    dy: Tensor,
    x: Tensor,
    t: Tensor,
    adapter: Adapter,
    base_dx: Tensor | None,
    want_a: bool,
    want_b: bool,
) -> AdapterGrads:
    """The gradients, given t of `add_update_`.

    Args:
        base_dx: [N, in], the base layer's input gradient, which is written over and returned;
            None if x needs no gradient.
    """
    a, b, scaling, dtype = adapter
    if uses_split(x, dtype):
        return _split_gradients(dy, x, t, adapter, base_dx, want_a, want_b)
    wide_dy = cast(dy, dtype)
    da = db = None
    if want_b:
        db = _product(wide_dy.t(), t, b.dtype)
    if want_a or base_dx is not None:
        u = scaled_product(wide_dy, cast(b, dtype), scaling)
        if want_a:
            da = _product(u.t(), cast(x, dtype), a.dtype)
        if base_dx is not None and base_dx.dtype == dtype:
            base_dx.addmm_(u, cast(a, dtype))
        elif base_dx is not None:
            base_dx.add_(u @ cast(a, dtype))
    return AdapterGrads(base_dx, da, db)


def _split_gradients(
    dy: Tensor,
    x: Tensor,
    t: Tensor,
    adapter: Adapter,
    base_dx: Tensor | None,
    want_a: bool,
    want_b: bool,
) -> AdapterGrads:
    a, b, scaling, _ = adapter
    rank = a.shape[0]
    da = db = None
    if want_b:
        parts = wide_product(dy.t(), t[:, : 2 * rank])
        db = parts[:, :rank] + parts[:, rank:]
    if want_a or base_dx is not None:
        u = merge_and_split(wide_product(dy, factor_columns(b)[:, rank:]), scaling)
        if want_a:
            parts = wide_product(u[:, : 2 * rank].t(), x)
            da = parts[:rank] + parts[rank:]
        if base_dx is not None:
            base_dx.addmm_(u, factor_rows(a))
    return AdapterGrads(base_dx, da, db)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right in `dtype`, rounded once where the device can."""
    if left.is_cuda and dtype == torch.float32 and left.dtype.itemsize == 2:
        return wide_product(left, right)
    return (left @ right).to(dtype)


def scaled_product(left: Tensor, right: Tensor, scaling: float) -> Tensor:
    """scaling * left @ right, rounded once."""
    if scaling == 1:
        return left @ right
    ignored = left.new_empty(left.shape[0], right.shape[1])
    return torch.addmm(ignored, left, right, beta=0, alpha=scaling)
