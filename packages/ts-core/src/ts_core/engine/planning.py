"""What wrap() asks of the planner: profiles of model and machine, and what "auto" chooses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from ts_core.config import WrapOptions
from ts_core.device import Device
from ts_core.engine.experts import StackedExperts, parameters_of, without_experts
from ts_core.engine.experts_store import unpaged_experts
from ts_core.engine.placement import block_leaves, model_profile, taken_by_others
from ts_core.engine.quantize import quantizable_weights
from ts_core.engine.quantize_options import bytes_per_weight
from ts_core.engine.session import EventLog
from ts_core.errors import OutOfBudgetError
from ts_core.memory.budget import page_lock_budget
from ts_core.memory.ram import ram_available_bytes, ram_limit_bytes
from ts_core.optim import OffloadAdamW, checks
from ts_core.optim.moments import MOMENT_KINDS, bytes_per_value
from ts_core.registry import codecs
from ts_core.schedule import (
    MachineProfile,
    ModelProfile,
    Plan,
    PlanOptions,
    make_plan,
    profile_hardware,
)
from ts_core.schedule.activation_policy import BlockActivations
from ts_core.schedule.plan import Work, human
from ts_core.schedule.planner import evaluate
from ts_core.schedule.rates import TYPICAL_GPU
from ts_core.schedule.remedies import Alternative
from ts_core.transfer.copies import DEFAULT_MAX_INFLIGHT_BYTES

_OFF = ("none", None, False)


def machine_profile(
    device: Device, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> MachineProfile:
    """Memory that `device` and the host offer `model` and its optimizer now."""
    return MachineProfile(
        device_bytes=device.usable_bytes(),
        host_available=ram_available_bytes(),
        counts_fixed=device.separate_memory,
        host_floor=host_floor(ram_limit_bytes()),
        page_lock_bytes=page_lock_budget().size_bytes,
        in_use=taken_by_others(device, model, optimizer),
    )


def host_floor(ram_bytes: int) -> int:
    """Host memory that a plan leaves free: 5 % of RAM, at most 2 GiB."""
    return min(ram_bytes // 20, 2 << 30)


def plan_options(config: WrapOptions) -> PlanOptions:
    """The planner's part of the options of wrap()."""
    asked = config.param_offload
    if isinstance(asked, list | tuple):
        asked = tuple(asked)
    elif not isinstance(asked, bool) and isinstance(asked, int | float):
        asked = float(asked)
    recompute = config.recompute
    if isinstance(recompute, list | tuple):
        recompute = tuple(recompute)
    return PlanOptions(
        param_offload=asked,
        headroom=config.vram_headroom,
        activation_offload=config.activation_offload,
        recompute=recompute,
        inflight=config.max_inflight_bytes or DEFAULT_MAX_INFLIGHT_BYTES,
        disk=config.disk_offload is not None,
        replayed=config.cuda_graphs is not False,
        avoid_pages=config.cuda_graphs is not False,
    )


def choose_moments(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: WrapOptions,
    log: EventLog,
    device: Device,
) -> str:
    """How optimizer moments are kept: as asked, or the most precise that host memory holds.

    Beside them stand gradients and fp32 copies, and a copy of each trained weight that is on a
    device with memory of its own: the image of one that streams, or where host threads write.
    """
    if config.moment_dtype != "auto":
        kind = checks.moment_kind(config.moment_dtype)
        checks.mode(config.optimizer_mode, kind, None)
        return kind
    if isinstance(optimizer, OffloadAdamW):
        return optimizer.moments
    if config.optimizer_mode in ("gpu", "hybrid"):
        return "float32"
    available = ram_available_bytes()
    copies = 0
    if device.separate_memory:  # weights that are in host memory now are no longer available there
        away = (p for p in model.parameters() if p.requires_grad and p.device.type != "cpu")
        copies = sum(p.numel() * p.element_size() for p in away)
    for kind in MOMENT_KINDS:
        needed = model_profile(model, (), bytes_per_value(kind)).host_state + copies
        if needed <= available:
            if kind != "float32":
                log(
                    f"moment_dtype='auto': {kind} moments, since fp32 ones do not fit in the "
                    f"{human(available)} of host memory available"
                )
            return kind
    return "float32"  # the planner refuses, and says by how much


