"""NVIDIA ModelOpt: NVFP4 and FP8 weights, one algorithm or one per layer (MIXED_PRECISION).

    NVFP4  X.weight uint8 [out, in / 2], X.weight_scale e4m3 [out, in / 16],
           X.weight_scale_2 fp32 number; value = code * weight_scale * weight_scale_2
    FP8    X.weight e4m3 [out, in], X.weight_scale fp32, one number or one per row
    *_AWQ  besides X.pre_quant_scale [in]: the layer computes (x * pre_quant_scale) @ value.T

Which one a layer uses is seen from its tensors; the config is read to refuse algorithms by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ts_quant.errors import CheckpointError, NotAvailableError
from ts_quant.readers.fp8 import fp8_weight
from ts_quant.readers.nvfp4 import nvfp4_weight
from ts_quant.readers.plan import Header, ReadPlan, ReadSmall, StoredWeight, with_channel_scale

_NVFP4 = ("NVFP4", "NVFP4_AWQ", "W4A16", "W4A16_NVFP4", "W4A8_NVFP4_FP8")
_FP8 = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN")
_PLAIN = ("", "NONE")
_MIXED = "MIXED_PRECISION"
_PRE_SCALE = ".pre_quant_scale"
_LOW_RANK = (".svdquant_lora_a", ".svdquant_lora_b")
_IGNORED = (
    ".input_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".prob_output_scale",
    ".output_scale",
)


def plan(header: Header, config: Mapping[str, Any], read: ReadSmall) -> ReadPlan:
    """The quantized weights of a ModelOpt checkpoint."""
    _refuse_unknown(config)
    found = ReadPlan("ModelOpt")
    for name, info in header.items():
        if name.endswith(_IGNORED):
            found.ignored.add(name)
        if name.endswith(_LOW_RANK):
            raise NotAvailableError(
                f"{name!r}: low-rank residuals beside a weight (NVFP4_SVD) are not read by this "
                f"version; without them products would be wrong"
            )
        if not name.endswith(".weight") or info.dtype not in (torch.uint8, torch.float8_e4m3fn):
            continue
        if info.dtype is torch.float8_e4m3fn:
            weight = fp8_weight(header, name, name, f"{name}_scale", None)
        else:
            weight = nvfp4_weight(header, name, name, f"{name}_scale", f"{name}_scale_2", "e4m3")
        found.add(_scaled(header, weight))
    _refuse_unused_factors(header, found)
    if not found.weights:
        raise CheckpointError("the config says ModelOpt, but no weight is stored quantized")
    return found


def _scaled(header: Header, weight: StoredWeight) -> StoredWeight:
    """The weight with the factors of its layer's inputs, where it has some."""
    factors = weight.name.removesuffix(".weight") + _PRE_SCALE
    return with_channel_scale(header, weight, factors) if factors in header else weight


def _refuse_unused_factors(header: Header, found: ReadPlan) -> None:
    """Factors belong to a weight that is stored quantized."""
    used = found.consumed
    for name in header:
        if name.endswith(_PRE_SCALE) and name not in used:
            raise CheckpointError(
                f"tensor {name!r} scales the inputs of a layer whose weight is not stored "
                f"quantized; without it products would be wrong. The checkpoint is incomplete, or "
                f"of a variant that this version does not read"
            )


def _refuse_unknown(config: Mapping[str, Any]) -> None:
    for where, algorithm in _algorithms(config):
        if algorithm.upper() not in (*_NVFP4, *_FP8, *_PLAIN):
            raise NotAvailableError(
                f"{where} is stored with ModelOpt's algorithm {algorithm!r}, which this version "
                f"does not read; it reads {', '.join((*_NVFP4, *_FP8))} and {_MIXED} of these"
            )


def _algorithms(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(where, quant_algo) of everything the config names."""
    inner = config.get("quantization", config)
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"ModelOpt's config has the entry quantization={inner!r}")
    overall = str(inner.get("quant_algo") or "")
    if overall.upper() != _MIXED:
        yield "the checkpoint", overall
    layers = inner.get("quantized_layers") or {}
    if not isinstance(layers, Mapping):
        raise CheckpointError("ModelOpt's config has quantized_layers that are no object")
    for name, entry in layers.items():
        algorithm = entry.get("quant_algo") if isinstance(entry, Mapping) else entry
        yield repr(name), str(algorithm or "")
