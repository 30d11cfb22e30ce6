"""Storing stacked experts in a codec's format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ts_core.device import Device
from ts_core.engine.experts import find_experts
from ts_core.engine.experts_decoded import stored_stacks
from ts_core.engine.experts_layer import StackedExperts
from ts_core.engine.experts_stored import StoredExperts
from ts_core.engine.served import serve_decoded
from ts_core.store.leaves import is_wrapper, stored_bytes
from ts_core.store.unloaded import can_load, values_of


def experts_in(model: nn.Module, blocks: Sequence[nn.Module]) -> list[StackedExperts]:
    """The modules inside `blocks` that stack experts, in a form that this package can run."""
    if not any(p.dim() >= 3 for block in blocks for p in block.parameters()):
        return []  # and no plug-in is asked
    inside = {id(module) for block in blocks for module in block.modules()}
    found = [spec for spec in find_experts(model) if id(spec.module) in inside]
    return [spec for spec in found if not spec.refused]


def unpaged_experts(
    model: nn.Module, blocks: Sequence[nn.Module], paged: Sequence[StackedExperts]
) -> list[StackedExperts]:
    """`experts_in` without those that are paged by expert."""
    apart = {id(spec.module) for spec in paged}
    return [spec for spec in experts_in(model, blocks) if id(spec.module) not in apart]


def run_stored(
    model: nn.Module, blocks: Sequence[nn.Module], paged: Sequence[StackedExperts]
) -> StoredExperts | None:
    """Let layers with stored stacks decode for their own time only; None when there are none."""
    stored = [spec for spec in unpaged_experts(model, blocks, paged) if stored_stacks(spec)]
    return StoredExperts(stored) if stored else None


def plain_stacks(experts: Sequence[StackedExperts]) -> list[tuple[StackedExperts, str]]:
    """The frozen stacks that are not stored in any format yet."""
    return [
        (spec, name)
        for spec in experts
        for name in spec.pageable()
        if not is_wrapper(spec.module._parameters[name])  # type: ignore[arg-type]
    ]


def store_experts(
    experts: Sequence[StackedExperts],
    codec: Any,
    device: Device,
    *,
    block_size: int,
    double_quant: bool,
) -> tuple[int, int, int]:
    """Store every frozen stack; returns how many, bytes before and bytes after.

    Args:
        experts: the modules.
        codec: an installed codec.
        device: where the encoding runs.
        block_size: values per scale.
        double_quant: one-byte scales.
    """
    count = before = after = 0
    for spec, name in plain_stacks(experts):
        weight = spec.module._parameters[name]
        assert weight is not None
        source = values_of(weight)
        if device.separate_memory:
            source = source.to(device.torch_device)
        stored = codec.encode(
            source, block_size=block_size, double_quant=double_quant, name=f"{spec.name}.{name}"
        ).to("cpu" if can_load(weight) else weight.device)
        count, before, after = (
            count + 1,
            before + stored_bytes(weight),
            after + stored_bytes(stored),
        )
        spec.module._parameters[name] = nn.Parameter(stored, requires_grad=False)
        serve_decoded(spec.module)
    return count, before, after