def optimizer_mode(optimizer: torch.optim.Optimizer | None, config: WrapOptions) -> str:
    """The mode that the optimizer will have."""
    mode = config.optimizer_mode
    return optimizer.mode if mode == "cpu" and isinstance(optimizer, OffloadAdamW) else mode


def gradients_in_flight(optimizer: torch.optim.Optimizer | None, config: WrapOptions) -> int | None:
    """Bytes of gradients on their way off the device at once; None when they wait there."""
    mode = optimizer_mode(optimizer, config)
    waits = (
        config.max_grad_norm is not None or config.eager is False or config.accumulation_steps > 1
    )
    if isinstance(optimizer, OffloadAdamW):
        waits = waits or not optimizer.eager or optimizer.accumulation_steps > 1
    if mode != "cpu" and waits:
        return None
    return 2 * (config.max_inflight_bytes or DEFAULT_MAX_INFLIGHT_BYTES)


def choose_codec(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    device: Device,
    config: WrapOptions,
    log: EventLog,
    moments: str,
    in_flight: int | None,
    experts: Sequence[StackedExperts] = (),
    optimizer: torch.optim.Optimizer | None = None,
) -> str | None:
    """The codec to store frozen weights in, or None; refuses a run that cannot fit."""
    leaves = block_leaves(model, blocks, parameters_of(experts), optimizer)
    by_threads = optimizer_mode(optimizer, config) == "cpu"
    profile = model_profile(
        model,
        leaves,
        bytes_per_value(moments),
        in_flight,
        by_threads,
        config.max_inflight_bytes,
    )
    named = config.quantize if config.quantize not in (*_OFF, "auto") else None
    profile = without_experts(profile, experts, named and bytes_per_weight(named, config))
    weights = quantizable_weights(blocks, unpaged_experts(model, blocks, experts))
    plan, codec = plan_codec(
        profile, weights, machine_profile(device, model, optimizer), config, moments
    )
    if not plan.fits:
        if config.check_memory:
            raise OutOfBudgetError(" ".join(plan.reasons))
        log(f"check_memory=False: going on although {' '.join(plan.reasons)}")
    elif codec is not None and config.quantize == "auto":
        log(f"quantize='auto': {codec} chosen, since the run does not fit without it")
    return codec


def plan_codec(
    profile: ModelProfile,
    weights: Sequence[tuple[int, int]],
    machine: MachineProfile,
    config: WrapOptions,
    moments: str,
    others: Sequence[Alternative] = (),
) -> tuple[Plan, str | None]:
    """The plan, and the codec to store frozen weights in or None (a pure function).

    Args:
        profile: of the model in full precision.
        weights: per block, count and bytes of the weights that can be stored in a codec.
        machine: what there is.
        config: the options of wrap().
        moments: how moments are kept.
        others: more remedies to try when it does not fit.
    """
    options = plan_options(config)

    def plan_with(codec_name: str | None) -> Plan:
        estimate = stored_estimate(profile, weights, codec_name, config)
        plan = evaluate(estimate, machine, options)
        if plan.fits or not config.check_memory:
            return plan
        tried = [*_alternatives(profile, weights, codec_name, config, moments), *others]
        return make_plan(estimate, machine, options, tried)

    asked = config.quantize
    if asked in _OFF:
        return plan_with(None), None
    if asked != "auto":
        return plan_with(asked), asked
    plain = evaluate(profile, machine, options)
    enough = plain.fits and not (config.prefer == "speed" and plain.paged)
    if enough:
        return plain, None
    if any(count for count, _ in weights):
        for name in _by_precision():
            plan = evaluate(stored_estimate(profile, weights, name, config), machine, options)
            if plan.fits and not (config.prefer == "speed" and plain.fits and plan.paged):
                return plan, name
    return plan_with(None), None


def _by_precision() -> list[str]:
    found = [(codecs.get(name).error_rank_order, name) for name in codecs.names()]
    return [name for _, name in sorted(found)]


