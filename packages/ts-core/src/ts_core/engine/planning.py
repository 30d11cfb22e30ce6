"""What wrap() tells the planner: profiles of model and machine, options, kinds of moments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from ts_core.config import WrapOptions, default_inflight_bytes
from ts_core.device import Device
from ts_core.engine.placement import model_profile, taken_by_others
from ts_core.engine.session import EventLog
from ts_core.errors import OutOfBudgetError
from ts_core.memory.budget import page_lock_budget
from ts_core.memory.ram import ram_available_bytes, ram_limit_bytes
from ts_core.optim import OffloadAdamW, checks
from ts_core.optim.moments import MOMENT_KINDS, bytes_per_value
from ts_core.schedule import (
    MachineProfile,
    ModelProfile,
    PlanOptions,
    profile_hardware,
)
from ts_core.schedule.activation_policy import BlockActivations
from ts_core.schedule.plan import Work, human
from ts_core.schedule.rates import TYPICAL_GPU
from ts_core.store import Leaf


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
        inflight=config.max_inflight_bytes or default_inflight_bytes(None),
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
    return 2 * (config.max_inflight_bytes or default_inflight_bytes(None))


def profile_under(
    config: WrapOptions,
    model: nn.Module,
    leaves: Sequence[Sequence[Leaf]],
    moments: str,
    optimizer: torch.optim.Optimizer | None,
) -> ModelProfile:
    """The profile of a model as it would train under these options.

    Args:
        config: the options of wrap().
        model: the model.
        leaves: per block, its weights that could stream.
        moments: how moments are kept.
        optimizer: the user's, if any.
    """
    return model_profile(
        model,
        leaves,
        bytes_per_value(moments),
        gradients_in_flight(optimizer, config),
        optimizer_mode(optimizer, config) == "cpu",
        config.max_inflight_bytes,
    )


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


def work_of(
    blocks: Sequence[nn.Module], measured: Sequence[BlockActivations], device: torch.device
) -> Work | None:
    """Operations of a step, from the sizes of the blocks' weights and inputs.

    The tokens of a step are taken from the bytes of a block's input and the width of its norms;
    None where blocks have no such parameters. Products outside the blocks are left out. Stored
    weights say how fast their products are (`product_speeds`, as ts-quant's have it).

    Args:
        blocks: the stack.
        measured: of each block.
        device: that computes; weights may lie elsewhere now.
    """
    flops = []
    trained = total = 0
    forward = backward = 0.0  # values, as many as plain ones take as long
    for block, activations in zip(blocks, measured, strict=True):
        norm = norm_of(block)
        if norm is None:
            return None
        tokens = activations.boundary / (norm.numel() * norm.element_size())
        matrices = [p for p in block.parameters() if p.dim() >= 2]
        values = sum(p.numel() for p in matrices)
        flops.append(2.0 * tokens * values)
        total += values
        trained += sum(p.numel() for p in matrices if p.requires_grad)
        for matrix in matrices:
            in_forward, in_backward = _speeds(matrix, int(tokens), device)
            forward += matrix.numel() / in_forward
            backward += matrix.numel() / in_backward
    return Work(
        tuple(flops),
        backward=2.0 if 2 * trained > total else 1.0,
        forward_speed=total / forward if forward else 1.0,
        backward_speed=total / backward if backward else 1.0,
    )


def _speeds(weight: torch.Tensor, tokens: int, device: torch.device) -> tuple[float, float]:
    """Of products with a weight in forward and in backward, over those with a plain one."""
    found = getattr(weight, "product_speeds", None)
    if found is None:
        return 1.0, 1.0
    in_forward, in_backward = found(tokens, device)
    return float(in_forward), float(in_backward)


def norm_of(block: nn.Module) -> nn.Parameter | None:
    """A vector as wide as the block's hidden state: of the size that most of its vectors have."""
    vectors = [p for p in block.parameters() if p.dim() == 1]
    counts = Counter(vector.numel() for vector in vectors)
    return max(vectors, key=lambda vector: (counts[vector.numel()], vector.numel()), default=None)
