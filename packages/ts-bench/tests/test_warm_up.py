"""A warm-up goes on until an engine has settled, within bounds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from ts_bench import records
from ts_bench.engines import ours
from ts_bench.measure import Counts, measure, warm_up
from ts_bench.scenarios import SCENARIOS
from ts_bench.summary import summarize


class Steps:
    """Settles at a given step (from 1); None: never."""

    def __init__(self, at: int | None) -> None:
        self.at, self.done, self.asked = at, 0, 0

    def __call__(self) -> torch.Tensor:
        self.done += 1
        return torch.tensor(float(self.done))

    def settled(self) -> bool:
        self.asked += 1
        return self.at is not None and self.done >= self.at

    def details(self) -> dict[str, Any]:
        return {}


class Plain(Steps):
    settled = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("at", "settling", "steps", "settled"),
    [(1, 9, 4, True), (4, 9, 4, True), (7, 9, 7, True), (None, 9, 9, False), (7, 0, 4, False)],
)
def test_steps_until_settled(at, settling, steps, settled) -> None:
    step = Steps(at)
    losses, told = warm_up(step, Counts(4, 1, settling=settling), lambda: None)
    assert (len(losses), step.asked, told) == (steps, steps, settled)


def test_an_engine_that_does_not_tell_takes_the_plain_warm_up() -> None:
    losses, told = warm_up(Plain(None), Counts(4, 1, settling=9), lambda: None)
    assert (len(losses), told) == (4, None)


def test_time_ends_it_too() -> None:
    counts = Counts(2, 1, settling=99, settling_s=0.0)
    losses, told = warm_up(Steps(None), counts, lambda: None)
    assert (len(losses), told) == (2, False)


def test_settled_means_quiet_for_some_steps(monkeypatch) -> None:
    report: dict[str, Any] = {"plan": {"settled": False}, "events": [], "replay": {"recorded": 0}}
    monkeypatch.setattr("ts_core.memory_report", lambda model: report)
    settled = ours.Settled(torch.nn.Identity())
    assert not any(settled() for _ in range(9))
    report["plan"]["settled"] = True
    told = [settled() for _ in range(ours.QUIET_STEPS)]
    assert told == [False] * (ours.QUIET_STEPS - 1) + [True]
    for change in ({"replay": {"recorded": 3}}, {"events": ["moved"]}, {"replay": {"dropped": 1}}):
        report.update(change)
        told = [settled() for _ in range(ours.QUIET_STEPS + 1)]
        assert told == [False] * ours.QUIET_STEPS + [True]


def test_trainstream_settles_and_a_row_says_when_one_has_not() -> None:
    tiny = SCENARIOS["tiny"]
    figures = measure(
        ours.ENGINE, tiny, "default", device=torch.device("cpu"), warmup=1, steps=1, settling=30
    )
    assert figures.settled is True
    assert ours.QUIET_STEPS < figures.warmup_steps < 30
    assert len(figures.losses) == figures.warmup_steps + 1
    record = records.Record(
        "run", "2026-12-01T12:00:00+00:00", "", tiny.to_dict(), "trainstream", "", "default", 0, 0,
        records.OK, "", {}, {}, figures,
    )  # fmt: skip
    assert summarize([record])[0].note == ""
    late = dataclasses.replace(figures, settled=False)
    (row,) = summarize([dataclasses.replace(record, measurement=late)])
    assert row.note == f"not settled after {figures.warmup_steps} steps"
