"""`quantize`: a tensor in, a QuantTensor out."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ts_quant.codecs.base import DEFAULT_BLOCK_SIZE, codec_named
from ts_quant.tensor import QuantTensor


def quantize(
    w: Tensor,
    codec: str = "nf4",
    block_size: int = DEFAULT_BLOCK_SIZE,
    double_quant: bool = False,
    *,
    layout: str | None = None,
    outlier_channels: Tensor | Sequence[int] | None = None,
    name: str | None = None,
) -> QuantTensor:
    """Encode a weight.

    Works in chunks, so that beside the weight, its codes and one fp32 number per block only about
    10 MiB (150 MiB on a GPU) are in use; a weight that is not contiguous is copied once. The bytes
    do not depend on the device. Waits for the device once, to check that every value is finite.

    Args:
        w: floating tensor (bf16, fp16, fp32 or fp64) of any shape and device. It is read, not
            kept.
        codec: "int8" (8.5 bits per weight at the default block size), "fp8" (8.25), "fp8_row"
            ("fp8" with layout="row"), "nf4" (4.5), "nvfp4" (4.5) or "mxfp4" (4.25).
        block_size: values per scale of int8 and nf4, an even int of at least 2. Blocks run over
            the flattened tensor. The other formats fix their own (fp8 and mxfp4 32, nvfp4 16).
        double_quant: int8 and nf4: scales in one byte, with a fp32 number per 256 blocks.
        layout: fp8: "row" (a fp32 scale per row, which FP8 tensor cores of sm_89 and sm_90 take as
            they are), "tile" (per 128 x 128) or "tensor" instead of blocks of 32. nvfp4:
            "e4m3_div" (the global scale divides, as compressed-tensors stores it). None: the
            codec's own.
        outlier_channels: columns of a matrix to keep in bf16 beside the codes of the rest (2 bytes
            per value more; products with such a weight decode it). `ts_quant.worst_channels`
            finds those worth it.
        name: the weight's name, for error messages.

    Returns:
        A QuantTensor of w's shape and dtype on w's device.

    Raises:
        OptionError: an argument that is not accepted.
        NonFiniteWeightError: w holds NaN or infinity.
    """
    return codec_named(codec).encode(
        w,
        block_size=block_size,
        double_quant=double_quant,
        layout=layout,
        outlier_channels=outlier_channels,
        name=name,
    )
