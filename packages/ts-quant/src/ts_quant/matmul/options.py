"""How products with a quantized weight are computed: per weight, set by `configure_matmul`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from ts_quant.errors import OptionError

if TYPE_CHECKING:
    from ts_quant.tensor import QuantTensor

AUTO_OUTLIERS = 0.01

FASTER_FROM = 1 << 21
"""Weights of a matrix from which "auto" multiplies it in FP8. Below, it would save no time: scaled
from what an H200 saves on 13824 x 5120 weights and 2048 tokens (164 us of 442), 2^21 weights and
1024 tokens save 2.4 us, less than the kernel that quantizes the activation takes to launch."""


@dataclass(frozen=True)
class MatmulOptions:
    """Choices for the products of one weight.

    Attributes:
        tensor_cores: multiply fp8 and nvfp4 weights on tensor cores of their own format where the
            GPU has them (activations are quantized for it): True wherever sizes allow it, "auto"
            also leaves fp8 matrices of fewer than `FASTER_FROM` weights to decoding, False
            always decodes.
        outliers: nvfp4: share of input channels, the largest of each call, multiplied in bf16.
        nvfp4_backward: nvfp4: the gradient of the input in NVFP4 too.
        fp8_backward: fp8 in blocks of 32 or with row scales: the gradient of the input in FP8 too.
    """

    tensor_cores: bool | str = "auto"
    outliers: float = 0.0
    nvfp4_backward: bool = False
    fp8_backward: bool = False

    def allows(self, codec: str, shape: Sequence[int]) -> bool:
        """Whether a matrix in that format may be multiplied on tensor cores of its own."""
        if self.tensor_cores == "auto":
            return codec != "fp8" or shape[0] * shape[1] >= FASTER_FROM
        return bool(self.tensor_cores)


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
    tensor_cores: bool | str | None = None,
    outliers: float | bool | str | None = 0,
    nvfp4_backward: bool = False,
    fp8_backward: bool | None = None,
) -> int:
    """Choose how a module's quantized weights (or one of them) are multiplied.

    Args:
        target: a module, all of whose parameters are looked at, or one QuantTensor.
        tensor_cores: use FP8 / NVFP4 tensor cores where the GPU has them; False: always decode, so
            that only the weights are rounded; "auto": not for small fp8 matrices, which gain
            no time; None: as each weight has it ("auto" at first).
        outliers: nvfp4 on tensor cores: this share of the input channels (0 to 0.1; "auto" and
            True are 0.01), the largest of each call, is multiplied in bf16.
        nvfp4_backward: nvfp4 on tensor cores: the gradient of the input in NVFP4 too.
        fp8_backward: fp8 in blocks of 32 or with row scales, where products run on tensor cores:
            the gradient of the input in FP8 too, by rounding the layer's incoming gradient to e4m3;
            None: as each weight has it (False at first).

    Returns:
        How many weights were set, those that it makes no difference to included: `matmul_report`
        counts the products that run on tensor cores, and says why the others do not.

    Raises:
        OptionError: a value that is not accepted.
    """
    from ts_quant.tensor import QuantTensor

    if not isinstance(nvfp4_backward, bool):
        raise OptionError(
            f"nvfp4_backward={nvfp4_backward!r} is not accepted: expected True or False"
        )
    if not (fp8_backward is None or isinstance(fp8_backward, bool)):
        raise OptionError(
            f"fp8_backward={fp8_backward!r} is not accepted: expected True, False or None"
        )
    if not (tensor_cores is None or isinstance(tensor_cores, bool) or tensor_cores == "auto"):
        raise OptionError(
            f"tensor_cores={tensor_cores!r} is not accepted: expected 'auto', True, False or None"
        )
    share = outlier_share(outliers)
    found = [target] if isinstance(target, QuantTensor) else list(target.parameters())
    weights = [weight for weight in found if isinstance(weight, QuantTensor)]
    for weight in weights:
        had = weight._matmul
        weight._matmul = MatmulOptions(
            had.tensor_cores if tensor_cores is None else tensor_cores,
            share,
            nvfp4_backward,
            had.fp8_backward if fp8_backward is None else fp8_backward,
        )
    return len(weights)
