"""How fast the products of a quantized weight are, for whoever predicts the time of a step.

The figures are of an H200 (LoRA on 14B, 2048 tokens; `docs/benchmarks`). Where plain bf16 products
take 61 ms a pass, FP8 ones take 44, decoding every weight takes 10, and turning blocks of 32 to row
scales 9. The last two depend on the weights alone, and are as long as the bf16 products of some 300
tokens. That is so for other formats and GPUs as well, within a third: decoding moves 2.5 to 3 bytes
a weight, and what a GPU multiplies while it moves a byte differs little between them. For gradients
in FP8, turning the weight to columns is counted as one such pass: a step is then predicted to take
17 ms less than with decoded weights, and took 28 ms less (251.2 and 222.7 ms).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ts_quant.matmul import dispatch, fp8

if TYPE_CHECKING:
    from ts_quant.tensor import QuantTensor

FP8_SPEED = 61 / 44
"""Of FP8 products whose operands are ready, over bf16 ones. Alone, on a matrix of 13824 x 5120: 364
over 249 us, the activation's quantization included."""

PASS_TOKENS = 300
"""Tokens whose bf16 products take as long as one pass over the weights: decoding them, or turning
blocks of 32 to row scales."""


def product_speeds(weight: QuantTensor, tokens: int, device: torch.device) -> tuple[float, float]:
    """Speed of the product in forward, and of the input's gradient, over plain bf16 products.

    NVFP4 products have not been measured: on tensor cores of their own they are taken to be as fast
    as bf16 ones.

    Args:
        weight: encoded. Of stacks of matrices, and for other activations than bf16, nothing is
            known: 1.0.
        tokens: rows of the activation.
        device: that multiplies; the weight may lie elsewhere now.
    """
    bf16 = weight._decoded_dtype is torch.bfloat16
    if len(weight._decoded_shape) != 2 or not bf16 or tokens < 1:
        return 1.0, 1.0
    decoded = tokens / (tokens + PASS_TOKENS)
    turned = tokens / (tokens / FP8_SPEED + PASS_TOKENS)
    kind = dispatch.tensor_core_kind(weight, tokens, device)
    back = dispatch.gradient_kind(weight, tokens, device)
    backward = {None: decoded, dispatch.NVFP4: 1.0, fp8.ROWS: turned}[back]
    if kind is None:
        return decoded, backward
    if kind == dispatch.NVFP4:
        return 1.0, backward
    as_stored = kind != fp8.ROWS or weight._spec.scales != "e8m0"
    return FP8_SPEED if as_stored else turned, backward