def stored_estimate(
    profile: ModelProfile,
    weights: Sequence[tuple[int, int]],
    codec_name: str | None,
    config: WrapOptions,
) -> ModelProfile:
    """The profile with the frozen weights of the blocks stored in a codec (None: as they are)."""
    if codec_name is None:
        return profile
    per_weight = bytes_per_weight(codec_name, config)
    pageable = tuple(
        size - plain_bytes + int(count * per_weight)
        for size, (count, plain_bytes) in zip(profile.pageable, weights, strict=True)
    )
    saved = sum(profile.pageable) - sum(pageable)
    return replace(
        profile,
        pageable=pageable,
        in_host=min(profile.in_host, sum(pageable)),
        to_load=max(0, profile.to_load - saved) if profile.to_load else 0,
    )


def _alternatives(
    profile: ModelProfile,
    weights: Sequence[tuple[int, int]],
    codec_name: str | None,
    config: WrapOptions,
    moments: str,
) -> list[Alternative]:
    """Other ways to run a training that does not fit: another codec, smaller moments."""
    found = []
    if any(count for count, _ in weights) and config.quantize != "auto":
        for name in _by_precision():
            if name != codec_name:
                words = f"store the frozen weights of the blocks in {name} (quantize={name!r})"
                found.append(Alternative(words, stored_estimate(profile, weights, name, config)))
    now = stored_estimate(profile, weights, codec_name, config)
    for kind in MOMENT_KINDS[MOMENT_KINDS.index(moments) + 1 :]:
        saved = int(profile.trained_values * (bytes_per_value(moments) - bytes_per_value(kind)))
        words = f"keep moments in less memory (optimizer_mode='cpu', moment_dtype={kind!r})"
        found.append(Alternative(words, replace(now, host_state=now.host_state - saved)))
    return found


def with_rates(
    machine: MachineProfile, device: Device, config: WrapOptions, log: EventLog
) -> MachineProfile:
    """`machine` with how fast it is: measured (once per machine), or typical with profile=False."""
    if not device.separate_memory:
        return machine
    rates = TYPICAL_GPU
    if config.profile:
        device.set_limit(None)  # measuring takes a little memory for a moment
        try:
            rates = profile_hardware(device, threads=config.threads)
        except (OutOfBudgetError, torch.OutOfMemoryError) as error:
            log(f"hardware: not measured, for lack of memory: {str(error).splitlines()[0]}")
        finally:
            device.set_limit(config.vram_limit_bytes)
    log(
        f"hardware: link {rates.h2d / 1e9:.1f} GB/s to the device, {rates.d2h / 1e9:.1f} back, "
        f"host AdamW {rates.host_adamw / 1e9:.2f} G values/s, bf16 products "
        f"{rates.matmul_bf16 / 1e12:.0f} TFLOP/s ({'measured' if rates.measured else 'assumed'})"
    )
    return replace(machine, rates=rates)


def work_of(blocks: Sequence[nn.Module], measured: Sequence[BlockActivations]) -> Work | None:
    """Operations of a step, from the sizes of the blocks' weights and inputs.

    The tokens of a step are taken from the bytes of a block's input and the width of its norms;
    None where blocks have no such parameters. Products outside the blocks are left out.
    """
    flops = []
    trained = total = 0
    for block, activations in zip(blocks, measured, strict=True):
        norm = norm_of(block)
        if norm is None:
            return None
        tokens = activations.boundary / (norm.numel() * norm.element_size())
        values = sum(p.numel() for p in block.parameters() if p.dim() >= 2)
        flops.append(2.0 * tokens * values)
        total += values
        trained += sum(p.numel() for p in block.parameters() if p.dim() >= 2 and p.requires_grad)
    return Work(tuple(flops), backward=2.0 if 2 * trained > total else 1.0)


def norm_of(block: nn.Module) -> nn.Parameter | None:
    """A vector as wide as the block's hidden state: of the size that most of its vectors have."""
    vectors = [p for p in block.parameters() if p.dim() == 1]
    counts = Counter(vector.numel() for vector in vectors)
    return max(vectors, key=lambda vector: (counts[vector.numel()], vector.numel()), default=None)
