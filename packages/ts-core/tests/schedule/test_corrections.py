"""Corrections from measured peaks, without a device: blocks return, leave, and settle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ts_core.schedule import MachineProfile, ModelProfile, PlanOptions, make_plan
from ts_core.schedule.activation_policy import BlockActivations
from ts_core.schedule.corrections import PeakCorrector
from ts_core.schedule.places import spread
from ts_core.schedule.plan import Work
from ts_core.schedule.rates import TYPICAL_GPU

MIB = 1 << 20
BLOCKS = 20


class Run:
    """Steps that need `other(step)` bytes beside blocks and slots."""

    def __init__(
        self,
        limit_mib: int = 2000,
        movable: Any = None,
        trains: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        model = ModelProfile((100 * MIB,) * BLOCKS, fixed_device=200 * MIB, **(trains or {}))
        machine = MachineProfile(limit_mib * MIB)
        asked = PlanOptions(**options)
        plan = make_plan(model, machine, asked)
        candidates = range(BLOCKS) if movable is None else movable
        self.corrector = PeakCorrector(model, machine, asked, plan, candidates)
        self.step = 0
        self.peak = 0
        self.moves: list[int] = []

    def go(self, steps: int, other: Callable[[int], int], may_return: bool = True) -> None:
        for _ in range(steps):
            self.step += 1
            plan = self.corrector.plan
            used = plan.predicted["resident_blocks"] + plan.predicted["slots"] + other(self.step)
            self.peak = max(self.peak, used)
            before = len(plan.paged)
            found = self.corrector.observe(self.step, self.peak, may_return)
            if found is not None:
                self.peak = 0
                self.moves.append(len(found.paged) - before)

    @property
    def paged(self) -> int:
        return len(self.corrector.plan.paged)


def test_blocks_return_with_the_gradients_that_wait_beside_them() -> None:
    """A block that stays takes twice its size where its gradients wait for the step's updates."""
    trains = {
        "trained": BLOCKS * 100 * MIB,
        "trained_pageable": (100 * MIB,) * BLOCKS,
        "gradients_wait": True,
        "gradients_leaving": 100 * MIB,
    }
    run = Run(3000, trains=trains)
    first, model = run.paged, ModelProfile((100 * MIB,) * BLOCKS, **trains)

    def other(step: int) -> int:
        return 250 * MIB + model.gradients(run.corrector.plan.paged)

    for _ in range(8):
        run.go(1, other)
        placed = sum(run.corrector.plan.predicted[name] for name in ("resident_blocks", "slots"))
        assert placed + other(run.step) <= 2700 * MIB
    assert run.paged < first and not run.corrector.adapting


def test_blocks_return_while_room_remains_and_placement_settles() -> None:
    run = Run()
    assert run.paged == 12 and run.corrector.adapting  # 600 MiB are reserved for activations
    run.go(3, lambda step: 300 * MIB)
    assert run.paged == 8 and run.moves == [-4]
    assert not run.corrector.adapting
    run.go(50, lambda step: 300 * MIB)
    assert run.moves == [-4]
    assert [entry.paged for entry in run.corrector.history if entry.change] == [12]
    assert run.corrector.plan.predicted["total"] <= run.corrector.target  # type: ignore[operator]


def test_a_peak_over_the_target_pages_more() -> None:
    run = Run()
    run.go(4, lambda step: 1200 * MIB)
    assert run.paged == 17 and run.moves == [5]
    assert not run.corrector.adapting
    assert "5 more blocks stream, 17 of 20 stream now" in run.corrector.history[0].change


def test_what_will_not_come_after_all_is_room_for_blocks() -> None:
    """Room that was set apart beside the peak of each step, for recordings that are not made."""
    run = Run()
    for step in range(1, 6):
        run.corrector.observe(step, run.corrector.placed + 300 * MIB, True, 300 * MIB)
    assert run.paged == 11 and not run.corrector.adapting
    run.corrector.is_free(300 * MIB)
    found = run.corrector.observe(6, run.corrector.placed + 300 * MIB)
    assert found is not None and len(found.paged) == 8 and run.corrector.adapting


def test_a_step_that_needed_as_much_without_it_still_counts() -> None:
    run = Run()
    run.corrector.share_room(1, 100 * MIB, [BlockActivations(MIB, 0, 1)] * BLOCKS, None)
    recomputing = run.corrector.recomputing
    run.corrector.observe(1, run.corrector.placed + 600 * MIB, False)
    for step in range(2, 6):
        run.corrector.observe(step, run.corrector.placed + 250 * MIB, True, 300 * MIB)
    assert run.paged == 11
    run.corrector.is_free(300 * MIB)
    assert run.corrector.needed == 600 * MIB
    assert recomputing is not None and run.corrector.recomputing == recomputing - 300 * MIB
    assert run.corrector.observe(6, run.corrector.placed + 250 * MIB) is None and run.paged == 11


