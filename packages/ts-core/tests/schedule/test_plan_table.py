"""Plans over a table of models, machines and options, and what must hold for all of them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ts_core.schedule import HardwareProfile, MachineProfile, ModelProfile, PlanOptions, make_plan
from ts_core.schedule.places import spread
from ts_core.schedule.plan import KEEP, OFFLOAD, RECOMPUTE, Work
from ts_core.schedule.rates import TYPICAL_GPU
from ts_core.schedule.remedies import Alternative

GIB = 1 << 30
MIB = 1 << 20
H200 = HardwareProfile("H200", 55e9, 55e9, 90e9, 40e9, 4e9, 750e12, 50e12)


def adapters_14b(tokens: int = 512, codec_share: float = 1.0) -> ModelProfile:
    """The sizes of a 14B model with adapters on a bf16 base."""
    blocks = 48
    block_bytes = 550_000_000
    return ModelProfile(
        pageable=(int(block_bytes * codec_share),) * blocks,
        fixed_device=int(3.2 * GIB),
        trained=int(0.26 * GIB),
        host_state=int(0.8 * GIB),
        activations=(240_000 * tokens,) * blocks,
        inputs=(10_240 * tokens,) * blocks,
        transient=100_000 * tokens,
        head=152_000 * 10 * tokens,
        work=Work((2 * 275e6 * tokens,) * blocks, 2 * 778e6 * tokens, 1.0, 69_000_000, 0, 0),
    )


def full_1_5b(tokens: int = 2048) -> ModelProfile:
    """1.5B parameters trained in fp32; the weights cannot be paged."""
    return ModelProfile(
        pageable=(0,) * 28,
        fixed_device=int(6.2 * GIB),
        trained=int(1.5 * GIB),
        host_state=int(18.5 * GIB),
        activations=(50_000 * tokens,) * 28,
        inputs=(3_072 * tokens,) * 28,
        transient=40_000 * tokens,
        head=152_000 * 10 * tokens,
        work=Work((2 * 46e6 * tokens,) * 28, 2 * 233e6 * tokens, 2.0, 1_540_000_000, 0, 0),
    )


def machine(vram_gib: float | None, ram_gib: float | None = None, **others: Any) -> MachineProfile:
    return MachineProfile(
        None if vram_gib is None else int(vram_gib * GIB),
        None if ram_gib is None else int(ram_gib * GIB),
        rates=H200,
        **others,
    )


@pytest.mark.parametrize(
    ("vram", "ram", "options", "paged", "policies"),
    [
        (80, 64, {}, (0, 0), {KEEP}),
        (24, 64, {}, (12, 20), {KEEP, RECOMPUTE}),
        (12, 64, {}, (36, 44), {KEEP, RECOMPUTE}),
        (24, 64, {"recompute": True}, (12, 18), {RECOMPUTE}),
        (24, 64, {"recompute": False, "activation_offload": False}, (20, 30), {KEEP}),
        (24, 64, {"recompute": False, "activation_offload": True}, (12, 18), {KEEP, OFFLOAD}),
        (24, 64, {"recompute": (0, 1), "activation_offload": 0.5}, (14, 26), None),
        (40, 64, {"param_offload": True}, (48, 48), {KEEP}),
        (24, 64, {"param_offload": 0.5}, (24, 24), None),
        (24, 64, {"param_offload": tuple(range(25))}, (25, 25), None),
    ],
)
def test_adapters_on_14b_in_bf16(
    vram: float, ram: float, options: Any, paged: tuple[int, int], policies: set[str] | None
) -> None:
    plan = make_plan(adapters_14b(), machine(vram, ram), PlanOptions(**options))
    assert plan.fits, plan.reasons
    assert paged[0] <= len(plan.paged) <= paged[1]
    if policies is not None:
        assert set(plan.activations) <= policies
    assert plan.predicted["total"] <= plan.predicted["budget"]
    assert plan.host["total"] <= plan.host["budget"]


def test_where_everything_fits_compute_bounds_the_step() -> None:
    plan = make_plan(adapters_14b(), machine(80, 64))
    assert plan.seconds["step"] == plan.seconds["compute"]
    streamed = make_plan(adapters_14b(), machine(24, 64))
    assert streamed.seconds["step"] > plan.seconds["step"]
    blocks = len(streamed.paged) * 2 - streamed.slot_count
    assert streamed.seconds["to_device"] == pytest.approx(blocks * 550e6 / 55e9)


@pytest.mark.parametrize(
    ("vram", "ram", "failed"), [(24, 64, ""), (8, 64, "device"), (24, 8, "host")]
)
def test_full_1_5b(vram: float, ram: float, failed: str) -> None:
    plan = make_plan(full_1_5b(), machine(vram, ram))
    assert plan.failed == failed
    if not failed:
        assert plan.seconds["updates"] == pytest.approx(1.54 / 4)


def test_weights_beyond_the_page_lock_budget_cost_time_or_go_to_disk() -> None:
    free = make_plan(adapters_14b(), machine(12, 64))
    limited = make_plan(adapters_14b(), machine(12, 64, page_lock_bytes=4 * GIB))
    assert limited.seconds["to_device"] > free.seconds["to_device"]
    short = machine(12, 12, page_lock_bytes=4 * GIB)
    refused = make_plan(adapters_14b(), short)
    assert refused.failed == "host"
    assert any("disk_offload" in remedy for remedy in refused.remedies)
    on_disk = make_plan(adapters_14b(), short, PlanOptions(disk=True))
    assert on_disk.fits and on_disk.host["weights"] == 4 * GIB


def test_weights_that_lie_in_host_memory_already_need_no_more_of_it() -> None:
    model = replace(adapters_14b(), in_host=48 * 550_000_000)
    assert make_plan(model, machine(24, 4)).fits
    assert not make_plan(adapters_14b(), machine(24, 4)).fits


def test_paged_activations_leave_host_memory_free() -> None:
    options = PlanOptions(activation_offload=True, recompute=False)
    model = replace(adapters_14b(4096), pageable=(1,) * 48)
    moved = 47 * 240_000 * 4096
    enough = make_plan(model, machine(80, 1 + moved / 0.6 / GIB), options)
    assert enough.fits and enough.host["activations"] == moved
    refused = make_plan(model, machine(80, moved / GIB), options)
    assert refused.failed == "host"
    assert any("activation_offload='auto'" in remedy for remedy in refused.remedies)


def test_what_is_reported_is_the_budget_that_no_way_to_run_can_meet() -> None:
    """Keeping activations lacks a little device memory; recomputing them lacks host memory."""
    plan = make_plan(adapters_14b(), machine(11.2, 20))
    assert not plan.fits and plan.failed == "host"
    assert set(plan.activations) != {KEEP}


def test_the_floor_of_host_memory_is_kept() -> None:
    model = ModelProfile((), host_state=3 * GIB)
    assert make_plan(model, machine(None, 4, host_floor=GIB)).fits
    plan = make_plan(model, machine(None, 3.5, host_floor=GIB))
    assert not plan.fits and plan.shortfall == GIB // 2
    assert "1.00 GiB stay free" in plan.reasons[0]


def test_both_budgets_short_name_both() -> None:
    model = ModelProfile((), fixed_device=2 * GIB, host_state=2 * GIB)
    plan = make_plan(model, machine(1, 1))
    assert len(plan.remedies) == 1
    assert "of device memory" in plan.remedies[0] and "free host memory" in plan.remedies[0]


SIZES = st.lists(st.integers(0, 100), min_size=1, max_size=10)


@st.composite
def models(draw: st.DrawFn) -> ModelProfile:
    pageable = tuple(MIB * size for size in draw(SIZES))
    count = len(pageable)
    known = draw(st.booleans())
    kept = tuple(draw(st.integers(10, 60)) * MIB for _ in range(count)) if known else ()
    return ModelProfile(
        pageable,
        fixed_device=draw(st.integers(0, 50)) * MIB,
        trained=draw(st.integers(0, 10)) * MIB,
        host_state=draw(st.integers(0, 100)) * MIB,
        activations=kept,
        inputs=(MIB,) * len(kept),
        transient=draw(st.integers(0, 5)) * MIB,
        head=draw(st.integers(0, 20)) * MIB,
        work=Work((1e12,) * count, 1e12, 1.0),
    )


@settings(max_examples=60, deadline=None)
@given(models(), st.integers(1, 1500), st.integers(0, 500))
def test_more_device_memory_is_never_worse(model: ModelProfile, vram: int, more: int) -> None:
    small = make_plan(model, MachineProfile(vram * MIB, rates=TYPICAL_GPU))
    large = make_plan(model, MachineProfile((vram + more) * MIB, rates=TYPICAL_GPU))
    if not small.fits:
        return
    assert large.fits
    assert large.seconds["step"] <= small.seconds["step"]
    if not model.activations and large.slot_count <= small.slot_count:  # a second slot takes room
        assert len(large.paged) <= len(small.paged)


@settings(max_examples=40, deadline=None)
@given(models(), st.integers(1, 300), st.integers(1, 300))
def test_what_fits_is_within_both_budgets_and_remedies_work(
    model: ModelProfile, vram: int, ram: int
) -> None:
    here = MachineProfile(vram * MIB, ram * MIB, rates=TYPICAL_GPU)
    half = replace(model, pageable=tuple(size // 2 for size in model.pageable))
    plan = make_plan(model, here, alternatives=[Alternative("halve", half)])
    assert plan.fits == (
        plan.predicted["total"] <= plan.predicted["budget"]
        and plan.host["total"] <= plan.host["budget"]
        and plan.host["activations"] <= 0.6 * plan.host["budget"]
    )
    assert plan.fits == (plan.shortfall == 0) == (plan.failed == "")
    if plan.fits:
        assert plan.remedies == ()
        return
    assert plan.remedies
    assert ("halve" in plan.remedies) == make_plan(half, here).fits
    for remedy in plan.remedies:
        asked = re.findall(r"([\d.]+) (MiB|GiB) (of device|are avail)", remedy)
        if asked:
            sizes = {
                place: round(float(number) * (MIB if unit == "MiB" else GIB) + MIB)
                for number, unit, place in asked
            }
            changed = replace(
                here,
                device_bytes=sizes.get("of device", here.device_bytes),
                host_available=sizes.get("are avail", here.host_available),
            )
            assert make_plan(model, changed).fits, remedy


def test_replayed_blocks_page_activations_only_where_nothing_else_fits() -> None:
    """A link that is free makes pages the best choice, unless they are to be avoided."""
    free = replace(H200, h2d=1e18, d2h=1e18, duplex=2e18)
    model = adapters_14b(8192, codec_share=0.28)
    fast = replace(machine(32, 512), rates=free)
    assert OFFLOAD in make_plan(model, fast, PlanOptions()).activations
    found = make_plan(model, fast, PlanOptions(avoid_pages=True))
    assert found.fits and set(found.activations) == {KEEP, RECOMPUTE}
    # Inputs of recomputed blocks take more than there is; pages leave the device altogether.
    long = replace(model, inputs=tuple(size // 2 for size in model.activations))
    tight = PlanOptions(avoid_pages=True, param_offload=False)
    paged = make_plan(long, fast, tight)
    assert paged.fits and OFFLOAD in paged.activations
    assert not make_plan(long, fast, replace(tight, activation_offload=False)).fits


def test_beside_blocks_that_stream_those_at_the_ends_keep_their_activations() -> None:
    """Last, first, last but one: the link has nothing to load while ends are computed twice."""
    asked = PlanOptions(avoid_pages=True)
    plan = make_plan(adapters_14b(), machine(23.9, 64), asked)
    kept = [index for index, what in enumerate(plan.activations) if what == KEEP]
    assert plan.paged and 2 < len(kept) < 46
    first = len(kept) // 2
    assert kept == [*range(first), *range(48 - len(kept) + first, 48)]
    # With all blocks resident they are spread, and so is what is paged or was asked for.
    resident = make_plan(adapters_14b(8192, codec_share=0.0), machine(40, 64), asked)
    again = [index for index, what in enumerate(resident.activations) if what == RECOMPUTE]
    assert not resident.paged and tuple(again) == spread(len(again), 48) and len(again) > 1
    half = make_plan(adapters_14b(), machine(23.9, 64), replace(asked, recompute=0.5))
    assert [k for k, what in enumerate(half.activations) if what == RECOMPUTE] == [*spread(24, 48)]
    # What some blocks page is kept apart from what the others do.
    some = make_plan(adapters_14b(), machine(23.9, 64), PlanOptions(activation_offload=0.25))
    paged = [index for index, what in enumerate(some.activations) if what == OFFLOAD]
    assert paged == [*spread(12, 48)]


def test_recordings_are_counted_where_activations_are_known() -> None:
    """Twice activations and gradients of the largest replayed block, beside what is kept."""
    model = replace(adapters_14b(), trained=0)
    asked = {"activation_offload": False, "recompute": False}
    plain = make_plan(model, machine(48, 64), PlanOptions(**asked))
    counted = make_plan(model, machine(48, 64), PlanOptions(**asked, replayed=True))
    assert counted.predicted["recordings"] == 2 * 240_000 * 512
    assert counted.predicted["activations"] == plain.predicted["activations"]
    assert counted.predicted["total"] == plain.predicted["total"] + 2 * 240_000 * 512
    assert "recordings" not in plain.predicted
    paged = PlanOptions(activation_offload=True, recompute=False, replayed=True)
    one = make_plan(model, machine(48, 64), paged)  # all but the last block's
    assert one.predicted["recordings"] == 2 * 240_000 * 512
    none = make_plan(model, machine(48, 64), replace(paged, activation_offload=1.0))
    assert none.predicted["recordings"] == 0
    trained = replace(model, trained_pageable=(5 * MIB,) * 47 + (7 * MIB,))
    some = make_plan(trained, machine(48, 64), PlanOptions(**asked, replayed=True))
    assert some.predicted["recordings"] == 2 * (240_000 * 512 + 7 * MIB)
    unknown = make_plan(replace(model, activations=()), machine(48, 64), PlanOptions(replayed=True))
    assert "recordings" not in unknown.predicted


def test_what_recordings_keep_does_not_go_while_gradients_come() -> None:
    model = replace(full_1_5b(), trained=int(6.0 * GIB))
    asked = {"activation_offload": False, "recompute": False}
    plain = make_plan(model, machine(48, 64), PlanOptions(**asked))
    counted = make_plan(model, machine(48, 64), PlanOptions(**asked, replayed=True))
    later = counted.predicted["workspace"] - plain.predicted["workspace"]
    assert later == pytest.approx(27 / 28 * plain.predicted["activations"], rel=1e-6)


def test_a_run_that_fits_without_recordings_only_is_planned_without() -> None:
    model = adapters_14b(8192, codec_share=0.28)
    asked = {"activation_offload": False, "recompute": False, "param_offload": False}
    needed = make_plan(model, machine(400, 64), PlanOptions(**asked, headroom=0.0))
    tight = MachineProfile(needed.predicted["total"] + MIB, 64 * GIB, rates=H200)
    found = make_plan(model, tight, PlanOptions(**asked, headroom=0.0, replayed=True))
    assert found.fits and "recordings" not in found.predicted
    assert "run eagerly" in found.reasons[-1] and "cuda_graphs" in found.reasons[-1]
    short = MachineProfile(needed.predicted["total"] - MIB, 64 * GIB, rates=H200)
    refused = make_plan(model, short, PlanOptions(**asked, headroom=0.0, replayed=True))
    assert not refused.fits and refused.shortfall == MIB
