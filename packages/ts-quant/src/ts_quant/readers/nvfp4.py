"""What ModelOpt's and compressed-tensors' NVFP4 share: codes, e4m3 scales, one global scale.

codes uint8 [out, in / 2] (low nibble first), scales e4m3 [out, in / 16] in row order, one fp32
number: value = code * scale * number (ModelOpt) or code * scale / number (compressed-tensors).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ts_quant.errors import CheckpointError
from ts_quant.readers.plan import (
    Header,
    StoredParts,
    StoredWeight,
    expect_scalar,
    expect_shape,
    float32,
    info_of,
)

BLOCK = 16


def nvfp4_weight(
    header: Header, name: str, codes: str, scale: str, global_scale: str, layout: str
) -> StoredWeight:
    """A weight in NVFP4, from the names of its three tensors.

    Args:
        header: name -> dtype and shape.
        name: the weight's name.
        codes: name of the codes.
        scale: name of the scales.
        global_scale: name of the number.
        layout: "e4m3" (multiply) or "e4m3_div" (divide).
    """
    info = info_of(header, codes, name, "its codes")
    if info.dtype is not torch.uint8 or len(info.shape) < 2:
        raise CheckpointError(
            f"tensor {codes!r} ({info.dtype}, shape {list(info.shape)}) is not a matrix of NVFP4 "
            f"codes, two per byte"
        )
    shape = (*info.shape[:-1], info.shape[-1] * 2)
    if shape[-1] % BLOCK:
        raise CheckpointError(
            f"{name!r} has {shape[-1]} columns; NVFP4 needs a multiple of {BLOCK}"
        )
    scales = info_of(header, scale, name, "its scales")
    if scales.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise CheckpointError(f"tensor {scale!r} has dtype {scales.dtype}; expected e4m3 scales")
    expect_shape(scale, scales, (*shape[:-1], shape[-1] // BLOCK))
    expect_scalar(global_scale, info_of(header, global_scale, name, "its global scale"))

    def make(tensors: Mapping[str, Tensor]) -> StoredParts:
        number = float32(tensors["global_scale"]).view(1)
        if not bool(torch.isfinite(number).all() & (number > 0).all()):
            raise CheckpointError(
                f"{name!r} has the global scale {float(number)}; expected a positive number"
            )
        buffers = {
            "codes": tensors["codes"].contiguous(),
            "scale": tensors["scale"].contiguous().view(torch.uint8),
            "global_scale": number,
        }
        return StoredParts("nvfp4", buffers, {"scales": layout})

    sources = {"codes": codes, "scale": scale, "global_scale": global_scale}
    return StoredWeight(name, shape, "nvfp4", sources, make)
