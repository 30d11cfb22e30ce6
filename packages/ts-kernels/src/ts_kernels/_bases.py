"""A frozen weight that is a tensor subclass, as the base of a LoRA layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ts_kernels._precision import cast


class SubclassBase:
    """`F.linear` with such a weight, and its input gradient later.

    The weight object is kept and read afresh, never its buffers or a dense copy, which may have
    moved in between. A weight that has `input_gradient(dy)`, [N, out] -> [N, in], is asked for it,
    as it knows best how to multiply; else one with a `dequantize()` of its own is decoded.

    Args:
        weight: [out, in] of any tensor subclass that `F.linear` accepts.
        wants_input_grad: whether `input_grad` will be called.
    """

    def __init__(self, weight: Tensor, wants_input_grad: bool) -> None:
        self._weight = weight
        self._version = version_of(weight)
        self._offers = wants_input_grad and hasattr(type(weight), "input_gradient")
        self._linear = wants_input_grad and not (self._offers or decodes(weight))
        self._x: Tensor | None = None
        self._edge: Any = None

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """F.linear(x, weight, bias) that the caller may overwrite; autocast applies."""
        if not self._linear and not torch.is_grad_enabled():
            return F.linear(x, self._weight, bias)
        with torch.set_grad_enabled(self._linear):
            if self._linear:
                self._x = x.detach().requires_grad_()
                y = F.linear(self._x, self._weight, None if bias is None else bias.detach())
                self._edge = torch.autograd.graph.get_gradient_edge(y)
                y = y.detach()
                # A subclass that saved its own output gets autograd's error when it is changed.
                torch.autograd.graph.increment_version(y)
                return y
            return F.linear(x, self._weight, bias)

    def input_grad(self, dy: Tensor) -> Tensor:
        """dy [..., out] -> [N, in], a tensor that the caller may overwrite.

        Raises:
            RuntimeError: the weight was changed in place since forward.
        """
        if self._x is not None:
            (dx,) = torch.autograd.grad(self._edge, self._x, dy)
            dx = dx.reshape(-1, dx.shape[-1])
            return dx.clone() if dx.data_ptr() == dy.data_ptr() else dx
        if version_of(self._weight) != self._version:
            raise RuntimeError(
                "the weight of a LoRA layer was modified in place between forward and backward, so "
                "its gradient would be that of other values. Change weights only outside a "
                "forward/backward pair."
            )
        dy = dy.reshape(-1, dy.shape[-1])
        if self._offers:
            held: Any = self._weight
            offered: Tensor = held.input_gradient(dy)
            return offered
        return torch.mm(dy, cast(self._weight.dequantize(), dy.dtype))


def version_of(weight: Tensor) -> int:
    """`weight._version`, without the subclass's `__torch_function__`, which is slow."""
    with torch._C.DisableTorchFunctionSubclass():
        version: int = weight._version
    return version


def decodes(weight: Tensor) -> bool:
    """Whether a subclass brings its own `dequantize()`, giving an ordinary tensor."""
    return getattr(type(weight), "dequantize", None) is not torch.Tensor.dequantize
