"""Whether a linear layer's product runs on tensor cores, and the product if it does.

x is quantized by `prepare`, outside the autograd function, so that the activation that the
model passes is seen (see `shared`); `product` multiplies. `gradient_kind` says the same of the
gradient of the input, which two options ask for.

Outlier channels of an fp8 weight (`ts_quant.codecs.outliers`) have codes of zero; their part of the
product is added in bf16.

`emulate_tensor_cores` computes such products on a CPU, by their references: what they do to a model
can be measured without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


_emulated = False


@contextmanager
def emulate_tensor_cores() -> Iterator[None]:
    """Within it, CPU tensors are multiplied as FP8 and NVFP4 tensor cores would (all threads).

    Slow: every product is computed in fp32 from its codes. Sums are exact to fp32, where tensor
    cores of sm_90 keep about 14 bits of a partial sum. Has no effect on code compiled before.
    """
    global _emulated
    before, _emulated = _emulated, True
    try:
        yield
    finally:
        _emulated = before


def _supported(device: torch.device, kind: str) -> bool:
    if _emulated and device.type == "cpu":
        return True
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


def tensor_core_kind(weight: QuantTensor, tokens: int, device: torch.device) -> str | None:
    """How a bf16 activation is quantized for a product with a weight [N, K]; None: it is decoded.

    Args:
        weight: encoded; where its buffers lie does not matter.
        tokens: rows of the activation.
        device: that multiplies.
    """
    spec, options, shape = weight._spec, weight._matmul, weight._decoded_shape
    if not options.allows(spec.codec, shape):
        return None
    if spec.channel_scale or (spec.outliers and spec.codec == NVFP4):
        return None
    kind = fp8.activation_kind(spec, shape, tokens)
    if kind is None and nvfp4.takes(spec, shape):
        kind = NVFP4
    if kind is None or not _supported(device, fp8.needed(kind, shape[1])):
        return None
    return kind


def prepare(given: Tensor, x: Tensor, weight: QuantTensor, bias: Tensor | None) -> Prepared | None:
    """The activation as the weight's tensor-core product takes it; None: decode the weight.

    Args:
        given: [..., K], as the model passes it: several weights see the same one.
        x: the same in the layer's compute dtype.
        weight: encoded [N, K].
        bias: [N] or None.
    """
    shape = weight._decoded_shape
    if x.dtype is not torch.bfloat16:
        return None
    if x.dim() == 0 or x.shape[-1] != shape[1] or x.numel() == 0:
        return None
    if bias is not None and (bias.dtype is not torch.bfloat16 or bias.shape != shape[:1]):
        return None
    tokens = x.numel() // shape[1]
    kind = tensor_core_kind(weight, tokens, x.device)
    if kind is None:
        return None
    if _misaligned(weight):
        return None
    share = weight._matmul.outliers if kind == NVFP4 else 0.0

    def make() -> list[Tensor]:
        with torch.no_grad():
            rows = x.detach().reshape(tokens, shape[1])
            if kind == fp8.ROWS:
                return list(fp8_rows(rows))
            if kind == fp8.GROUPS:
                return list(fp8_groups(rows))
            return nvfp4.quantize_activation(rows, share)

    return Prepared(kind, tuple(shared(given, weight, (kind, share), make)))


def gradient_kind(weight: QuantTensor, tokens: int, device: torch.device) -> str | None:
    """How the gradient of the input is multiplied, bf16 [tokens, N]; None: with the decoded weight.

    Not None where a product with the weight would run on tensor cores and an option asks for the
    gradient to run there too.

    Returns:
        "rows" (FP8), "nvfp4" or None.
    """
    options = weight._matmul
    if not (options.fp8_backward or options.nvfp4_backward):
        return None
    kind = tensor_core_kind(weight, tokens, device)
    if kind == NVFP4:
        return kind if options.nvfp4_backward else None
    # What outlier channels add to the product is not in the codes.
    fp8_too = options.fp8_backward and not weight._spec.outliers
    return kind if kind == fp8.ROWS and fp8_too else None


def prepared_gradient_kind(weight: QuantTensor, grad: Tensor) -> str | None:
    """`gradient_kind` for this gradient [M, N] and the weight's buffers where they lie now."""
    options = weight._matmul
    if not (options.fp8_backward or options.nvfp4_backward):  # most often: as few calls as can be
        return None
    n, k = weight._decoded_shape
    if grad.dtype is not torch.bfloat16 or grad.shape[1] != n or grad.numel() == 0 or k == 0:
        return None
    kind = gradient_kind(weight, grad.shape[0], grad.device)
    return None if kind is None or _misaligned(weight) else kind


def _misaligned(weight: QuantTensor) -> bool:
    """Whether a buffer sits where the products cannot read it (a pager may put it anywhere).

    Fake tensors have no address. They come from torch.compile, also where it runs this very code
    (torch 2.11 does so for a weight that is no parameter) and `is_compiling()` says no.
    """
    return any(eager(buffer) and buffer.data_ptr() % 16 for buffer in weight.buffers())


def product(
    kind: str, tensors: tuple[Tensor, ...], given: Tensor, weight: QuantTensor, bias: Tensor | None
) -> Tensor:
    """bf16 [M, N], given what `prepare` made of the bf16 activation `given` [..., K]."""
    if kind == NVFP4:
        y = nvfp4.linear(tensors, weight.buffers(), weight._spec, weight._decoded_shape)
        return y if bias is None else y + bias
    x, scale = tensors
    buffers, spec = weight.buffers(), weight._spec
    y = fp8.fp8_linear(x, scale, buffers[:2], spec, kind, bias)
    if not spec.outliers:
        return y
    values, channels = buffers[2].view(y.shape[1], spec.outliers), buffers[3].view(-1)
    kept = given.index_select(-1, channels).view(y.shape[0], spec.outliers)
    return y.addmm_(kept, values.t())
