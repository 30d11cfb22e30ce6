"""Which blocks stream: by rules, and by a simulation of how long a step waits for the link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts_core.schedule.places import inner, repage, spread

# Milliseconds of a block of 14B in bf16 on an H200, 512 tokens: forward, backward with the forward
# that it repeats, a load; and of the loss.
FORWARD, BACKWARD, LOAD, LOSS = 1.4, 3.2, 10.0, 5.0


@dataclass(frozen=True)
class Step:
    """A simulated step.

    Attributes:
        seconds: how long it takes.
        turn: of these, how long the link stands still between the last load of forward and the
            first of backward.
        end: after the last load of backward.
        between: elsewhere.
    """

    seconds: float
    turn: float
    end: float
    between: float


def simulated(
    paged: Sequence[int],
    forward: Sequence[float],
    backward: Sequence[float],
    load: float,
    loss: float,
    slots: int = 2,
) -> Step:
    """A step of the pager: as many loads ahead as there are slots, one block after another.

    The first blocks are loaded as forward begins; the load of another begins when the block that
    has its slot has computed and the link is free.
    """
    slots = min(slots, len(paged))
    link = now = idle = turn = 0.0
    ready: dict[int, float] = {}

    def start_load(index: int) -> None:
        nonlocal link, idle
        idle += max(0.0, now - link)
        link = max(link, now) + load
        ready[index] = link

    def compute(index: int, seconds: float) -> None:
        nonlocal now
        now = max(now, ready.get(index, 0.0)) + seconds

    place = {index: k for k, index in enumerate(paged)}
    for index in paged[:slots]:
        start_load(index)
    for index, seconds in enumerate(forward):
        compute(index, seconds)
        if index in place and place[index] + slots < len(paged):
            start_load(paged[place[index] + slots])
    now += loss
    before = idle
    for index in range(len(backward) - 1, -1, -1):
        compute(index, backward[index])
        if index in place and place[index] >= slots:
            start_load(paged[place[index] - slots])
            turn = turn or idle - before
    end = max(0.0, now - link)
    return Step(max(now, link), turn, end, idle - turn)


def step(paged: Sequence[int], total: int = 48) -> Step:
    return simulated(paged, [FORWARD] * total, [BACKWARD] * total, LOAD, LOSS)


def least(count: int) -> float:
    """Of a step that waits for the link: all loads, and one block at either end of the stack."""
    return (2 * count - 2) * LOAD + FORWARD + LOSS + 2 * BACKWARD


def test_the_simulation_is_what_was_measured() -> None:
    """17 of 48 blocks: 345 ms, of which the link worked 94 %, and stood still at both ends."""
    were = (0, 4, 7, 9, 12, 16, 19, 21, 24, 28, 31, 33, 36, 40, 43, 45, 47)
    found = step(were)
    assert found.seconds == pytest.approx(345, rel=0.04)
    assert found.turn == pytest.approx(FORWARD + LOSS + BACKWARD)
    assert found.end == pytest.approx(16 - 10)  # blocks 4 to 0, beside the load of the first
    assert simulated((), [1.0] * 4, [2.0] * 4, LOAD, 3.0) == Step(15.0, 0.0, 15.0, 0.0)
    assert simulated((0,), [1.0] * 4, [2.0] * 4, LOAD, 3.0) == Step(25.0, 0.0, 15.0, 0.0)


@pytest.mark.parametrize("kept", [1, 2, 3, 8, 20])
def test_blocks_that_are_not_recomputed_are_best_at_the_ends(kept: int) -> None:
    """What the link waits for at the turn and at the end takes less; nothing else takes more."""
    paged = repage(spread(29, 48), range(48), 17)

    def with_recomputed(again: Sequence[int]) -> Step:
        backward = [BACKWARD if index in again else BACKWARD - FORWARD for index in range(48)]
        return simulated(paged, [FORWARD] * 48, backward, LOAD, LOSS)

    ends = with_recomputed(inner(48 - kept, 48))
    even = with_recomputed(spread(48 - kept, 48))
    fewer = FORWARD * min(kept, 2)  # the last block, and the first
    assert ends.turn + ends.end == pytest.approx(FORWARD + LOSS + 2 * BACKWARD - fewer)
    assert ends.between <= even.between and ends.seconds <= even.seconds
    assert kept > 8 or ends.seconds <= even.seconds - FORWARD * (kept > 1)


def test_what_is_in_the_middle() -> None:
    assert inner(3, 6) == (1, 2, 3) and inner(2, 6) == (2, 3) and inner(5, 6) == (0, 1, 2, 3, 4)
    assert inner(0, 6) == () and inner(6, 6) == (0, 1, 2, 3, 4, 5)


@given(st.sets(st.integers(0, 59)), st.integers(0, 70), st.integers(1, 60))
def test_repaging_changes_as_few_blocks_as_can_be(
    current: set[int], count: int, total: int
) -> None:
    candidates = tuple(range(0, 2 * total, 2))
    known = current & set(candidates)
    chosen = repage(sorted(current), candidates, count)
    assert len(chosen) == min(count, total) and set(chosen) <= set(candidates)
    assert list(chosen) == sorted(set(chosen))
    assert len(known ^ set(chosen)) == abs(len(known) - len(chosen))


def test_repaging_goes_where_resident_blocks_are_widest() -> None:
    assert repage((), range(9), 1) == (4,)
    assert repage((4,), range(9), 3) == (0, 4, 8)
    assert repage((), range(9), 0) == () and repage((0,), range(9), 2) == (0, 7)
    assert repage((1, 2, 7), range(9), 2) == (1, 7)
    assert repage((2, 5, 8), range(9), 3) == (2, 5, 8)


@pytest.mark.parametrize("before", [25, 27, 28, 29, 30, 33])
def test_both_ends_stay_narrow_when_blocks_return(before: int) -> None:
    """The load of the first paged block hides what is computed between it and the second."""
    paged = repage(spread(before, 48), range(48), 17)
    even = 3  # 48 / 17, rounded up
    assert paged[0] <= even / 2 and 47 - paged[-1] <= even / 2
    assert paged[1] - paged[0] <= even and paged[-1] - paged[-2] <= even
    assert step(paged).end <= BACKWARD * (paged[0] + 1) + 1e-9
    # Stretches that are a little wide do not follow each other.
    assert before < 28 or step(paged).seconds <= 1.001 * least(17)


@pytest.mark.parametrize(("total", "fewest"), [(28, 12), (48, 20), (64, 27)])
def test_steps_that_wait_for_the_link_lose_next_to_nothing_elsewhere(
    total: int, fewest: int
) -> None:
    """Whatever was paged before: from none to all blocks, spread, to any number that waits."""
    lost, ends = [], []
    for before in range(0, total + 1, 3):
        for count in range(fewest, total + 1):
            paged = repage(spread(before, total) if before else (), range(total), count)
            found = step(paged, total)
            lost.append(found.seconds / least(count) - 1)
            ends.append(found.end)
    assert mean(lost) < 0.0025 and quantiles(lost, n=10)[-1] < 0.007
    assert mean(ends) < 1.1 * BACKWARD and max(ends) <= 4 * BACKWARD
