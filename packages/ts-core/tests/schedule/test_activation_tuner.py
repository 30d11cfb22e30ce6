"""The searches over activation policies, driven by made-up step times."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ts_core.schedule.activation_policy import (
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    ActivationLimits,
    ActivationPolicy,
    BlockActivations,
    decide,
)
from ts_core.schedule.activation_tuner import Fixed, RecomputeTuner, SlowdownTuner

BLOCKS = [BlockActivations(100, 100, 10)] * 9


def policy_for(share: float) -> ActivationPolicy:
    return decide(BLOCKS, ActivationLimits(200, 10**6, inflight=0), "auto", "auto", share)


def settle(
    tuner: RecomputeTuner | SlowdownTuner, seconds: Callable[[ActivationPolicy], float]
) -> list[tuple[str, ...]]:
    """Run to the end; the first step of each policy takes ten times longer."""
    tried = []
    for _ in range(200):
        if tuner.settled:
            return tried
        trial = tuner.trial
        tried.append(tuner.current.modes)
        tuner.observe(10 * seconds(tuner.current))
        while tuner.trial == trial and not tuner.settled:
            tuner.observe(seconds(tuner.current))
    raise AssertionError("it does not settle")


@pytest.mark.parametrize("page", [0.2, 1.0, 5.0])
def test_the_cheaper_way_wins(page: float) -> None:
    """Paging costs `page` a block and recomputing 1: the link alone, or the arithmetic alone."""
    tuner = RecomputeTuner(policy_for)

    def seconds(policy: ActivationPolicy) -> float:
        return 10 + page * len(policy.blocks(OFFLOAD)) + len(policy.blocks(RECOMPUTE))

    tried = settle(tuner, seconds)
    assert len(tried) == len(set(tried)) == (2 if page >= 1 else 3)
    assert seconds(tuner.current) <= min(map(seconds, map(ActivationPolicy, tried)))
    if page > 1:
        assert not tuner.current.blocks(OFFLOAD)
    if page < 1:
        assert not tuner.current.blocks(RECOMPUTE)
    assert "chosen" in tuner.reasons[-1]


def test_a_mixture_wins_when_the_link_saturates() -> None:
    """The link hides four pages; each more costs 3, each recomputed block 1."""
    tuner = RecomputeTuner(policy_for)

    def seconds(policy: ActivationPolicy) -> float:
        return 10 + 3 * max(0, len(policy.blocks(OFFLOAD)) - 4) + len(policy.blocks(RECOMPUTE))

    settle(tuner, seconds)
    assert policy_for(tuner.share).blocks(OFFLOAD) and policy_for(tuner.share).blocks(RECOMPUTE)
    assert seconds(tuner.current) < min(seconds(policy_for(0.0)), seconds(policy_for(1.0)))


def test_noise_below_one_percent_changes_nothing() -> None:
    tuner = RecomputeTuner(policy_for)
    times = iter([1.0, 0.995, 0.999, 1.001, 0.998])
    by_modes: dict[tuple[str, ...], float] = {}
    settle(tuner, lambda policy: by_modes.setdefault(policy.modes, next(times, 1.0)))
    assert tuner.share == 1.0


def test_one_slow_step_is_not_the_policy() -> None:
    """The fastest of the window counts, and the step that fills buffers does not."""
    tuner = RecomputeTuner(policy_for, window=2)
    first = tuner.current
    for seconds in (0.1, 50.0):
        tuner.observe(seconds)
        assert tuner.current is first
    tuner.observe(1.0)
    assert tuner.trial == 1
    settle(tuner, lambda policy: 2.0)
    assert tuner.share == 1.0 and "100% 1000.0 ms" in tuner.reasons[-1]


@settings(max_examples=200, deadline=None)
@given(again=st.floats(0.01, 0.5), link=st.floats(0.01, 5))
def test_few_trials_come_close_to_the_best_share(again: float, link: float) -> None:
    """Whatever bounds a step, at most four policies run, and none of the others is much better.

    Args:
        again: computing all moved blocks once more; forward is half of a step at most.
        link: all pages.
    """
    tuner = RecomputeTuner(policy_for)

    def seconds(policy: ActivationPolicy) -> float:
        arithmetic = 1 + again * len(policy.blocks(RECOMPUTE)) / 8
        return max(arithmetic, link * len(policy.blocks(OFFLOAD)) / 8)

    tried = settle(tuner, seconds)
    assert len(tried) <= 4
    all_of_them = [policy_for(k / 16) for k in range(17)]
    best, ends = min(map(seconds, all_of_them)), min(seconds(policy_for(s)) for s in (0.0, 1.0))
    assert seconds(tuner.current) <= min(ends * 1.03, best * 1.13)


def test_nothing_to_weigh() -> None:
    kept = ActivationPolicy((KEEP,) * 3)
    assert RecomputeTuner(lambda share: kept).settled
    fixed = Fixed(kept)
    fixed.observe(1.0)
    assert fixed.settled and fixed.current is kept
    assert SlowdownTuner(ActivationPolicy((KEEP,)), 0.15).settled


@pytest.mark.parametrize("free", range(0, 9))
def test_pages_up_to_the_slowdown_allowed(free: int) -> None:
    """`free` pages cost nothing and each more 0.1 of a step of 1: 0.15 buys one more."""
    tuner = SlowdownTuner(ActivationPolicy((KEEP,) * 9), 0.15)
    settle(tuner, lambda policy: 1 + 0.1 * max(0, len(policy.blocks(OFFLOAD)) - free))
    assert len(tuner.current.blocks(OFFLOAD)) == min(free + 1, 8)
    assert tuner.current.modes[-1] == KEEP
    assert "allowed" in tuner.reasons[-1]


def test_slowdown_keeps_what_the_start_moved() -> None:
    start = ActivationPolicy((RECOMPUTE, KEEP, OFFLOAD, KEEP, KEEP))
    tuner = SlowdownTuner(start, 0.0)
    settle(tuner, lambda policy: 1.0)
    assert tuner.current.modes == (RECOMPUTE, OFFLOAD, OFFLOAD, OFFLOAD, KEEP)