def test_a_later_larger_step_starts_it_again() -> None:
    run = Run()
    run.go(6, lambda step: 300 * MIB)
    assert not run.corrector.adapting
    run.go(1, lambda step: 900 * MIB)
    assert run.moves == [-4, 6] and run.corrector.adapting
    run.go(20, lambda step: 300 * MIB)
    assert run.moves == [-4, 6], "shorter steps do not bring back what a longer one needs"
    assert not run.corrector.adapting


def test_while_something_else_uses_the_room_blocks_only_leave() -> None:
    run = Run()
    run.go(5, lambda step: 300 * MIB, may_return=False)
    assert run.moves == [] and run.corrector.adapting
    run.go(1, lambda step: 1200 * MIB, may_return=False)
    assert run.moves == [5]


@pytest.mark.parametrize("asked", [True, False, 0.5, (1, 2)])
def test_what_was_asked_for_stays(asked: Any) -> None:
    run = Run(limit_mib=4000, param_offload=asked)
    run.go(3, lambda step: 10 * MIB)
    run.go(3, lambda step: 5000 * MIB)
    assert run.moves == [] and not run.corrector.adapting
    said = [entry.change for entry in run.corrector.history if entry.change]
    assert len(said) == 1 and "over the target" in said[0] and "smaller batch" in said[0]


def test_when_every_block_streams_and_it_is_too_much_it_is_said_once() -> None:
    run = Run()
    run.go(9, lambda step: 5000 * MIB)
    assert run.paged == BLOCKS
    assert sum("no block can be" in entry.change for entry in run.corrector.history) == 1


def test_blocks_that_cannot_move_stay_where_they_are() -> None:
    run = Run(movable=range(5))
    stuck = [index for index in run.corrector.plan.paged if index >= 5]
    run.go(3, lambda step: 100 * MIB)
    assert [index for index in run.corrector.plan.paged] == stuck
    run.go(3, lambda step: 1500 * MIB)
    assert [index for index in run.corrector.plan.paged] == [0, 1, 2, 3, 4, *stuck]


def test_without_a_limit_nothing_is_corrected() -> None:
    model = ModelProfile((MIB,) * 4)
    machine = MachineProfile(None)
    plan = make_plan(model, machine)
    corrector = PeakCorrector(model, machine, PlanOptions(), plan, range(4))
    assert not corrector.adapting and corrector.target is None
    assert corrector.observe(1, 1 << 50) is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 1500), min_size=1, max_size=40))
def test_any_course_settles_within_the_target_or_with_everything_paged(needs: list[int]) -> None:
    run = Run()
    run.go(len(needs), lambda step: needs[step - 1] * MIB)
    most = max(needs) * MIB
    run.go(8, lambda step: most)
    assert not run.corrector.adapting
    before = list(run.moves)
    run.go(10, lambda step: most)
    assert run.moves == before
    plan = run.corrector.plan
    used = plan.predicted["resident_blocks"] + plan.predicted["slots"] + most
    assert used <= (run.corrector.target or 0) or run.paged == BLOCKS
    assert len([move for move in run.moves if move < 0]) <= 4


def test_what_is_to_come_is_left_and_not_called_used() -> None:
    run = Run(2000, headroom=0.0)
    corrector = run.corrector
    placed = corrector.placed
    plan = corrector.observe(1, placed + 300 * MIB, apart=250 * MIB)
    assert plan is not None
    assert corrector.history[-1].peak == placed + 300 * MIB
    assert "250.00 MiB are to come" in corrector.history[-1].change
    assert 2000 * MIB - corrector.placed >= 550 * MIB
    fixed = Run(2000, param_offload=False, headroom=0.0).corrector
    fixed.observe(1, 1900 * MIB, apart=500 * MIB)
    assert fixed.history[-1].change == ""  # nothing went over the target
    fixed.observe(2, 2001 * MIB)
    assert "over the target" in fixed.history[-1].change


def measured(size_mib: int) -> list[BlockActivations]:
    return [BlockActivations(size_mib * MIB, 0, MIB)] * BLOCKS


