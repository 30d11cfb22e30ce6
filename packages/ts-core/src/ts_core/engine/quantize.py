"""Storing frozen block weights in an installed codec's format. No format is named here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ts_core.device import Device, HostDevice
from ts_core.engine.blocks import find_blocks, needs_stack
from ts_core.engine.experts_layer import StackedExperts
from ts_core.engine.experts_store import experts_in, plain_stacks, store_experts
from ts_core.engine.served import serve_decoded
from ts_core.errors import OptionError
from ts_core.registry import codecs
from ts_core.store.leaves import is_wrapper, stored_bytes
from ts_core.store.unloaded import can_load, values_of


def quantize_model(
    model: nn.Module,
    quantize: str = "nf4",
    *,
    blocks: Sequence[nn.Module] | None = None,
    block_size: int = 64,
    pin_budget: int = 0,
    keep_precise: float | str | bool | None = 0,
    error_rank: int = 0,
    error_iters: int = 1,
    double_quant: bool = False,
    outlier_channels: float = 0,
    joint_budget: float | None = None,
    second_moments: Mapping[str, Tensor] | None = None,
    calibration: Iterable[Any] | None = None,
    device: Device | None = None,
) -> dict[str, Any]:
    """Store the frozen linear weights of the blocks in a codec's format, one at a time.

    Frozen stacked experts (of the families that an installed package knows) are stored as well; the
    choices of `keep_precise`, `error_rank`, `outlier_channels` and `joint_budget` concern linear
    weights only.

    A weight that is already stored in some format is left as it is. Trained weights, weights
    used by more than one module, adapters (frozen ones too) and everything outside the blocks stay
    as they are. The model's
    `state_dict()` serves stored weights decoded; loading one encodes again.

    Args:
        model: the model; changed in place.
        quantize: name of an installed codec.
        blocks: the layer stack; found with `find_blocks` when omitted.
        block_size: values per scale.
        pin_budget: bytes of stored weights to page-lock, for use without wrap() (which lays out
            page-locked images of its own). Nothing is page-locked on a machine without a GPU.
        keep_precise: share of extra bytes (0 to 0.5; "auto" and True mean 0.05) for storing the
            matrices that lose most one step more precise.
        error_rank: rank of a fit of what each matrix lost, for adapters to start at
            (`init_lora_from_error`); 0 for none.
        error_iters: LoftQ alternations.
        double_quant: one-byte scales.
        outlier_channels: share of each matrix's input channels (0 to 0.1) kept in bf16, those that
            lose most. Not with joint_budget, which chooses them itself.
        joint_budget: share of extra bytes that more precise storage, outlier channels (kept in
            bf16) and the rank of the start of each matrix compete for; replaces `keep_precise`.
        second_moments: E[x^2] per input channel, by the linear layer's name
            (`ts_quant.error_stats`); weighs what is lost.
        calibration: batches to collect `second_moments` from, block by block, before anything is
            stored: what the model is called with (dicts of arguments, tuples or tensors); a few
            thousand tokens suffice.
        device: where the encoding runs (the result stays on the weight's device).

    Returns:
        tensors (how many were stored), kept_precise (how many of them more precise), bytes_before,
        bytes_after, pinned_bytes, report (per matrix: error, bytes, what was chosen and why; None
        when none of the options above asked for measuring).

    Raises:
        UnknownPluginError: no installed package offers the codec.
        OptionError: there are no blocks, or no frozen linear weight in them, or an option that
            the codec does not take.
    """
    codec = codecs.get(quantize)
    stack = find_blocks(model) if blocks is None else list(blocks)
    work = device or HostDevice()
    frozen, already = _frozen_linears(model, stack)
    experts = experts_in(model, stack)
    if not stack:
        raise needs_stack(f"quantize={quantize!r}")
    if not frozen and not already and not plain_stacks(experts):
        raise OptionError(
            f"quantize={quantize!r} found no frozen linear weight in {len(stack)} blocks. Freeze "
            f"the base model (or add adapters) before wrapping, or use quantize='none'."
        )
    if calibration is not None:
        second_moments = _collect(codec, model, stack, calibration, work)
    wanted: dict[str, Any] = {
        "keep_precise": keep_precise,
        "error_rank": error_rank,
        "error_iters": error_iters,
        "joint_budget": joint_budget,
    }
    if outlier_channels:
        wanted["outlier_channels"] = outlier_channels
    storer = make_storer(codec, wanted, block_size, double_quant, second_moments)

    def source(module: nn.Linear) -> Tensor:
        weight = values_of(module.weight)
        return weight.to(work.torch_device) if work.separate_memory else weight

    adapted = _adapted_layers(model)
    if storer is not None and storer.needs_measuring:
        for name, module in frozen:
            known = None if adapted is None else id(module) in adapted
            storer.measure(source(module), f"{name}.weight", adapted=known)
        storer.improved()
    before = after = pinned = kept = 0
    for name, module in frozen:
        weight = module.weight
        before += stored_bytes(weight)
        if storer is None:
            stored = codec.encode(
                source(module), block_size=block_size, double_quant=double_quant, name=name
            )
        else:
            known = None if adapted is None else id(module) in adapted
            result = storer.store(source(module), f"{name}.weight", adapted=known)
            stored = result.weight
            kept += stored.codec != getattr(codec, "stored_as", quantize)
            if result.start is not None:
                module.error_start = result.start
        stored = stored.to("cpu" if can_load(weight) else weight.device)
        size = stored_bytes(stored)
        if pinned + size <= pin_budget and weight.device.type == "cpu" and _gpu_in_use():
            stored, pinned = stored.pin_memory(), pinned + size
        after += size
        module.weight = nn.Parameter(stored, requires_grad=False)
        serve_decoded(module)
    stacks, stacked_before, stacked_after = store_experts(
        experts, codec, work, block_size=block_size, double_quant=double_quant
    )
    before, after = before + stacked_before, after + stacked_after
    return {
        "tensors": len(frozen) + stacks,
        "kept_precise": kept,
        "bytes_before": before,
        "bytes_after": after,
        "pinned_bytes": pinned,
        "report": None if storer is None else storer.report,
    }


def _collect(
    codec: Any,
    model: nn.Module,
    stack: Sequence[nn.Module],
    batches: Iterable[Any],
    device: Device,
) -> dict[str, Tensor]:
    """E[x^2] of the linear layers' inputs, by the codec's own means."""
    collect = getattr(codec, "error_stats", None)
    if collect is None:
        raise OptionError(
            f"the codec {codec.name!r} makes no use of calibration batches. Leave them out, or use "
            f"a codec of ts-quant."
        )
    place = device.torch_device if device.separate_memory else None
    try:
        found: dict[str, Tensor] = collect(model, batches, blocks=stack, device=place)
    except ValueError as error:
        raise OptionError(str(error)) from error
    return found


def make_storer(
    codec: Any,
    wanted: dict[str, Any],
    block_size: int,
    double_quant: bool,
    second_moments: Mapping[str, Tensor] | None,
) -> Any:
    """What measures and chooses, or None when nothing asks for it."""
    asking = ("keep_precise", "error_rank", "outlier_channels", "joint_budget")
    if not any(wanted.get(name) for name in asking):
        return None
    make = getattr(codec, "storer", None)
    if make is None:
        raise OptionError(
            f"the codec {codec.name!r} offers neither keep_precise nor error_rank nor outlier "
            f"channels. Leave them at 0, or use a codec of ts-quant."
        )
    try:
        return make(
            block_size=block_size,
            double_quant=double_quant,
            second_moments=second_moments,
            **wanted,
        )
    except ValueError as error:
        raise OptionError(str(error)) from error


def _frozen_linears(
    model: nn.Module, stack: Sequence[nn.Module]
) -> tuple[list[tuple[str, nn.Linear]], int]:
    """The linear layers to store, by name in the model, and how many are stored already."""
    names = {id(module): name for name, module in model.named_modules()}
    uses = _uses(model)
    found: list[tuple[str, nn.Linear]] = []
    already = 0
    for index, block in enumerate(stack):
        beside = _beside_layers(block)
        for inner, module in block.named_modules():
            if not isinstance(module, nn.Linear) or id(module) in beside:
                continue
            weight = module._parameters.get("weight")
            if weight is None or weight.requires_grad or uses[id(weight)] > 1:
                continue
            if is_wrapper(weight):
                already += 1
                continue
            found.append((names.get(id(module), f"block {index}: {inner}"), module))
    return found, already


def _beside_layers(block: nn.Module) -> set[int]:
    """`id`s of what PEFT keeps beside the layers it adapts: matrices of adapters, trained copies.

    They are small and saved as they are, those of an adapter that is not active (frozen) as well.
    """
    found: set[int] = set()
    for module in block.modules():
        for name in ("base_layer", "original_module"):
            layer = module._modules.get(name)
            if layer is not None:
                found |= {id(m) for m in module.modules()} - {id(m) for m in layer.modules()}
    return found


def _adapted_layers(model: nn.Module) -> set[int] | None:
    """`id`s of the layers that have a LoRA adapter; None when no layer has, or not yet."""
    found = {
        id(module.base_layer)
        for module in model.modules()
        if hasattr(module, "lora_A") and isinstance(getattr(module, "base_layer", None), nn.Module)
    }
    return found or None


def _gpu_in_use() -> bool:
    return torch.cuda.is_available()


def quantizable_weights(
    blocks: Sequence[nn.Module], experts: Sequence[StackedExperts] = ()
) -> list[tuple[int, int]]:
    """Per block, count and bytes of the weights that `quantize_model` would store.

    Args:
        blocks: the layer stack.
        experts: modules of it that stack experts, without those that are paged by expert.
    """
    found = []
    stacks = [(spec.module, spec.module._parameters[name]) for spec, name in plain_stacks(experts)]
    for block in blocks:
        inside, beside = {id(module) for module in block.modules()}, _beside_layers(block)
        weights = [
            module.weight
            for module in block.modules()
            if isinstance(module, nn.Linear)
            and id(module) not in beside
            and not module.weight.requires_grad
            and not is_wrapper(module.weight)
        ]
        weights += [w for module, w in stacks if id(module) in inside and w is not None]
        found.append((sum(w.numel() for w in weights), sum(stored_bytes(w) for w in weights)))
    return found


def _uses(model: nn.Module) -> dict[int, int]:
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return uses
