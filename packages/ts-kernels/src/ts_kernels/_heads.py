"""An output layer seen chunk by chunk: logits of some rows, and the gradients they send back."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor

from ts_kernels._backend import ORDINARY


class Wanted(NamedTuple):
    """Which gradients to compute."""

    hidden: bool
    weight: bool
    bias: bool
    lora_b: bool = False

    @property
    def any(self) -> bool:
        return self.hidden or self.weight or self.bias or self.lora_b


class Head(Protocol):
    """An output layer that is shown some rows at a time, and sums gradients over them."""

    @property
    def weight_grad(self) -> Tensor | None: ...

    @property
    def bias_grad(self) -> Tensor | None: ...

    def logits(self, hidden: Tensor, /) -> Tensor:
        """A fresh [rows, V] that the caller may overwrite."""

    def backward(self, logits_grad: Tensor, hidden_grad: Tensor | None, /) -> None:
        """Adds the rows' part to the sums and writes `hidden_grad` [rows, D]."""


def is_plain(weight: Tensor) -> bool:
    """Whether a weight is an ordinary dense tensor rather than a subclass with its own maths.

    Fake tensors, which stand for ordinary ones while torch.compile traces, count as ordinary.
    """
    kind = type(weight)
    return kind in ORDINARY or _reads_wait(kind) or issubclass(kind, FakeTensor)


def settled(weight: Tensor) -> Tensor:
    """`weight` as an ordinary tensor, after whatever still writes its values.

    A library that updates parameters in the background may change a parameter's class meanwhile to
    a subclass of nn.Parameter that has `reads_wait = True` and whose operations wait. It is as
    plain as before, so it must not depend on timing which kernel runs.
    """
    kind = type(weight)
    return weight if kind in ORDINARY or not _reads_wait(kind) else weight.view_as(weight)


def _reads_wait(kind: type) -> bool:
    return bool(getattr(kind, "reads_wait", False)) and torch.nn.Parameter in kind.__mro__


class DenseHead:
    """An ordinary weight [V, D] and bias [V], used in `compute_dtype`.

    Args:
        weight, bias: of any dtype; converted once if need be.
        compute_dtype: the dtype of the matmuls' inputs and of the logits.
        wanted: the gradients that `backward` computes.
        one_chunk: nothing has to be summed, so the weight's gradient is made in the weight's
            dtype; otherwise it is summed in float32 (float64 for float64).
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        compute_dtype: torch.dtype,
        wanted: Wanted,
        one_chunk: bool = False,
    ) -> None:
        self._weight = weight.to(compute_dtype)
        self._bias = None if bias is None else bias.to(compute_dtype)
        self._dtype = compute_dtype
        self._wide = torch.promote_types(compute_dtype, torch.float32)
        self._sum_dtype = weight.dtype if one_chunk else self._wide
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
            if logits_grad.is_cuda and hidden_grad.dtype.itemsize == 2:
                # a 16-bit result may be summed over V in 16 bits by the matmul library
                hidden_grad.copy_(torch.mm(logits_grad, self._weight, out_dtype=torch.float32))
            elif logits_grad.is_cuda or hidden_grad.dtype == self._dtype:
                _product(logits_grad, self._weight, hidden_grad)
            else:  # not worth a copy of the weight in another dtype
                hidden_grad.copy_(logits_grad @ self._weight)
        if self._wanted.weight:
            assert self._hidden is not None
            if self._weight_grad is None:
                self._weight_grad = torch.empty_like(self._weight, dtype=self._sum_dtype)
                _product(logits_grad.t(), self._hidden, self._weight_grad)
            else:
                _add_product(self._weight_grad, logits_grad.t(), self._hidden)
        if self._wanted.bias:
            part = logits_grad.sum(dim=0, dtype=self._wide)
            self._bias_grad = part if self._bias_grad is None else self._bias_grad.add_(part)

    @property
    def weight_grad(self) -> Tensor | None:
        """[V, D] sum over the chunks seen so far, zero for none; None if not wanted."""
        if self._wanted.weight and self._weight_grad is None:
            return torch.zeros_like(self._weight, dtype=self._sum_dtype)
        return self._weight_grad

    @property
    def bias_grad(self) -> Tensor | None:
        """[V] likewise, in float32 (float64 for float64)."""
        if self._wanted.bias and self._bias_grad is None:
            return self._weight.new_zeros(self._weight.shape[0], dtype=self._wide)
        return self._bias_grad


def _product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out = left @ right, rounded to the dtype of `out` only."""
    if left.dtype == out.dtype:
        torch.mm(left, right, out=out)
    elif out.dtype.itemsize <= left.dtype.itemsize:
        out.copy_(left @ right)
    elif left.is_cuda:
        torch.mm(left, right, out_dtype=out.dtype, out=out)
    else:
        torch.mm(left.to(out.dtype), right.to(out.dtype), out=out)


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
        if not self._wanted.any:
            return
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
