"""MXFP4 as gpt-oss stores it: stacked experts in blocks of 32 with a power-of-two scale.

    X_blocks  uint8 [experts, rows, groups, 16]   e2m1 codes, low nibble first
    X_scales  uint8 [experts, rows, groups]       value = code * 2^(byte - 127)

X is [experts, rows, 32 * groups]. Models hold it transposed, [experts, 32 * groups, rows].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ts_quant.errors import CheckpointError
from ts_quant.readers.plan import (
    Header,
    ReadPlan,
    ReadSmall,
    StoredParts,
    StoredWeight,
    expect_shape,
    info_of,
)

_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES = 16


def plan(header: Header, config: Mapping[str, Any], read: ReadSmall) -> ReadPlan:
    """The MXFP4 weights of a checkpoint whose quant_method is "mxfp4"."""
    found = ReadPlan("MXFP4")
    for name in header:
        if name.endswith(_BLOCKS):
            found.add(_weight(header, name.removesuffix(_BLOCKS), name))
    return found


def _weight(header: Header, name: str, blocks: str) -> StoredWeight:
    info = header[blocks]
    if info.dtype is not torch.uint8 or len(info.shape) < 3 or info.shape[-1] != _BYTES:
        raise CheckpointError(
            f"tensor {blocks!r} ({info.dtype}, shape {list(info.shape)}) is not MXFP4 blocks, "
            f"uint8 [..., rows, groups, {_BYTES}]"
        )
    *leading, groups, _ = info.shape
    scale = f"{name}{_SCALES}"
    scales = info_of(header, scale, name, "its scales")
    if scales.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise CheckpointError(f"tensor {scale!r} has dtype {scales.dtype}; expected uint8")
    expect_shape(scale, scales, (*leading, groups))

    def make(tensors: Mapping[str, Tensor]) -> StoredParts:
        codes = tensors["codes"].contiguous()
        return StoredParts(
            "mxfp4",
            {
                "codes": codes.view(*codes.shape[:-2], -1),
                "scale": tensors["scale"].contiguous().view(torch.uint8),
            },
            {},
        )

    shape = (*leading, groups * _BYTES * 2)
    sources = {"codes": blocks, "scale": scale}
    return StoredWeight(name, shape, "mxfp4", sources, make, transposed=True)