def test_before_a_larger_input_blocks_leave_as_far_as_it_may_need() -> None:
    """All recomputed a step needs 500 MiB beside blocks, of which 200 are weights."""
    run = Run(2600, headroom=0.0)
    corrector = run.corrector
    work = Work((1e9,) * BLOCKS)

    def beside() -> int:
        return 2600 * MIB - corrector.placed

    assert corrector.make_room(1, 4.0) is None  # nothing is measured yet
    corrector.share_room(1, beside() - 500 * MIB, measured(10), work)
    paged, before = run.paged, beside()
    assert corrector.make_room(2, 1.02) is None and run.paged == paged
    ratio = 1 + (before - 400 * MIB) / (300 * MIB)  # 100 MiB more than there are
    plan = corrector.make_room(2, ratio)
    assert plan is not None and plan is corrector.plan and corrector.adapting
    assert 1 <= len(plan.paged) - paged <= 3  # two slots may come, too
    assert "while it is measured" in corrector.history[-1].change
    assert beside() >= before + 100 * MIB
    corrector.make_room(2, 1e9)
    assert 1400 * MIB <= beside() < 1500 * MIB  # four times as large, no more
    # It needed no more than before, so they return.
    corrector.share_room(3, beside() - 500 * MIB, measured(10), work)
    assert run.paged <= paged


@pytest.mark.parametrize(
    ("seconds", "trained", "leaves"),
    [
        (1.0, False, True),  # of products: the link has time for many blocks
        (0.01, False, False),  # the link is what a step waits for
        (1.0, True, False),
    ],
)
def test_frozen_blocks_leave_for_activations_where_the_link_has_time(
    seconds: float, trained: bool, leaves: bool
) -> None:
    """A step streams 4 of 20 blocks; there is room to keep the activations of 2."""
    trains = {"trained_pageable": (100 * MIB,) * BLOCKS} if trained else {}
    model = ModelProfile((100 * MIB,) * BLOCKS, fixed_device=200 * MIB, **trains)
    machine = MachineProfile(2400 * MIB, rates=TYPICAL_GPU)
    asked = PlanOptions(headroom=0.0, avoid_pages=True)
    paged = (3, 7, 11, 15)
    plan = make_plan(model, machine, replace(asked, param_offload=paged))
    corrector = PeakCorrector(model, machine, asked, plan, range(BLOCKS))
    flops = seconds * TYPICAL_GPU.matmul_bf16 * 0.75 / 3 / BLOCKS
    needed = 200 * MIB + 120 * MIB + 20 * MIB  # weights outside, a block's own, inputs
    room = 2400 * MIB - corrector.placed - needed
    assert 240 * MIB <= room < 460 * MIB
    found = corrector.share_room(1, room, measured(120), Work((flops,) * BLOCKS, backward=1.0))
    if not leaves:
        assert found is None or len(found.paged) <= 4
        return
    assert found is not None and found is corrector.plan
    assert len(found.paged) >= 12
    assert found.paged == spread(len(found.paged), BLOCKS)  # not those of before, and some between
    assert "stream now" in corrector.history[-1].change


def test_a_placement_that_was_asked_for_stays_before_a_larger_input() -> None:
    run = Run(2600, headroom=0.0, param_offload=False)
    run.corrector.share_room(1, 0, measured(10), Work((1e9,) * BLOCKS))
    assert run.corrector.make_room(2, 100.0) is None


def test_what_is_on_its_way_follows_from_the_devices_memory() -> None:
    """Gradients of streamed blocks leave; a device of 4 GiB holds 2 x 400 MiB of them at once."""
    total, largest = BLOCKS * 500 * MIB, 500 * MIB
    model = ModelProfile(
        (500 * MIB,) * BLOCKS,
        trained=total,
        trained_pageable=(500 * MIB,) * BLOCKS,
        gradients_wait=True,
        gradients_leaving=2048 * MIB + largest,
        leaving=(total, largest),
    )
    options = PlanOptions(headroom=0.0, activation_share=0.0)
    plan = make_plan(model, MachineProfile(4000 * MIB), options)
    assert plan.fits and len(plan.paged) == BLOCKS
    assert plan.predicted["gradients"] == 2 * 400 * MIB + largest
    asked = replace(model, leaving=None)  # max_inflight_bytes was given
    assert (
        make_plan(asked, MachineProfile(4000 * MIB), options).predicted["gradients"] == 2548 * MIB
    )
    # What would be enough is found with what such a device has on its way.
    short = make_plan(model, MachineProfile(1200 * MIB), options)
    assert not short.fits
    (remedy,) = [text for text in short.remedies if "of device memory" in text]
    size = float(remedy.split("give it ")[1].split(" ")[0])
    unit = MIB if "MiB" in remedy else 1024 * MIB
    assert make_plan(model, MachineProfile(int(size * unit)), options).fits
