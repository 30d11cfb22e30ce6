"""`quantize`: a tensor in, a QuantTensor out."""

from __future__ import annotations

from torch import Tensor

from ts_quant.codecs.base import DEFAULT_BLOCK_SIZE, codec_named
from ts_quant.tensor import QuantTensor


def quantize(
    w: Tensor,
    codec: str = "nf4",
    block_size: int = DEFAULT_BLOCK_SIZE,
    double_quant: bool = False,
    *,
    name: str | None = None,
) -> QuantTensor:
    """Encode a weight.

    Works in chunks, so that beside the weight and its codes only about 10 MiB (150 MiB on a GPU)
    are in use; a weight that is not contiguous is copied once. The bytes do not depend on
    the device. Waits for the device once, to check that every value is finite.

    Args:
        w: floating tensor of any shape and device. It is read, not kept.
        codec: "nf4" (4.5 bits per weight at the default block size) or "int8" (8.5 bits).
        block_size: values per fp32 scale, an even int of at least 2. Blocks run over the
            flattened tensor.
        double_quant: one-byte scales; not available in this version.
        name: the weight's name, for error messages.

    Returns:
        A QuantTensor of w's shape and dtype on w's device.

    Raises:
        NotAvailableError: a codec or option that this version does not build.
        OptionError: an argument that is not accepted.
        NonFiniteWeightError: w holds NaN or infinity.
    """
    return codec_named(codec).encode(w, block_size=block_size, double_quant=double_quant, name=name)
