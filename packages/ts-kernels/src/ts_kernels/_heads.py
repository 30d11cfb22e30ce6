"""An output layer seen chunk by chunk: logits of some rows, and the gradients they send back."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Wanted(NamedTuple):
    """Which gradients to compute."""

    hidden: bool
    weight: bool
    bias: bool

    @property
    def any(self) -> bool:
        return self.hidden or self.weight or self.bias


def is_plain(weight: Tensor) -> bool:
    """Whether a weight is an ordinary dense tensor rather than a subclass with its own maths.

    Fake tensors, which stand for ordinary ones while torch.compile traces, count as ordinary.
    """
    if type(weight) in (Tensor, torch.nn.Parameter):
        return True
    from torch._subclasses import FakeTensor

    return isinstance(weight, FakeTensor)


def weight_grad_dtype(compute_dtype: torch.dtype, rows: int, chunk_size: int) -> torch.dtype:
    """The dtype in which a weight's unscaled gradient is held until backward.

    Several chunks are summed in float32; the product of a single one is rounded anyway. fp16 could
    overflow before it is scaled.
    """
    if rows <= chunk_size and compute_dtype == torch.bfloat16:
        return compute_dtype
    return torch.promote_types(compute_dtype, torch.float32)


class DenseHead:
    """An ordinary weight [V, D] and bias [V], used in `compute_dtype`.

    The weight's gradient is summed over the chunks in `grad_dtype`, the bias's in float32 (float64
    for float64).
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        compute_dtype: torch.dtype,
        wanted: Wanted,
        grad_dtype: torch.dtype = torch.float32,
    ) -> None:
        self._weight = weight.to(compute_dtype)
        self._bias = None if bias is None else bias.to(compute_dtype)
        self._dtype = compute_dtype
        self._grad_dtype = grad_dtype
        self._wanted = wanted
        self._hidden: Tensor | None = None
        self._weight_grad: Tensor | None = None
        self._bias_grad: Tensor | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """A fresh [rows, V] in the compute dtype that the caller may overwrite."""
        self._hidden = hidden.to(self._dtype)
        return F.linear(self._hidden, self._weight, self._bias)

    def backward(self, logits_grad: Tensor, hidden_grad: Tensor | None) -> None:
        """Adds the chunk's part to the sums and writes `hidden_grad` [rows, D]."""
        if hidden_grad is not None:
            torch.mm(logits_grad, self._weight, out=hidden_grad)
        if self._wanted.weight:
            assert self._hidden is not None
            if self._weight_grad is None:
                self._weight_grad = _product(logits_grad.t(), self._hidden, self._grad_dtype)
            else:
                _add_product(self._weight_grad, logits_grad.t(), self._hidden)
        if self._wanted.bias:
            wide = torch.promote_types(self._dtype, torch.float32)
            part = logits_grad.sum(dim=0, dtype=wide)
            self._bias_grad = part if self._bias_grad is None else self._bias_grad.add_(part)

    @property
    def weight_grad(self) -> Tensor | None:
        """[V, D] sum over the chunks seen so far, zero for none; None if not wanted."""
        if self._wanted.weight and self._weight_grad is None:
            return torch.zeros_like(self._weight, dtype=self._grad_dtype)
        return self._weight_grad

    @property
    def bias_grad(self) -> Tensor | None:
        """[V] likewise."""
        if self._wanted.bias and self._bias_grad is None:
            wide = torch.promote_types(self._dtype, torch.float32)
            return self._weight.new_zeros(self._weight.shape[0], dtype=wide)
        return self._bias_grad


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right, rounded to `dtype` only."""
    if left.dtype == dtype:
        return left @ right
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=dtype)
    return left.to(dtype) @ right.to(dtype)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, rounded to the dtype of `total` only."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif left.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(left.to(total.dtype), right.to(total.dtype))


class SubclassHead:
    """A weight of any tensor subclass (quantized, sharded, ...): `F.linear` is asked to use it.

    The object is kept, never a dense copy of it, and what it does in forward and backward is its
    own business. Autocast applies to it as it does to `F.linear`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, wanted: Wanted) -> None:
        self._weight = weight.detach().requires_grad_() if wanted.weight else weight
        self._bias = bias
        if bias is not None:
            self._bias = bias.detach().requires_grad_(wanted.bias)
        self._wanted = wanted
        self._hidden: Tensor | None = None
        self._logits: Tensor | None = None
        self.weight_grad: Tensor | None = None
        self.bias_grad: Tensor | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """A fresh [rows, V] that the caller may overwrite."""
        with torch.set_grad_enabled(self._wanted.any):
            self._hidden = hidden.detach().requires_grad_(self._wanted.hidden)
            self._logits = F.linear(self._hidden, self._weight, self._bias)
        logits = self._logits.detach()
        if logits.is_contiguous():
            # We write over it without telling autograd. Say so, so that a subclass that saved its
            # own output for backward gets autograd's error instead of a wrong gradient.
            torch.autograd.graph.increment_version(logits)
            return logits
        return logits.contiguous()

    def backward(self, logits_grad: Tensor, hidden_grad: Tensor | None) -> None:
        """Adds the chunk's part to the sums and writes `hidden_grad` [rows, D]."""
        assert self._logits is not None and self._hidden is not None
        sources = [self._hidden] if self._wanted.hidden else []
        if self._wanted.weight:
            sources.append(self._weight)
        if self._wanted.bias:
            assert self._bias is not None
            sources.append(self._bias)
        grads = list(torch.autograd.grad(self._logits, sources, logits_grad))
        if self._wanted.hidden:
            grad = grads.pop(0)
            if hidden_grad is not None:
                hidden_grad.copy_(grad)
        if self._wanted.weight:
            self.weight_grad = _sum(self.weight_grad, grads.pop(0))
        if self._wanted.bias:
            self.bias_grad = _sum(self.bias_grad, grads.pop(0))
        self._logits = self._hidden = None


def _sum(total: Tensor | None, grad: Tensor) -> Tensor:
    wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
    return wide if total is None else total + wide


Head = DenseHead | SubclassHead
