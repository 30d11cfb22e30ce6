"""The planner by table: it needs no model and no machine."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts_core.schedule import MachineProfile, ModelProfile, PlanOptions, make_plan, spread
from ts_core.schedule.remedies import Alternative, Change, find_changes

MIB = 1 << 20


def machine(mib: int | None, **options: Any) -> MachineProfile:
    return MachineProfile(None if mib is None else mib * MIB, **options)


@pytest.mark.parametrize(
    ("limit_mib", "paged"),
    [(None, 0), (1000, 0), (889, 0), (777, 4), (444, 8), (223, 10), (100, 10)],
)
def test_as_many_blocks_stay_as_fit(limit_mib: int | None, paged: int) -> None:
    model = ModelProfile(pageable=(80 * MIB,) * 10)
    plan = make_plan(model, machine(limit_mib, counts_fixed=False))
    assert plan.fits
    assert len(plan.paged) == paged


def test_fixed_gradients_and_activations_count_on_a_gpu() -> None:
    model = ModelProfile(pageable=(100 * MIB,) * 8, fixed_device=200 * MIB, trained=50 * MIB)
    plan = make_plan(model, machine(2000))
    assert plan.predicted["total"] == (800 + 200 + 50 + 600) * MIB
    assert plan.paged == () and plan.fits
    tight = make_plan(model, machine(1200))
    assert tight.fits and len(tight.paged) == 6
    assert tight.predicted["total"] <= tight.predicted["budget"]


def test_what_others_hold_is_left_out_and_of_the_rest_a_share_is_kept() -> None:
    model = ModelProfile(pageable=(100 * MIB,) * 8, fixed_device=200 * MIB, trained=50 * MIB)
    plan = make_plan(model, machine(2000, in_use=500 * MIB))
    assert plan.predicted["taken_by_others"] == 500 * MIB
    assert plan.predicted["activations_reserve"] == 450 * MIB
    assert plan.fits and len(plan.paged) == 4
    refused = make_plan(model, machine(2000, in_use=1900 * MIB))
    assert not refused.fits and "taken by others 1.86 GiB" in refused.reasons[0]


def test_refusal_names_budget_shortfall_and_remedies_that_work() -> None:
    model = ModelProfile(pageable=(100 * MIB,) * 4)
    smaller = ModelProfile(pageable=(50 * MIB,) * 4)
    others = [Alternative("halve it", smaller), Alternative("do nothing", model)]
    plan = make_plan(model, machine(100, counts_fixed=False), alternatives=others)
    assert not plan.fits and plan.failed == "device"
    assert plan.shortfall == 100 * MIB - 90 * MIB  # one slot is the least
    text = " ".join(plan.reasons)
    for words in ("90.00 MiB", "10.00 MiB", "slots 100.00 MiB", "vram_limit", "halve it"):
        assert words in text
    assert "do nothing" not in text
    assert plan.remedies == ("halve it", "give it 112.00 MiB of device memory (vram_limit)")
    assert make_plan(model, machine(112, counts_fixed=False)).fits


def test_host_memory_is_a_budget_too() -> None:
    model = ModelProfile(pageable=(), host_state=10 * MIB)
    plan = make_plan(model, machine(None, host_available=4 * MIB))
    assert not plan.fits and plan.shortfall == 6 * MIB
    assert "host memory" in plan.reasons[0]


@pytest.mark.parametrize(
    ("asked", "paged"),
    [
        (True, (0, 1, 3)),
        (False, ()),
        (0.0, ()),
        (1.0, (0, 1, 3)),
        (0.34, (0, 3)),
        ((3, 2, 3), (3,)),
    ],
)
def test_what_is_asked_is_done_with_the_blocks_that_can_be_paged(
    asked: Any, paged: tuple[int, ...]
) -> None:
    model = ModelProfile(pageable=(MIB, MIB, 0, MIB))
    plan = make_plan(model, machine(None), PlanOptions(param_offload=asked))
    assert plan.paged == paged


@given(st.integers(0, 60), st.integers(1, 60))
def test_spread_is_even(count: int, total: int) -> None:
    chosen = spread(count, total)
    assert len(chosen) == min(count, total)
    assert all(0 <= index < total for index in chosen)
    gaps = [b - a for a, b in itertools.pairwise(chosen)]
    assert not gaps or max(gaps) - min(gaps) <= 1


@given(
    st.lists(st.integers(0, 100 * MIB), max_size=20),
    st.integers(1, 2000),
    st.integers(0, 500 * MIB),
    st.booleans(),
)
def test_a_plan_that_fits_is_within_its_budget(
    sizes: list[int], limit_mib: int, fixed: int, counts: bool
) -> None:
    model = ModelProfile(pageable=tuple(sizes), fixed_device=fixed)
    plan = make_plan(model, machine(limit_mib, counts_fixed=counts))
    assert plan.fits == (plan.predicted["total"] <= plan.predicted["budget"])
    assert (plan.shortfall == 0) == plan.fits
    if plan.paged:
        assert plan.slot_bytes == max(sizes[index] for index in plan.paged)


def test_two_changes_are_tried_together_where_neither_does_alone() -> None:
    """And of two kinds only the first pair that fits is named; one kind excludes itself."""

    def add(key: str, size: int) -> Change[dict[str, int]]:
        return Change(f"{key} {size}", key, lambda asked: {**asked, key: size})

    changes = [add("a", 2), add("a", 3), add("b", 2), add("b", 3), add("c", 0)]

    def found(least: int) -> list[str]:
        asked = {"a": 0, "b": 0, "c": 0}
        return find_changes(asked, changes, lambda asked: sum(asked.values()) >= least)

    assert found(3) == ["a 3", "b 3"]
    assert found(4) == ["a 2 and b 2"]
    assert found(6) == ["a 3 and b 3"]
    assert found(7) == []


def test_a_refusal_of_wrap_names_pairs_that_fit() -> None:
    model = ModelProfile(pageable=(100 * MIB,) * 4)
    smaller = ModelProfile(pageable=(50 * MIB,) * 4)
    options = PlanOptions(param_offload=False)
    plan = make_plan(
        model, machine(150, counts_fixed=False), options, [Alternative("halve it", smaller)]
    )
    assert plan.remedies[0] == "page blocks as needed (param_offload='auto')"
    plan = make_plan(
        model, machine(100, counts_fixed=False), options, [Alternative("halve it", smaller)]
    )
    assert plan.remedies[0] == "page blocks as needed (param_offload='auto') and halve it"


def test_one_slot_is_said_in_the_singular() -> None:
    plan = make_plan(ModelProfile(pageable=(80 * MIB,) * 10), machine(100, counts_fixed=False))
    assert plan.slot_count == 1 and "paged through 1 slot of 80.00 MiB" in plan.reasons[0]
