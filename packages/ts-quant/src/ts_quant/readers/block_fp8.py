"""DeepSeek-style FP8: e4m3 weights with one scale per 128 x 128 tile.

X.weight            e4m3 [out, in]
X.weight_scale_inv  fp32 [ceil(out / 128), ceil(in / 128)]; it multiplies, despite its name
E, E_scale_inv (or E_scales_inv)    the same for fused experts, [experts, out, in]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ts_quant.errors import CheckpointError, NotAvailableError
from ts_quant.readers.fp8 import fp8_weight
from ts_quant.readers.plan import Header, ReadPlan, ReadSmall

_SUFFIXES = ("_scale_inv", "_scales_inv")


def plan(header: Header, config: Mapping[str, Any], read: ReadSmall) -> ReadPlan:
    """The FP8 weights of a checkpoint whose quant_method is "fp8"."""
    layout = config.get("fmt", "e4m3")
    if layout != "e4m3":
        raise NotAvailableError(
            f"the checkpoint stores FP8 as {layout!r}, which this version does not read; it "
            f"reads 'e4m3'"
        )
    block = _block(config.get("weight_block_size", (128, 128)))
    found = ReadPlan("block FP8")
    for name, info in header.items():
        if name.endswith((".activation_scale", ".input_scale")) or (
            name.endswith("_activation_scale")
        ):
            found.ignored.add(name)
        if info.dtype is not torch.float8_e4m3fn:
            continue
        scale = next((name + end for end in _SUFFIXES if name + end in header), None)
        if scale is None:
            raise CheckpointError(f"{name!r} holds FP8 codes but has no {name}_scale_inv beside it")
        found.add(fp8_weight(header, name, name, scale, block))
    return found


def _block(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    try:
        rows, columns = (int(size) for size in value)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"weight_block_size={value!r} is not two sizes, such as [128, 128]"
        ) from error
    if rows < 1 or columns < 1:
        raise CheckpointError(f"weight_block_size={value!r} is not two positive sizes")
    return rows, columns
