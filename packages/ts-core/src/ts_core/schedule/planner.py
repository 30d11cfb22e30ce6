"""The planner: from profiles and options to a Plan, without touching a model or a device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from ts_core.schedule.case import Case
from ts_core.schedule.places import inner, spread
from ts_core.schedule.plan import (
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    MachineProfile,
    ModelProfile,
    Plan,
    PlanOptions,
)
from ts_core.schedule.remedies import Alternative, find_remedies

_NOT_RECORDED = "blocks run eagerly (cuda_graphs), since there is no room for recordings of them"

__all__ = ["Alternative", "evaluate", "make_plan", "spread"]


def make_plan(
    model: ModelProfile,
    machine: MachineProfile,
    options: PlanOptions | None = None,
    alternatives: Sequence[Alternative] = (),
) -> Plan:
    """Which blocks stay on the device under its limit, which stream, and what that costs.

    With param_offload="auto" as many blocks as fit beside the fixed tensors, the gradients, the
    activations and the ring stay resident. True pages every block that can be; a fraction pages
    that share; a list pages those blocks. Where activations are known, they are kept, paged or
    recomputed so that the predicted step is shortest. A plan that was asked for is checked, not
    changed: it has `fits=False` when it is over a budget.

    Args:
        model, machine, options: the inputs.
        alternatives: other ways to run the same training (quantized, say), tried as remedies when
            this one does not fit.
    """
    options = options or PlanOptions()
    plan = evaluate(model, machine, options)
    if plan.fits:
        return plan
    remedies = find_remedies(
        model, machine, options, alternatives, lambda m, h, o: evaluate(m, h, o).fits
    )
    reason = plan.reasons[0]
    if remedies:
        reason += " To make it fit: " + "; or ".join(remedies) + "."
    else:
        reason += " Nothing that was tried makes it fit."
    return replace(plan, reasons=(reason, *plan.reasons[1:]), remedies=tuple(remedies))


def evaluate(model: ModelProfile, machine: MachineProfile, options: PlanOptions) -> Plan:
    """`make_plan` without looking for remedies.

    The plan with the shortest predicted step among the ways to treat activations; when none fits,
    the one that lacks least. Tables of which a step reads few rows go to host memory rather than
    blocks that stream; blocks are not recorded where that alone does not fit.
    """
    model = model.on_device(machine.device_bytes if machine.counts_fixed else None)
    plan = _with_tables_where_they_are(model, machine, options)
    if not _tables_may_leave(model, machine, options) or (plan.fits and not plan.paged):
        return plan
    other = _with_tables_where_they_are(model.with_host_tables(), machine, options)
    return min((plan, other), key=lambda found: _order(found, options))


def _tables_may_leave(model: ModelProfile, machine: MachineProfile, options: PlanOptions) -> bool:
    limited = machine.counts_fixed and machine.device_bytes is not None
    return bool(model.tables and limited and options.reserve is None and options.param_offload)


def _with_tables_where_they_are(
    model: ModelProfile, machine: MachineProfile, options: PlanOptions
) -> Plan:
    best = _best(model, machine, options)
    if best.fits or not (options.replayed and model.activations):
        return best
    plain = _best(model, machine, replace(options, replayed=False, avoid_pages=False))
    if not plain.fits:
        return plain
    return replace(plain, reasons=(*plain.reasons, _NOT_RECORDED))


def _best(model: ModelProfile, machine: MachineProfile, options: PlanOptions) -> Plan:
    best: Plan | None = None
    for policy in _policies(model, options):
        plan = _with_policy(model, machine, options, policy)
        if best is None or _order(plan, options) < _order(best, options):
            best = plan
    assert best is not None
    return best


def _order(plan: Plan, options: PlanOptions) -> tuple[float, ...]:
    if not plan.fits:  # what fits the device and lacks host memory says what really is missing
        return (1, plan.failed != "host", plan.shortfall)
    changed = sum(policy != KEEP for policy in plan.activations)
    avoided = options.avoid_pages and OFFLOAD in plan.activations
    # Beside blocks that stream, those that are treated alike stand together, if all else is equal.
    turns = sum(one != other for one, other in itertools.pairwise(plan.activations))
    scattered = turns if plan.paged else 0
    return (0, avoided, plan.seconds.get("step", 0.0), len(plan.paged), changed, scattered)


def _policies(model: ModelProfile, options: PlanOptions) -> list[tuple[str, ...]]:
    """The ways to treat activations that are worth comparing; one empty one when unknown."""
    if not model.activations or options.reserve is not None:
        return [()]
    count = len(model.activations)
    recompute = _chosen(options.recompute, range(count))
    offload = options.activation_offload
    if offload is True:
        offload_set: set[int] | None = set(range(count - 1))  # the last block's are used at once
    else:
        offload_set = _chosen(offload, range(count))
    if recompute is not None and offload_set is not None:
        return [_policy(count, recompute, offload_set)]
    if recompute is not None:
        rest = [index for index in range(count) if index not in recompute]
        return [
            _policy(count, recompute, {rest[k] for k in spread(moved, len(rest))})
            for moved in range(len(rest) + 1)
        ]
    if offload_set is not None:
        rest = [index for index in range(count) if index not in offload_set]
        return [
            _policy(count, {rest[k] for k in arranged(again, len(rest))}, offload_set)
            for again in range(len(rest) + 1)
            for arranged in (spread, inner)
        ]
    found = [_policy(count, set(), set())]
    for changed in range(1, count + 1):
        some = set(spread(changed, count))
        found += [_policy(count, some, set()), _policy(count, set(), some)]
        found.append(_policy(count, set(inner(changed, count)), set()))
    return found


def _policy(count: int, recompute: set[int], offload: set[int]) -> tuple[str, ...]:
    return tuple(
        RECOMPUTE if index in recompute else OFFLOAD if index in offload else KEEP
        for index in range(count)
    )


def _chosen(asked: str | bool | float | tuple[int, ...], among: Sequence[int]) -> set[int] | None:
    """The members of `among` that were asked for; None for "auto"."""
    if isinstance(asked, str):
        return None
    if asked is True:
        return set(among)
    if asked is False:
        return set()
    if isinstance(asked, tuple):
        return set(asked) & set(among)
    count = -int(-asked * len(among) // 1)
    return {among[k] for k in spread(count, len(among))}


def _with_policy(
    model: ModelProfile, machine: MachineProfile, options: PlanOptions, policy: tuple[str, ...]
) -> Plan:
    candidates = tuple(index for index, size in enumerate(model.pageable) if size > 0)
    asked = _chosen(options.param_offload, candidates)
    found = []
    for slots in range(options.slot_count, 0, -1):  # fewer only where nothing fits with more
        case = Case(model, machine, options, policy, slots)
        if asked is not None:
            plan = case.plan(tuple(sorted(asked)))
        else:
            plan = case.plan(_fewest_paged(case, candidates))
        if plan.fits:
            return plan
        found.append(plan)
    return min(found, key=lambda plan: _order(plan, options))


def _fewest_paged(case: Case, candidates: tuple[int, ...]) -> tuple[int, ...]:
    everything = case.shortfall(())
    if everything == 0:
        return ()
    largest = max((case.model.pageable[index] for index in candidates), default=1)
    for count in range(everything // largest, len(candidates)):
        chosen = tuple(candidates[k] for k in spread(count, len(candidates)))
        if case.shortfall(chosen) == 0:
            return chosen
    return candidates
