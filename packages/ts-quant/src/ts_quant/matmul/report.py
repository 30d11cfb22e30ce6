"""Which products of a model's quantized weights run on tensor cores, and why the others do not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ts_quant.codecs.base import QuantSpec
from ts_quant.errors import OptionError
from ts_quant.matmul import dispatch, fp8, nvfp4, options

if TYPE_CHECKING:
    from ts_quant.tensor import QuantTensor


@dataclass(frozen=True)
class MatmulReport:
    """How quantized weights are multiplied on a device. `str()` says it in a line.

    Attributes:
        matrices: quantized weights that were looked at.
        products: how many of them are multiplied on tensor cores of their own format in forward.
        gradients: of how many the gradient of the input is, too.
        decoded: why the others are decoded in forward, with how many.
        decoded_backward: why the others are decoded for the gradient, with how many.
        codecs: of the weights, those that tensor cores can multiply.
    """

    matrices: int
    products: int
    gradients: int
    decoded: dict[str, int]
    decoded_backward: dict[str, int]
    codecs: tuple[str, ...]

    def __str__(self) -> str:
        names = " and ".join(name.upper() for name in self.codecs)
        backward = self.decoded_backward if self.decoded_backward != self.decoded else {}
        return (
            f"{names + ' products' if names else 'products'}: {self.products} of {self.matrices} "
            f"matrices on tensor cores{_listed(self.decoded)}; "
            f"input gradients: {self.gradients}{_listed(backward)}"
        )


def _listed(reasons: dict[str, int]) -> str:
    return f" ({'; '.join(f'{n}: {why}' for why, n in reasons.items())})" if reasons else ""


def matmul_report(
    target: nn.Module | QuantTensor,
    device: torch.device | str | None = None,
    tokens: int = 1024,
    dtype: torch.dtype | None = None,
) -> MatmulReport:
    """Count the matrices that are multiplied on tensor cores, as `configure_matmul` left them.

    Args:
        target: a module, all of whose parameters are looked at, or one QuantTensor.
        device: that multiplies; where the weights lie does not matter, since they may be streamed.
            None: the GPU if there is one.
        tokens: rows of the activations. Only `layout="tile"` minds: a multiple of 4.
        dtype: of the activations; None: that of each weight. Under autocast: autocast's.

    Returns:
        Counts, and why the other matrices are decoded.

    Raises:
        OptionError: tokens is less than 1.
    """
    from ts_quant.tensor import QuantTensor

    if tokens < 1:
        raise OptionError(f"tokens={tokens!r} is not accepted: expected 1 or more")
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device is not None:
        place = torch.device(device)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    found = [target] if isinstance(target, QuantTensor) else list(target.parameters())
    weights = [weight for weight in found if isinstance(weight, QuantTensor)]
    forward, backward = Counter[str](), Counter[str]()
    for weight in weights:
        why = _why_decoded(weight, place, tokens, dtype or weight._decoded_dtype)
        forward[why] += 1
        backward[why or _why_gradient_decoded(weight, place, tokens)] += 1
    return MatmulReport(
        len(weights),
        forward.pop("", 0),
        backward.pop("", 0),
        dict(forward),
        dict(backward),
        tuple(sorted({w.codec for w in weights} & set(dispatch.TENSOR_CORE_CODECS))),
    )


def _why_decoded(weight: QuantTensor, device: torch.device, tokens: int, dtype: torch.dtype) -> str:
    """Empty where the product runs on tensor cores: what `dispatch.prepare` decides."""
    spec, chosen, shape = weight._spec, weight._matmul, weight._decoded_shape
    if spec.codec not in dispatch.TENSOR_CORE_CODECS:
        return f"{spec.codec} is always decoded"
    if len(shape) != 2:
        return "stacks of matrices"
    if dtype is not torch.bfloat16:
        name = str(dtype).removeprefix("torch.")
        return f"{name} activations; bfloat16 ones, as of autocast, would be taken"
    if dispatch.tensor_core_kind(weight, tokens, device) is not None:
        return ""
    if not chosen.tensor_cores:
        return "tensor_cores=False"
    if not chosen.allows(spec.codec, shape):
        return f"fewer than {options.FASTER_FROM} weights and tensor_cores='auto'"
    if spec.channel_scale:
        return "a factor per input channel"
    if spec.outliers and spec.codec == dispatch.NVFP4:
        return "outlier channels"
    units = _units(spec, shape[1])
    if units is None:
        return "scales in a layout without such a product"
    if shape[0] % units[0] or shape[1] % units[1]:
        return f"sizes that are no multiples of {units[0]} x {units[1]}"
    if spec.codec == "fp8" and fp8.activation_kind(spec, shape, tokens) is None:
        return "a number of tokens that is no multiple of 4"
    return f"{device} has no such product"


def _units(spec: QuantSpec, columns: int) -> tuple[int, int] | None:
    """Rows and columns that products with such a weight take multiples of; None: there are none."""
    if spec.codec == dispatch.NVFP4:
        return nvfp4.MULTIPLE, nvfp4.MULTIPLE
    found = fp8.layout_kind(spec, columns)
    return None if found is None else found[1:]


def _why_gradient_decoded(weight: QuantTensor, device: torch.device, tokens: int) -> str:
    """The same of the input's gradient, where the product itself runs on tensor cores."""
    if dispatch.gradient_kind(weight, tokens, device) is not None:
        return ""
    if weight._spec.codec == dispatch.NVFP4:
        return "nvfp4_backward=False"
    if not weight._matmul.fp8_backward:
        return "fp8_backward=False"
    return "outlier channels" if weight._spec.outliers else "scales per 128 x 128 tile"
