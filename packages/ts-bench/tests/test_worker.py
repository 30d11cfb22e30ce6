"""What a worker answers, without the cost of a process."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys

import pytest
import torch

from ts_bench import processes
from ts_bench.measure import measure
from ts_bench.scenarios import SCENARIOS
from ts_bench.worker import run
from ts_core.errors import OptionError
from ts_core.registry import Registry

TINY = SCENARIOS["tiny"]


@pytest.fixture(autouse=True)
def fresh_registry(monkeypatch) -> None:
    """Loaded engines are not kept from one test to the next."""
    monkeypatch.setattr("ts_core.registry.bench_engines", Registry("trainstream.bench_engines"))


def _run(engine, *, variant="plain", scenario=TINY, steps=2):
    job = {"engine": engine, "variant": variant, "scenario": scenario.to_dict(), "device": "cpu"}
    return run({**job, "warmup": 1, "steps": steps, "threads": None})


@pytest.mark.parametrize(
    ("engine", "variant", "status", "reason"),
    [
        ("good", "plain", "ok", ""),
        ("greedy", "plain", "out of memory", "CUDA out of memory. Tried to allocate 7 GiB"),
        ("greedy", "small", "ok", ""),
        ("hungry", "small", "out of memory", "small does not fit"),
        ("choosy", "plain", "unsupported", "lora is not for me"),
        ("nan", "plain", "crashed", "NonFiniteError: the loss of step 1 (from 0) is nan"),
        ("failing", "plain", "crashed", "KeyError: 'gate_proj'"),
    ],
)
def test_every_end_is_told(odd_engines, engine, variant, status, reason) -> None:
    result = _run(engine, variant=variant)
    assert (result["status"], result["reason"]) == (status, reason)
    assert (result["measurement"] is None) == (status != "ok")
    assert result["environment"]["machine"]["ram_bytes"] > 10**9


def test_broken_engine_is_told(odd_engines) -> None:
    result = _run("broken")
    assert result["status"] == "crashed"
    assert "BrokenPluginError" in result["reason"]


def test_changed_scenarios_reach_the_engine(odd_engines) -> None:
    result = _run("good", scenario=dataclasses.replace(TINY, tokens=77), steps=3)
    assert result["measurement"]["losses"] == [77.0, 78.0, 79.0, 80.0]
    assert len(result["measurement"]["step_s"]) == 3


@pytest.mark.parametrize("counts", [{"warmup": 0, "steps": 1}, {"warmup": 1, "steps": 0}])
def test_measuring_nothing_is_refused(counts) -> None:
    with pytest.raises(OptionError, match=r"warmup and steps: .* not accepted"):
        measure(object(), TINY, "plain", device=torch.device("cpu"), **counts)  # type: ignore[arg-type]


@pytest.mark.gpu
def test_a_cap_above_the_device_is_refused() -> None:
    scenario = dataclasses.replace(TINY, limit_bytes=10**15)
    with pytest.raises(OptionError, match="limit: 1000000000000000 bytes are more than the device"):
        measure(object(), scenario, "plain", device=torch.device("cuda", 0), warmup=1, steps=1)  # type: ignore[arg-type]


def test_an_interrupt_while_a_worker_begins_ends_it(tmp_path, monkeypatch) -> None:
    """Ctrl-C between the start of a process and the moment at which it is known."""
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(command, **options):
        started.append(real([sys.executable, "-c", "import time; time.sleep(60)"], **options))
        signal.raise_signal(signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(processes.subprocess, "Popen", popen)
    with pytest.raises(KeyboardInterrupt):
        processes.Starter().run(tmp_path / "job", tmp_path / "result", tmp_path / "log", 30.0)
    (worker,) = started
    try:
        assert worker.poll() == -signal.SIGKILL
    finally:
        worker.kill()
        worker.wait()


def test_a_worker_whose_starter_is_gone_before_it_looks_ends() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    code = f"import os; from ts_bench import worker; worker._end_with(os.getppid(), {gone.pid})"
    ended = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert ended.returncode == 1
