"""compressed-tensors: NVFP4 (nvfp4-pack-quantized) and FP8 (float-quantized) weights.

NVFP4  X.weight_packed uint8 [out, in / 2], X.weight_scale e4m3 [out, in / 16],
       X.weight_global_scale fp32 number; value = code * weight_scale / weight_global_scale
FP8    X.weight e4m3 [out, in], X.weight_scale, one number, one per row or one per tile
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ts_quant.errors import CheckpointError, NotAvailableError
from ts_quant.readers.fp8 import fp8_weight
from ts_quant.readers.nvfp4 import nvfp4_weight
from ts_quant.readers.plan import Header, ReadPlan, ReadSmall

_READ = ("nvfp4-pack-quantized", "float-quantized")
_PACKED = ".weight_packed"
_IGNORED = (
    ".input_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".weight_shape",
)


def plan(header: Header, config: Mapping[str, Any], read: ReadSmall) -> ReadPlan:
    """The quantized weights of a compressed-tensors checkpoint."""
    formats = set(_formats(config))
    for name in sorted(formats):
        if name not in _READ:
            raise NotAvailableError(
                f"the checkpoint stores weights in compressed-tensors' format {name!r}, which "
                f"this version does not read; it reads {' and '.join(_READ)}"
            )
    for key, what in (
        ("transform_config", "online transforms of activations"),
        ("sparsity_config", "sparse weights"),
    ):
        if config.get(key):
            raise NotAvailableError(
                f"the checkpoint's compressed-tensors config has {key} ({what}), which this "
                f"version does not read; without it products would be wrong."
            )
    if str(config.get("quantization_status", "compressed")) != "compressed":
        raise NotAvailableError(
            f"the checkpoint's quantization_status is {config['quantization_status']!r}: its "
            f"weights are not compressed. This version reads 'compressed' ones"
        )
    block = _block(config)
    found = ReadPlan("compressed-tensors")
    for name, info in header.items():
        if name.endswith(_IGNORED):
            found.ignored.add(name)
        elif name.endswith(_PACKED):
            layer = name.removesuffix(_PACKED)
            found.add(
                nvfp4_weight(
                    header,
                    f"{layer}.weight",
                    name,
                    f"{layer}.weight_scale",
                    f"{layer}.weight_global_scale",
                    "e4m3_div",
                )
            )
        elif name.endswith(".weight") and info.dtype is torch.float8_e4m3fn:
            found.add(fp8_weight(header, name, name, f"{name}_scale", block))
    return found


def _groups(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(
        isinstance(group, Mapping) for group in groups.values()
    ):
        raise CheckpointError("compressed-tensors' config has config_groups that are no objects")
    return list(groups.values())


def _formats(config: Mapping[str, Any]) -> Iterator[str]:
    overall = config.get("format")
    groups = [group.get("format") for group in _groups(config)]
    if overall not in (None, "mixed-precision"):
        yield str(overall)
    for name in groups:
        if name is not None:
            yield str(name)


def _block(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Tile of the weights' scales, where the strategy is "block"."""
    for group in _groups(config):
        weights = group.get("weights")
        if isinstance(weights, Mapping) and weights.get("strategy") == "block":
            try:
                rows, columns = (int(size) for size in weights["block_structure"])
            except (KeyError, TypeError, ValueError) as error:
                raise CheckpointError(
                    f"block_structure={weights.get('block_structure')!r} is not two sizes"
                ) from error
            if rows < 1 or columns < 1:
                raise CheckpointError("block_structure holds a size below 1")
            return rows, columns
    return None
