"""FP8 (e4m3) weights with scales per tile, row or matrix, which multiply."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ts_quant.errors import CheckpointError
from ts_quant.readers.plan import (
    Header,
    StoredParts,
    StoredWeight,
    float32,
    info_of,
)

_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)


def fp8_weight(
    header: Header, name: str, codes: str, scale: str, block: tuple[int, int] | None
) -> StoredWeight:
    """A weight in e4m3, from the names of its two tensors.

    Args:
        header: name -> dtype and shape.
        name: the weight's name.
        codes: name of the e4m3 codes, [..., out, in].
        scale: name of the scales; one number, one per row, or one per tile.
        block: (rows, columns) of a tile, or None where scales are per row or per matrix.
    """
    info = info_of(header, codes, name, "its codes")
    if info.dtype is not torch.float8_e4m3fn or len(info.shape) < 2:
        raise CheckpointError(
            f"tensor {codes!r} ({info.dtype}, shape {list(info.shape)}) is not a matrix of e4m3 "
            f"codes"
        )
    shape = tuple(info.shape)
    *leading, n_rows, n_columns = shape
    scales = info_of(header, scale, name, "its scales")
    if scales.dtype not in _SCALE_DTYPES:
        raise CheckpointError(f"tensor {scale!r} has dtype {scales.dtype}; expected fp32 scales")
    rows, columns = _tile(scale, tuple(scales.shape), tuple(leading), n_rows, n_columns, block)
    tiles = (*leading, -(-n_rows // rows), -(-n_columns // columns))

    def make(tensors: Mapping[str, Tensor]) -> StoredParts:
        return StoredParts(
            "fp8",
            {
                "codes": tensors["codes"].contiguous().view(torch.uint8),
                "scale": float32(tensors["scale"]).view(tiles),
            },
            {"scales": "tile", "rows": rows, "block_size": columns},
        )

    return StoredWeight(name, shape, "fp8", {"codes": codes, "scale": scale}, make)


def _tile(
    name: str,
    shape: tuple[int, ...],
    leading: tuple[int, ...],
    n_rows: int,
    n_columns: int,
    block: tuple[int, int] | None,
) -> tuple[int, int]:
    """(rows, columns) per scale, from the scales' shape."""
    count = math.prod(shape)
    matrices = math.prod(leading)
    if block is not None:
        rows, columns = block
        if shape == (*leading, -(-n_rows // rows), -(-n_columns // columns)):
            return rows, columns
        expected = [*leading, -(-n_rows // rows), -(-n_columns // columns)]
        raise CheckpointError(
            f"tensor {name!r} has shape {list(shape)}; expected {expected}, one scale per "
            f"{rows} x {columns} values"
        )
    if count == matrices:
        return max(n_rows, 1), max(n_columns, 1)
    if count == matrices * n_rows and shape[-1] in (1, n_rows):
        return 1, max(n_columns, 1)
    raise CheckpointError(
        f"tensor {name!r} has shape {list(shape)}; expected one scale per matrix or one per row "
        f"({n_rows})"
    )
