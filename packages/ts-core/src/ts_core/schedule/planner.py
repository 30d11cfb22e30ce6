"""The planner: from profiles and options to a Plan, without touching a model or a device."""

from __future__ import annotations

from ts_core.schedule.plan import MachineProfile, ModelProfile, Plan, PlanOptions, human


def spread(count: int, total: int) -> tuple[int, ...]:
    """`count` of `total` indices (all when `count` is more), one in the middle of each stretch."""
    count = min(count, total)
    return tuple((2 * k + 1) * total // (2 * count) for k in range(count))


def make_plan(
    model: ModelProfile, machine: MachineProfile, options: PlanOptions | None = None
) -> Plan:
    """How many blocks stay on the device under its limit, and which stream.

    With param_offload="auto" as many blocks as fit beside the fixed tensors, the gradients, the
    reserve for activations and the ring stay resident. True pages every block that can be;
    a fraction pages that share; a list pages those blocks. A plan that was asked for is checked,
    not changed: it has `fits=False` when it is over the budget.
    """
    options = options or PlanOptions()
    candidates = tuple(index for index, size in enumerate(model.pageable) if size > 0)
    chosen = _asked(candidates, options)
    if chosen is None:
        chosen = _fewest_paged(model, machine, options, candidates)
    plan = _evaluate(model, machine, options, chosen)
    host = _host_shortfall(model, machine, plan)
    return host or plan


def _asked(candidates: tuple[int, ...], options: PlanOptions) -> tuple[int, ...] | None:
    asked = options.param_offload
    if asked is True:
        return candidates
    if asked is False:
        return ()
    if isinstance(asked, tuple):
        return tuple(index for index in sorted(set(asked)) if index in candidates)
    if isinstance(asked, float):
        count = -int(-asked * len(candidates) // 1)
        return tuple(candidates[k] for k in spread(count, len(candidates)))
    return None


def _fewest_paged(
    model: ModelProfile,
    machine: MachineProfile,
    options: PlanOptions,
    candidates: tuple[int, ...],
) -> tuple[int, ...]:
    for count in range(len(candidates) + 1):
        chosen = tuple(candidates[k] for k in spread(count, len(candidates)))
        if _evaluate(model, machine, options, chosen).fits:
            return chosen
    return candidates


def _evaluate(
    model: ModelProfile,
    machine: MachineProfile,
    options: PlanOptions,
    paged: tuple[int, ...],
) -> Plan:
    slot_bytes = max((model.pageable[index] for index in paged), default=0)
    slot_count = min(options.slot_count, len(paged))
    resident = sum(size for index, size in enumerate(model.pageable) if index not in set(paged))
    predicted = {
        "resident_blocks": resident,
        "slots": slot_bytes * slot_count,
        "fixed": model.fixed_device if machine.counts_fixed else 0,
        "gradients": model.trained if machine.counts_fixed else 0,
    }
    total_blocks = len(model.pageable)
    if machine.device_bytes is None:
        predicted["total"] = sum(predicted.values())
        reason = f"device memory is unbounded: {total_blocks - len(paged)} of {total_blocks} "
        reason += "blocks resident"
        return Plan(paged, slot_count, slot_bytes, True, predicted, 0, (reason,))
    share = options.activation_share if machine.counts_fixed else 0.0
    predicted["activations_reserve"] = int(machine.device_bytes * share)
    predicted["total"] = sum(predicted.values())
    budget = int(machine.device_bytes * (1.0 - options.headroom))
    predicted["budget"] = budget
    shortfall = max(0, predicted["total"] - budget)
    if shortfall == 0:
        reason = (
            f"{total_blocks - len(paged)} of {total_blocks} blocks resident, {len(paged)} paged "
            f"through {slot_count} slots of {human(slot_bytes)}: {human(predicted['total'])} of a "
            f"budget of {human(budget)}"
        )
        return Plan(paged, slot_count, slot_bytes, True, predicted, 0, (reason,))
    return Plan(
        paged,
        slot_count,
        slot_bytes,
        False,
        predicted,
        shortfall,
        (_refusal(machine, predicted, budget, shortfall),),
    )


def _refusal(
    machine: MachineProfile, predicted: dict[str, int], budget: int, shortfall: int
) -> str:
    parts = ", ".join(
        f"{name.replace('_', ' ')} {human(size)}"
        for name, size in predicted.items()
        if size and name not in ("total", "budget")
    )
    assert machine.device_bytes is not None
    return (
        f"the device budget of {human(budget)} ({human(machine.device_bytes)} less the headroom) "
        f"is short by {human(shortfall)}: {parts}. To make it fit: raise vram_limit to at least "
        f"{human(machine.device_bytes + int(shortfall * 1.2) + 1)}, page more blocks "
        f"(param_offload=True), quantize the frozen weights (quantize='nf4'), or train fewer "
        f"parameters."
    )


def _host_shortfall(model: ModelProfile, machine: MachineProfile, plan: Plan) -> Plan | None:
    if machine.host_available is None or model.host_state <= machine.host_available:
        return None
    shortfall = model.host_state - machine.host_available
    reason = (
        f"the host memory budget of {human(machine.host_available)} available is short by "
        f"{human(shortfall)}: optimizer state and gradients of the trained parameters need "
        f"{human(model.host_state)}. To make it fit: train fewer parameters (LoRA), or free "
        f"host memory."
    )
    return Plan(
        plan.paged, plan.slot_count, plan.slot_bytes, False, plan.predicted, shortfall, (reason,)
    )
