"""The step of a plan whose optimizer state is not left to host threads alone (`optimizer_mode`).

The run measures rates and room after two steps and splits state with `ts_core.optim.split`; here
the same function is given the rates of the machine's profile and the room that the plan leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from ts_core.optim.layout import SMALL_BYTES
from ts_core.optim.pieces import Bytes, Piece
from ts_core.optim.rates import Rates
from ts_core.optim.split import Split, in_words, link_share, split, timed
from ts_core.schedule import MachineProfile, ModelProfile, Plan, PlanOptions
from ts_core.schedule.plan import human
from ts_core.schedule.planner import evaluate
from ts_core.schedule.rates import HardwareProfile
from ts_core.schedule.step_time import step_seconds
from ts_core.store import Leaf

# Values from which a parameter whose gradient comes last is shared by link and host threads; as in
# `ts_core.optim.hybrid`.
_LARGE = 32 << 20
# Host updates that take less than this share of a step more than all else are not worth a word.
_WORTH_SAYING = 1.1


@dataclass(frozen=True)
class Trained:
    """Trained parameters whose state is kept together.

    Attributes:
        values: of all of them.
        value_bytes: of one value.
        block: that it streams with, where it is a matrix of one; None for what stays.
        first: it is what forward reads first, so that its gradient comes last.
        small: they are many small ones, whose gradients are gathered.
    """

    values: int
    value_bytes: int
    block: int | None = None
    first: bool = False
    small: bool = False

    @property
    def resident_bytes(self) -> int:
        """Device memory of state and gradients that stay, as `device_bytes_needed` has it."""
        master = 4 if self.value_bytes < 4 else 0
        return self.values * (8 + self.value_bytes + master + (4 if self.small else 0))


@dataclass(frozen=True)
class Updates:
    """A plan with its state split.

    Attributes:
        plan: with times, and bytes of state on the device.
        words: where state is, and how long that takes.
    """

    plan: Plan
    words: str


def trained_parts(model: nn.Module, leaves: Sequence[Sequence[Leaf]]) -> tuple[Trained, ...]:
    """What an optimizer of all trained parameters keeps: large ones alone, small ones together."""
    block_of = {
        id(leaf.owner): index
        for index, block in enumerate(leaves)
        for leaf in block
        if leaf.trained
    }
    found: list[Trained] = []
    small: dict[int, int] = {}
    first = True
    for param in model.parameters():
        if not param.requires_grad:
            continue
        size = param.element_size()
        block = block_of.get(id(param))
        if block is None and param.numel() * size < SMALL_BYTES:
            small[size] = small.get(size, 0) + param.numel()
        else:
            found.append(Trained(param.numel(), size, block, first and block is None))
        first = False
    return (*found, *(Trained(values, size, small=True) for size, values in small.items()))


def split_updates(
    plan: Plan,
    trained: Sequence[Trained],
    profile: ModelProfile,
    machine: MachineProfile,
    options: PlanOptions,
    mode: str,
) -> Updates | None:
    """The plan under `optimizer_mode` "gpu", "hybrid" or "auto" (a pure function).

    As in the run, blocks stay where the plan has them, and activations leave their room to state
    where the step is shorter so.

    Args:
        plan: that fits, of `profile`, `machine` and `options`.
        trained: what the optimizer keeps.
        mode: of the optimizer.

    Returns:
        None where nothing is known of times or memory, or no state is on the host.
    """
    if machine.rates is None or machine.device_bytes is None or profile.work is None:
        return None
    if not plan.host.get("optimizer_and_gradients"):
        return None
    # What the optimizer adds is counted by its split.
    alone = replace(profile.work, updates=0, gradient_bytes=0, updated_bytes=0)
    without = replace(profile, work=alone)
    beside = step_seconds(without, machine, plan.paged, plan.slot_count, plan.activations)
    plans = [replace(plan, seconds=beside)]
    same_blocks = replace(options, param_offload=plan.paged or False)
    room = _room(evaluate(without, machine, replace(same_blocks, recompute=True)))
    most = min(room, sum(_piece(part, (), 0.5).state_bytes for part in trained))
    if mode != "gpu" and plan.activations and most > 0:
        roomy = replace(without, fixed_device=without.fixed_device + most)
        plans.append(_given(evaluate(roomy, machine, same_blocks), most))
    found = [
        _timed(each, trained, machine.rates, alone.block_flops, mode) for each in plans if each.fits
    ]
    return min(found, key=lambda each: each.plan.seconds["step"], default=None)


def all_on_device(
    plan: Plan, trained: Sequence[Trained], profile: ModelProfile, machine: MachineProfile
) -> Updates | None:
    """The plan once `offload="auto"` has moved all state to the device (a pure function).

    That happens after two updates, when no block streams (or nothing of them is trained), and there
    is room for all of it beside the peak of a step.

    Args:
        plan, trained, profile, machine: as for `split_updates`.

    Returns:
        None where it does not happen, or no state is on the host.
    """
    streams = plan.paged and any(profile.trained_pageable)
    if not plan.host.get("optimizer_and_gradients") or profile.work is None or streams:
        return None
    needed = sum(part.resident_bytes for part in trained)
    if machine.device_bytes is None or needed > _room(plan):
        return None
    alone = replace(profile.work, updates=0, gradient_bytes=0, updated_bytes=0)
    without = replace(profile, work=alone)
    seconds = step_seconds(without, machine, plan.paged, plan.slot_count, plan.activations)
    total = plan.predicted["total"] + needed
    predicted = {**plan.predicted, "optimizer_state": needed, "total": total}
    words = (
        f"offload='auto': after two updates all optimizer state ({human(needed)} with gradients) "
        f"moves to the device, which has room for it"
    )
    return Updates(replace(plan, seconds=seconds, predicted=predicted), words)


def hint(plan: Plan, updates: Updates | None) -> str:
    """What to say of a plan whose step waits for host threads; empty where it does not."""
    if updates is None or not plan.seconds:
        return ""
    step, other = plan.seconds["step"], updates.plan.seconds["step"]
    if plan.seconds["updates"] < step or step < _WORTH_SAYING * other:
        return ""
    return (
        f"host updates are what this step waits for: with optimizer_mode='auto' (--optimizer-mode "
        f"auto) it takes about {other * 1000:.0f} ms"
    )


def _given(plan: Plan, state_bytes: int) -> Plan:
    """The plan with what was set apart for state free again."""
    predicted = dict(plan.predicted)
    for name in ("fixed", "total"):
        predicted[name] -= state_bytes
    return replace(plan, predicted=predicted)


def _room(plan: Plan) -> int:
    return plan.predicted["budget"] - plan.predicted["total"] if plan.fits else 0


def _piece(part: Trained, paged: Sequence[int], share: float) -> Piece:
    streams = part.block is not None and part.block in paged
    alone = part.first and part.values >= _LARGE and not streams
    return Piece(
        part.values,
        part.values * part.value_bytes,
        part.value_bytes < 4,
        paged=streams,
        link_share=share if alone else None,
    )


def _timed(
    plan: Plan,
    trained: Sequence[Trained],
    hardware: HardwareProfile,
    block_flops: Sequence[float],
    mode: str,
) -> Updates:
    """`plan` without updates, and these beside it."""
    rates = Rates(hardware.host_adamw, hardware.duplex / 2)
    share = link_share(rates)
    pieces = [_piece(part, plan.paged, share) for part in trained]
    others = Bytes(
        int(plan.seconds["to_device"] * hardware.h2d), int(plan.seconds["to_host"] * hardware.d2h)
    )
    if mode == "gpu":
        pieces = [replace(piece, link_share=None) for piece in pieces]
        found = timed(pieces, ["zero_copy"] * len(pieces), rates, others=others)
    else:
        forward_s = sum(block_flops) / hardware.matmul_bf16
        found = split(pieces, rates, _room(plan), others=others, forward_s=forward_s)
    moved = others
    state = 0
    for piece, place in zip(_cut(pieces, found), found.places, strict=True):
        moved += piece.link_bytes(place)
        state += piece.device_bytes(place)
    seconds = {
        **plan.seconds,
        "to_device": moved.to_device / hardware.h2d,
        "to_host": moved.to_host / hardware.d2h,
        "updates": found.host_s,
    }
    passes = seconds["forward"] + seconds["backward"]
    seconds["step"] = max(passes, seconds["to_device"], seconds["to_host"], found.seconds)
    total = plan.predicted["total"] + state
    predicted = {**plan.predicted, "optimizer_state": state, "total": total}
    words = in_words(pieces, found, rates, "planned", others)
    return Updates(replace(plan, seconds=seconds, predicted=predicted), words)


def _cut(pieces: Sequence[Piece], found: Split) -> list[Piece]:
    """The pieces, with the share of the split in the one that both sides update."""
    return [
        replace(piece, near_share=found.near_share) if place == "shared" else piece
        for piece, place in zip(pieces, found.places, strict=True)
    ]
