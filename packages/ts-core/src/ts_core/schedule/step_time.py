"""How long a step of a plan should take: pass by pass, the slowest of what overlaps."""

from __future__ import annotations

from collections.abc import Sequence

from ts_core.schedule.plan import OFFLOAD, RECOMPUTE, MachineProfile, ModelProfile, Work
from ts_core.schedule.rates import HardwareProfile

# The share of a large product's rate that the products of a pass reach, with all that runs between
# them. Measured with adapters on an FP8 base of 14B and 2048 tokens, on an H200 whose large
# products reach 756 TFLOP/s: 1.68 ms for a block's forward, 2.3 ms for its backward.
_FORWARD_EFFICIENCY = 0.78
_BACKWARD_EFFICIENCY = 0.75


def step_seconds(
    model: ModelProfile,
    machine: MachineProfile,
    paged: Sequence[int],
    slot_count: int,
    activations: Sequence[str],
) -> dict[str, float]:
    """Predicted seconds of one step by what bounds it, and of the "step".

    Weights of paged blocks cross the link in forward and in backward, except those that are still
    in the slots when backward begins. What is loaded for a pass overlaps that pass alone, so each
    pass takes as long as the slower of its products and its loads, and the step as both together.
    Through one slot only other blocks than the paged ones compute beside a load.
    Gradients, new values and host updates run beside both, and may take longer.

    Returns:
        "compute", "forward", "backward", "to_device", "to_host", "updates" and "step"; empty when
        unknown.
    """
    work, rates = model.work, machine.rates
    if work is None or rates is None:
        return {}
    forward_s, backward_s = _compute_seconds(work, rates, activations)
    moved = sum(
        size
        for size, policy in zip(model.activations, activations, strict=False)
        if policy == OFFLOAD
    )
    images = sum(model.pageable[index] for index in paged)
    kept_in_slots = sum(model.pageable[index] for index in list(paged)[-slot_count:] if slot_count)
    in_images = sum(model.trained_pageable[index] for index in paged if model.trained_pageable)
    load_s = _seconds_per_loaded_byte(machine, rates, images)
    first, again = images * load_s, (images - kept_in_slots) * load_s
    # Activations leave in forward, while weights come, and come back in backward.
    leaving = max(moved / rates.d2h, (images + moved) / rates.duplex if moved else 0.0)
    # While the block in a single slot computes, none is loaded.
    alone = _share_of(work, paged) if slot_count == 1 else 0.0
    forward = max(forward_s, first + alone * forward_s, leaving)
    backward = max(backward_s, again + moved / rates.h2d + alone * backward_s)
    new_values = max(0, work.updated_bytes - in_images)
    up = 2 * images - kept_in_slots + moved + new_values
    down = moved + work.gradient_bytes
    to_device = first + again + (moved + new_values) / rates.h2d
    to_host = down / rates.d2h
    both = (up + down) / rates.duplex
    updates = work.updates / rates.host_adamw
    return {
        "compute": forward_s + backward_s,
        "forward": forward,
        "backward": backward,
        "to_device": to_device,
        "to_host": to_host,
        "updates": updates,
        "step": max(forward + backward, to_device, to_host, both, updates),
    }


def _share_of(work: Work, blocks: Sequence[int]) -> float:
    """The share of the blocks' products that is in these."""
    flops = work.block_flops
    return sum(flops[index] for index in blocks) / sum(flops) if any(flops) else 0.0


def _compute_seconds(
    work: Work, rates: HardwareProfile, activations: Sequence[str]
) -> tuple[float, float]:
    """Of forward and of backward, which computes what is not kept a second time."""
    rate = rates.matmul_bf16 if work.low_precision else rates.matmul_fp32
    in_forward = rate * _FORWARD_EFFICIENCY
    in_backward = rate * _BACKWARD_EFFICIENCY
    blocks = sum(work.block_flops)
    recomputed = sum(
        flops
        for flops, policy in zip(work.block_flops, activations, strict=False)
        if policy == RECOMPUTE
    )
    forward = (blocks / work.forward_speed + work.other_flops) / in_forward
    back = work.backward * (blocks / work.backward_speed + work.other_flops) / in_backward
    return forward, back + recomputed / work.forward_speed / in_forward


def _seconds_per_loaded_byte(machine: MachineProfile, rates: HardwareProfile, images: int) -> float:
    locked = machine.page_lock_bytes
    if locked is None or images <= locked:
        return 1.0 / rates.h2d
    # Staged by host threads first, which share memory with the copy behind them.
    staged = (images - locked) / images
    return 1.0 / rates.h2d + staged * max(0.0, 1.0 / rates.host_copy - 1.0 / rates.h2d)
