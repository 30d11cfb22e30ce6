"""Whether a linear layer's product runs on tensor cores, and the product if it does.

x is quantized by `prepare`, outside the autograd function, so that the activation that the
model passes is seen (see `shared`); `product` multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ts_quant.codecs.operators import eager
from ts_quant.matmul import fp8, nvfp4
from ts_quant.matmul.rows import fp8_groups, fp8_rows
from ts_quant.matmul.shared import shared

if TYPE_CHECKING:
    from ts_quant.tensor import QuantTensor

NVFP4 = "nvfp4"
TENSOR_CORE_CODECS = ("fp8", "nvfp4")


def _supported(device: torch.device, kind: str) -> bool:
    return nvfp4.supported(device) if kind == NVFP4 else fp8.supported(device, kind)


# What torch.compiler.assume_constant_result does, which would import Dynamo and Triton now.
_supported._dynamo_marked_constant = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Prepared:
    """A quantized activation.

    Attributes:
        kind: "rows" or "groups" (FP8), or "nvfp4".
        tensors: what `product` needs of it, all [M, ...] of the flattened activation.
    """

    kind: str
    tensors: tuple[Tensor, ...]


def prepare(given: Tensor, x: Tensor, weight: QuantTensor, bias: Tensor | None) -> Prepared | None:
    """The activation as the weight's tensor-core product takes it; None: decode the weight.

    Args:
        given: [..., K], as the model passes it: several weights see the same one.
        x: the same in the layer's compute dtype.
        weight: encoded [N, K].
        bias: [N] or None.
    """
    spec, options, shape = weight._spec, weight._matmul, weight._decoded_shape
    if x.dtype is not torch.bfloat16 or not options.tensor_cores:
        return None
    if spec.outliers or spec.channel_scale:
        return None
    if x.dim() == 0 or x.shape[-1] != shape[1] or x.numel() == 0:
        return None
    if bias is not None and (bias.dtype is not torch.bfloat16 or bias.shape != shape[:1]):
        return None
    tokens = x.numel() // shape[1]
    kind = fp8.activation_kind(spec, shape, tokens)
    if kind is None and nvfp4.takes(spec, shape):
        kind = NVFP4
    if kind is None or not _supported(x.device, fp8.needed(kind, shape[1])):
        return None
    if _misaligned(weight):
        return None
    share = options.outliers if kind == NVFP4 else 0.0

    def make() -> list[Tensor]:
        with torch.no_grad():
            rows = x.detach().reshape(tokens, shape[1])
            if kind == fp8.ROWS:
                return list(fp8_rows(rows))
            if kind == fp8.GROUPS:
                return list(fp8_groups(rows))
            return nvfp4.quantize_activation(rows, share)

    return Prepared(kind, tuple(shared(given, weight, (kind, share), make)))


def _misaligned(weight: QuantTensor) -> bool:
    """Whether a buffer sits where the products cannot read it (a pager may put it anywhere).

    Fake tensors have no address. They come from torch.compile, also where it runs this very code
    (torch 2.11 does so for a weight that is no parameter) and `is_compiling()` says no.
    """
    return any(eager(buffer) and buffer.data_ptr() % 16 for buffer in weight.buffers())


def product(
    kind: str, tensors: tuple[Tensor, ...], weight: QuantTensor, bias: Tensor | None
) -> Tensor:
    """bf16 [M, N]."""
    if kind == NVFP4:
        y = nvfp4.linear(tensors, weight.buffers(), weight._spec, weight._decoded_shape)
        return y if bias is None else y + bias
    x, scale = tensors
    return fp8.fp8_linear(x, scale, weight.buffers(), weight._spec, kind, bias)
