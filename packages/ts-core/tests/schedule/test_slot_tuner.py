"""How many slots there are, by made-up times of steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ts_core.schedule.slot_tuner import SlotTuner


def drive(
    tuner: SlotTuner,
    step: Callable[[int], float],
    waited: Callable[[int], float],
    room: Callable[[int], int] = lambda slots: 100,
) -> list[int]:
    """Run steps until the tuner has settled; the numbers of slots that it tried."""
    tried = [tuner.slots]
    for _ in range(200):
        if tuner.settled:
            return tried
        if tuner.observe(step(tuner.slots), waited(tuner.slots), room(tuner.slots)):
            tried.append(tuner.slots)
    raise AssertionError("it never settled")


def test_without_waits_two_are_enough() -> None:
    tuner = SlotTuner(2, 40)
    assert drive(tuner, lambda n: 1.0, lambda n: 0.02) == [2]
    assert "20.0 ms of a step of 1000.0 ms wait" in tuner.reason


def test_slots_are_added_while_steps_get_faster() -> None:
    tuner = SlotTuner(2, 40)
    tried = drive(tuner, lambda n: 1.0 - 0.05 * min(n, 6), lambda n: 0.3)
    assert tried == [2, 3, 4, 6, 9, 6]
    assert tuner.slots == 6 and "9 made no faster steps" in tuner.reason


def test_slots_that_do_not_help_are_given_back() -> None:
    tuner = SlotTuner(2, 40)
    assert drive(tuner, lambda n: 1.0, lambda n: 0.5) == [2, 3, 2]


def test_it_stops_when_nothing_is_waited_for_any_more() -> None:
    tuner = SlotTuner(2, 40)
    assert drive(tuner, lambda n: 1.0 / n, lambda n: 0.1 if n < 4 else 0.0) == [2, 3, 4]


@pytest.mark.parametrize(
    ("blocks", "wanted"), [(2, [2]), (5, [2, 3, 4, 5]), (99, [2, 3, 4, 6, 9, 13, 16])]
)
def test_no_more_than_there_are_blocks(blocks: int, wanted: list[int]) -> None:
    assert drive(SlotTuner(2, blocks), lambda n: 1.0 / n, lambda n: 0.5 / n) == wanted


def test_room_bounds_it() -> None:
    tuner = SlotTuner(2, 40)
    assert drive(tuner, lambda n: 1 / n, lambda n: 0.5 / n, lambda n: max(0, 5 - n)) == [2, 3, 4, 5]
    assert "no room for more" in tuner.reason
    assert drive(SlotTuner(1, 40), lambda n: 1.0, lambda n: 0.5, lambda n: 0) == [1]


def test_one_slow_step_changes_nothing() -> None:
    """The first step of a trial and one outlier among the others do not count."""
    tuner, seen = SlotTuner(2, 40), []
    for seconds in (9.0, 1.0, 9.0, 1.0, 9.0, 0.5, 9.0, 0.5):
        seen.append(tuner.observe(seconds, 0.4, 1))
    assert seen == [False] * 3 + [True] + [False] * 3 + [True]
    assert tuner.slots == 4


def test_memory_that_is_needed_otherwise_comes_back() -> None:
    tuner = SlotTuner(2, 40)
    drive(tuner, lambda n: 1.0 / n, lambda n: 0.5 / n)
    assert tuner.slots == 16
    assert tuner.tighten() and (tuner.slots, tuner.settled) == (2, True)
    assert not tuner.tighten() and not tuner.observe(1.0, 1.0, 9)
