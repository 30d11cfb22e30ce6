"""bitsandbytes 4-bit (NF4), with plain or nested scales.

X.weight                                   codes, [ceil(n / 2), 1] uint8, or seen through a
                                           wider dtype (`quant_storage`)
X.weight.absmax                            fp32 per block; uint8 codes if nested
X.weight.quant_map                         fp32 [16], the NF4 codebook
X.weight.nested_absmax, .nested_quant_map  fp32, if nested
X.weight.quant_state.bitsandbytes__nf4     uint8, JSON: shape, blocksize, dtype, nested_offset
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ts_quant.codecs.nf4 import CODEBOOK
from ts_quant.errors import CheckpointError, NotAvailableError
from ts_quant.readers.plan import (
    Header,
    ReadPlan,
    ReadSmall,
    StoredParts,
    StoredWeight,
    info_of,
)

_STATE = ".quant_state.bitsandbytes__"
_NESTED_BLOCK = 256
_MOST_STATE_BYTES = 1 << 16


def present(header: Header) -> bool:
    """Whether tensors of this format are there."""
    return any(_STATE in name for name in header)


def plan(header: Header, config: Mapping[str, Any], read: ReadSmall) -> ReadPlan:
    """The NF4 weights of a bitsandbytes checkpoint.

    Raises:
        NotAvailableError: LLM.int8 or FP4 weights.
        CheckpointError: a description is damaged or disagrees with its tensors.
    """
    if config.get("load_in_8bit") or any(name.endswith(".SCB") for name in header):
        raise NotAvailableError(
            "the checkpoint stores its weights as bitsandbytes LLM.int8 (8 bit), which this "
            "version does not read; it reads the 4-bit NF4 form"
        )
    found = ReadPlan("bitsandbytes NF4")
    for name in header:
        weight, separator, kind = name.rpartition(_STATE)
        if not separator:
            continue
        if kind != "nf4":
            raise NotAvailableError(
                f"{weight!r} is stored as bitsandbytes {kind!r}, which this version does not "
                f"read; it reads 'nf4'"
            )
        found.add(_weight(header, weight, name, read))
    if not found.weights:
        raise CheckpointError(
            "quantization_config says bitsandbytes, but no weight has a quant_state: the "
            "checkpoint holds no 4-bit weights"
        )
    return found


def _weight(header: Header, name: str, state_name: str, read: ReadSmall) -> StoredWeight:
    state = _state(header, name, state_name, read)
    shape, block_size = state["shape"], state["blocksize"]
    count = math.prod(shape)
    codes = info_of(header, name, name, "its codes")
    if math.prod(codes.shape) * codes.dtype.itemsize != -(-count // 2):
        raise CheckpointError(
            f"{name!r} has {math.prod(codes.shape)} elements of {codes.dtype}, but a weight of "
            f"shape {list(shape)} takes {-(-count // 2)} bytes of 4-bit codes"
        )
    absmax = f"{name}.absmax"
    nested = info_of(header, absmax, name, "its scales").dtype is torch.uint8
    sources = {"codes": name, "absmax": absmax, "map": f"{name}.quant_map", "state": state_name}
    if nested:
        if state.get("nested_blocksize") != _NESTED_BLOCK:
            raise NotAvailableError(
                f"{name!r} has nested scales in groups of {state.get('nested_blocksize')}; this "
                f"version reads groups of {_NESTED_BLOCK}"
            )
        if state["nested_offset"] is None:
            raise CheckpointError(
                f"{name!r} has nested scales, and its description gives no nested_offset to add "
                f"to them"
            )
        sources |= {
            "nested_absmax": f"{name}.nested_absmax",
            "nested_map": f"{name}.nested_quant_map",
        }
    for role, source in sources.items():
        info_of(header, source, name, f"its {role}")
    offset = state["nested_offset"] or 0.0

    def make(tensors: Mapping[str, Tensor]) -> StoredParts:
        _check_map(name, tensors["map"])
        data = tensors["codes"].contiguous().view(-1)
        buffers = {"codes": data.view(torch.uint8)}
        layout: dict[str, Any] = {"block_size": block_size}
        if not nested:
            buffers["absmax"] = tensors["absmax"].float().contiguous()
            return StoredParts("nf4", buffers, layout)
        buffers |= {
            "absmax_codes": tensors["absmax"].contiguous(),
            "nested_absmax": tensors["nested_absmax"].float().contiguous(),
            "nested_map": tensors["nested_map"].float().contiguous(),
            "nested_offset": torch.tensor([offset], dtype=torch.float32, device=data.device),
        }
        return StoredParts("nf4", buffers, {**layout, "scales": "nested"})

    return StoredWeight(name, shape, "nf4", sources, make)


def _state(header: Header, name: str, state_name: str, read: ReadSmall) -> dict[str, Any]:
    """The description of a weight, checked."""
    size = math.prod(header[state_name].shape)
    if size > _MOST_STATE_BYTES or header[state_name].dtype is not torch.uint8:
        raise CheckpointError(
            f"tensor {state_name!r} ({header[state_name].dtype}, {size} elements) is not a "
            f"description of a weight, which is a few hundred bytes of JSON"
        )
    try:
        state = json.loads(bytes(read(state_name).flatten().tolist()))
        shape = tuple(int(length) for length in state["shape"])
        block_size, given = int(state["blocksize"]), state.get("nested_offset")
        offset = None if given is None else float(given)
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise CheckpointError(f"the description of {name!r} is damaged: {error!r}") from error
    if min(shape, default=0) < 0 or not shape or block_size < 2 or not math.isfinite(offset or 0.0):
        raise CheckpointError(
            f"the description of {name!r} gives shape {list(shape)}, blocksize {block_size} and "
            f"nested_offset {offset}, which no weight has"
        )
    return {**state, "shape": shape, "blocksize": block_size, "nested_offset": offset}


def _check_map(name: str, given: Tensor) -> None:
    expected = torch.tensor(CODEBOOK, dtype=torch.float32, device="cpu")
    if given.numel() != 16 or not torch.equal(given.detach().flatten().float().cpu(), expected):
        raise CheckpointError(f"{name!r} comes with a codebook that is not NF4's")
