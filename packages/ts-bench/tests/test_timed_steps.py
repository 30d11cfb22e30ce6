"""What is timed: everything from the first timed step on, each piece in one step."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from ts_bench import measure as measuring
from ts_bench.measure import measure
from ts_bench.scenarios import SCENARIOS

SLEEP = 0.02


class Late:
    """Every step leaves something to a thread, which the device is given after a first wait."""

    def __init__(self) -> None:
        self.queued = False
        self.begun: list[float] = []

    def __call__(self) -> torch.Tensor:
        self.begun.append(time.perf_counter())
        self.queued = False
        return torch.tensor(1.0)

    def details(self) -> dict[str, Any]:
        return {}


class Engine:
    API_VERSION = 1
    name = description = "late"
    variants = ("default",)

    def __init__(self, step: Late) -> None:
        self.step = step

    def available(self) -> None:
        return None

    def prepare(self, *args: Any) -> Late:
        return self.step


def test_what_threads_queue_between_two_steps_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Late()

    def synchronize(device: torch.device) -> None:
        if step.queued:  # by a thread, while the device was waited for before
            time.sleep(SLEEP)
        step.queued = True

    monkeypatch.setattr(measuring, "_synchronize", synchronize)
    figures = measure(
        Engine(step), SCENARIOS["tiny"], "default", device=torch.device("cpu"), warmup=1, steps=5
    )
    whole = step.begun[-1] - step.begun[1]
    assert sum(figures.step_s[:-1]) == pytest.approx(whole, rel=0.1, abs=2e-3)
    assert figures.host_s is not None
    assert all(a <= b for a, b in zip(figures.host_s, figures.step_s, strict=True))
