"""How long a step of a plan should take: the slowest of what overlaps."""

from __future__ import annotations

from collections.abc import Sequence

from ts_core.schedule.plan import OFFLOAD, RECOMPUTE, MachineProfile, ModelProfile

# Products in a model reach about this share of a large one's rate alone.
_EFFICIENCY = 0.75


def step_seconds(
    model: ModelProfile,
    machine: MachineProfile,
    paged: Sequence[int],
    slot_count: int,
    activations: Sequence[str],
) -> dict[str, float]:
    """Predicted seconds of one step by what bounds it, and of the "step".

    Weights of paged blocks cross the link in forward and in backward, except those that are still
    in the slots when backward begins. Transfers and host updates run beside compute, so the step
    takes as long as the slowest of them.

    Returns:
        "compute", "to_device", "to_host", "updates" and "step"; empty when unknown.
    """
    work, rates = model.work, machine.rates
    if work is None or rates is None:
        return {}
    rate = (rates.matmul_bf16 if work.low_precision else rates.matmul_fp32) * _EFFICIENCY
    again = sum(
        flops
        for flops, policy in zip(work.block_flops, activations, strict=False)
        if policy == RECOMPUTE
    )
    forward = sum(work.block_flops) + work.other_flops
    compute = (forward * (1.0 + work.backward) + again) / rate
    moved = sum(
        size
        for size, policy in zip(model.activations, activations, strict=False)
        if policy == OFFLOAD
    )
    kept_in_slots = sum(model.pageable[index] for index in list(paged)[-slot_count:] if slot_count)
    weights = 2 * sum(model.pageable[index] for index in paged) - kept_in_slots
    in_images = sum(model.trained_pageable[index] for index in paged if model.trained_pageable)
    up = weights + moved + max(0, work.updated_bytes - in_images)
    down = moved + work.gradient_bytes
    to_device = up / rates.h2d
    locked = machine.page_lock_bytes
    images = sum(model.pageable[index] for index in paged)
    if locked is not None and images > locked:
        # Staged by host threads first, which share memory with the copy behind them.
        staged = weights * (images - locked) / images
        to_device += staged * max(0.0, 1.0 / rates.host_copy - 1.0 / rates.h2d)
    both = (up + down) / rates.duplex
    updates = work.updates / rates.host_adamw
    to_host = down / rates.d2h
    return {
        "compute": compute,
        "to_device": to_device,
        "to_host": to_host,
        "updates": updates,
        "step": max(compute, to_device, to_host, both, updates),
    }
