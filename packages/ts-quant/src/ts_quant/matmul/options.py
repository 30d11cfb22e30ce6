"""How products with a quantized weight are computed: per weight, set by `configure_matmul`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from ts_quant.errors import OptionError

if TYPE_CHECKING:
    from ts_quant.tensor import QuantTensor

AUTO_OUTLIERS = 0.01


@dataclass(frozen=True)
class MatmulOptions:
    """Choices for the products of one weight.

    Attributes:
        tensor_cores: multiply fp8 and nvfp4 weights on tensor cores of their own format where the
            GPU has them (activations are quantized for it); else always decode.
        outliers: nvfp4: share of input channels, the largest of each call, multiplied in bf16.
        nvfp4_backward: nvfp4: the gradient of the input in NVFP4 too.
    """

    tensor_cores: bool = True
    outliers: float = 0.0
    nvfp4_backward: bool = False


def outlier_share(value: object) -> float:
    """The share of channels that an `outliers` option means.

    Raises:
        OptionError: not one of 0, False, None, "auto", True or a number from 0 to 0.1.
    """
    if value is None or value is False:
        return 0.0
    if value is True or value == "auto":
        return AUTO_OUTLIERS
    if isinstance(value, (int, float)) and 0 <= value <= 0.1:
        return float(value)
    raise OptionError(
        f"outliers={value!r} is not accepted: expected 0, False, None, 'auto', True or a share of "
        f"the input channels up to 0.1"
    )


def configure_matmul(
    target: nn.Module | QuantTensor,
    *,
    tensor_cores: bool = True,
    outliers: float | bool | str | None = 0,
    nvfp4_backward: bool = False,
) -> int:
    """Choose how a module's quantized weights (or one of them) are multiplied.

    Args:
        target: a module, all of whose parameters are looked at, or one QuantTensor.
        tensor_cores: use FP8 / NVFP4 tensor cores where the GPU has them; False: always decode.
        outliers: nvfp4 on tensor cores: this share of the input channels (0 to 0.1; "auto" and
            True are 0.01), the largest of each call, is multiplied in bf16.
        nvfp4_backward: nvfp4 on tensor cores: the gradient of the input in NVFP4 too.

    Returns:
        How many weights were set.

    Raises:
        OptionError: a value that is not accepted.
    """
    from ts_quant.tensor import QuantTensor

    for name, value in (("tensor_cores", tensor_cores), ("nvfp4_backward", nvfp4_backward)):
        if not isinstance(value, bool):
            raise OptionError(f"{name}={value!r} is not accepted: expected True or False")
    options = MatmulOptions(tensor_cores, outlier_share(outliers), nvfp4_backward)
    found = [target] if isinstance(target, QuantTensor) else list(target.parameters())
    weights = [weight for weight in found if isinstance(weight, QuantTensor)]
    for weight in weights:
        weight._matmul = options
    return len(weights)
