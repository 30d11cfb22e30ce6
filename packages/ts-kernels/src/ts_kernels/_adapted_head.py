"""A LoRA adapter on an output layer, in the losses that never build the logits.

    logits = hidden W^T + bias + t B^T,        t = scaling * hidden A^T  [N, r]

The losses see [hidden, t] side by side, [N, D + r], and B beside W. The gradient of the one splits
into those of hidden and t, from which autograd reaches A.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ts_kernels._heads import Head
from ts_kernels._lora_math import scaled_product
from ts_kernels._precision import matmul_dtype, without_autocast


class LoraAdapter(NamedTuple):
    """An adapter on an output layer: `a` [r, D], `b` [V, r], of one floating dtype."""

    a: Tensor
    b: Tensor
    scaling: float = 1.0


def check_adapter(lora: LoraAdapter, hidden: Tensor, weight: Tensor) -> None:
    """Raises ValueError where an adapter does not fit an output layer [V, D]."""
    a, b, scaling = lora
    rank = a.shape[0] if a.dim() == 2 else 0
    if rank < 1 or a.shape != (rank, weight.shape[1]) or b.shape != (weight.shape[0], rank):
        raise ValueError(
            f"lora has a {tuple(a.shape)} and b {tuple(b.shape)}; expected [r, {weight.shape[1]}] "
            f"and [{weight.shape[0]}, r] with r of at least 1, for a weight of shape "
            f"{tuple(weight.shape)}."
        )
    if not a.is_floating_point() or a.dtype != b.dtype or not a.device == b.device == hidden.device:
        raise ValueError(
            f"lora has a in {a.dtype} on {a.device} and b in {b.dtype} on {b.device}; expected one "
            f"floating dtype, on {hidden.device} as hidden."
        )
    if isinstance(scaling, bool) or not isinstance(scaling, (int, float)):
        raise ValueError(f"lora has the scaling {scaling!r}; expected a number.")


def beside(hidden: Tensor, lora: LoraAdapter) -> Tensor:
    """[hidden, t] of hidden [N, D]: [N, D + r] in hidden's dtype."""
    device_type = hidden.device.type
    dtype = lora.a.dtype
    if torch.is_autocast_enabled(device_type) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device_type)
    if torch.compiler.is_compiling():
        with without_autocast(hidden):
            t = scaled_product(hidden.to(dtype), lora.a.to(dtype).t(), float(lora.scaling))
            return torch.cat((hidden, t.to(hidden.dtype)), dim=1)
    apply: Any = _Beside.apply
    both: Tensor = apply(hidden, lora.a, float(lora.scaling), dtype)
    return both


class _Beside(torch.autograd.Function):
    """Keeps hidden as it is for backward, not its copy in the adapter's dtype."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, a: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(hidden, a)
        ctx.scaling, ctx.dtype = scaling, dtype
        with without_autocast(hidden):
            t = scaled_product(hidden.to(dtype), a.to(dtype).t(), scaling)
            return torch.cat((hidden, t.to(hidden.dtype)), dim=1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, a = ctx.saved_tensors
        width = a.shape[1]
        with without_autocast(hidden):
            dt = grads[0][:, width:].to(ctx.dtype) * ctx.scaling
            d_hidden = d_a = None
            if ctx.needs_input_grad[0]:
                through = dt @ a.to(ctx.dtype)
                d_hidden = (grads[0][:, :width] + through).to(hidden.dtype)
            if ctx.needs_input_grad[1]:
                d_a = (dt.t() @ hidden.to(ctx.dtype)).to(a.dtype)
        return d_hidden, d_a, None, None


class AdaptedHead:
    """A head with an adapter's B [V, r] beside it; takes rows of [hidden, t].

    Args:
        head: the output layer itself.
        b: of any floating dtype; converted to the logits' once.
        wants_b: whether B's gradient is summed, in float32 (float64 for float64).
    """

    def __init__(self, head: Head, b: Tensor, wants_b: bool) -> None:
        self._head = head
        self._b = b
        self._wants_b = wants_b
        self._t: Tensor | None = None
        self.b_grad: Tensor | None = None

    def logits(self, rows: Tensor) -> Tensor:
        """A fresh [rows, V] that the caller may overwrite."""
        width = rows.shape[1] - self._b.shape[1]
        logits = self._head.logits(rows[:, :width])
        self._b = self._b.to(logits.dtype)
        self._t = rows[:, width:].to(logits.dtype)
        return logits.addmm_(self._t, self._b.t())

    def backward(self, logits_grad: Tensor, rows_grad: Tensor | None) -> None:
        """Adds the chunk's part to the sums and writes `rows_grad` [rows, D + r]."""
        assert self._t is not None
        width = None if rows_grad is None else rows_grad.shape[1] - self._b.shape[1]
        self._head.backward(logits_grad, None if rows_grad is None else rows_grad[:, :width])
        if rows_grad is not None:
            rows_grad[:, width:] = _wide(logits_grad, self._b)
        if self._wants_b:
            part = _wide(logits_grad.t(), self._t)
            part = part.to(torch.promote_types(part.dtype, torch.float32))
            self.b_grad = part if self.b_grad is None else self.b_grad.add_(part)

    @property
    def weight_grad(self) -> Tensor | None:
        return self._head.weight_grad

    @property
    def bias_grad(self) -> Tensor | None:
        return self._head.bias_grad


def adapter_grad(head: Head, lora_b: Tensor | None) -> Tensor | None:
    """B's gradient, summed over the chunks, zero for none; None without an adapter."""
    if lora_b is None or not isinstance(head, AdaptedHead):
        return None
    if head.b_grad is not None:
        return head.b_grad
    return lora_b.new_zeros(lora_b.shape, dtype=torch.promote_types(lora_b.dtype, torch.float32))


def _wide(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, in float32 where the device gives 16-bit products so."""
    dtype = matmul_dtype(left, left.dtype)
    return left @ right if dtype == left.dtype else torch.mm(left, right, out_dtype=dtype)
