"""Imports of the process that workers are forked from: none may start CUDA."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from ts_bench import cuda_facts
from ts_bench.cuda_facts import answering, gather
from ts_bench.preload import preload
from ts_bench.processes import NO_CUDA, Starter

FACTS = [
    {"name": "GPU zero", "major": 9, "minor": 0, "total_memory": 5},
    {"name": "GPU one", "major": 8, "minor": 6, "total_memory": 7},
]


def test_torch_answers_from_facts_for_a_while() -> None:
    before = {name: getattr(torch.cuda, name) for name in ("is_available", "device_count")}
    own = before["is_available"](), before["device_count"]()
    with answering(FACTS):
        kept = torch.cuda.is_available
        assert torch.cuda.is_available() and torch.cuda.device_count() == 2
        assert torch.cuda.get_device_capability() == (9, 0)
        assert torch.cuda.get_device_properties("cuda:1").total_memory == 7
        assert torch.cuda.get_device_name(1) == "GPU one"
        assert torch.cuda.current_device() == 0
    assert {name: getattr(torch.cuda, name) for name in before} == before
    assert (kept(), torch.cuda.device_count()) == own


def test_no_facts_are_no_gpu(monkeypatch) -> None:
    with answering([]):
        assert not torch.cuda.is_available()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cuda_facts.read() == []


def test_modules_that_fail_are_told_and_left_out(tmp_path, monkeypatch, capfd) -> None:
    (tmp_path / "preload_breaks.py").write_text("raise ValueError('broken as said')")
    (tmp_path / "preload_fine.py").write_text("import torch\nseen = torch.cuda.get_device_name()")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ["no_such_module_here", "preload_breaks", "preload_fine"]
    preload(json.dumps({"modules": names, "facts": FACTS}))
    assert sys.modules.pop("preload_fine").seen == "GPU zero"
    told = capfd.readouterr()
    assert "No module named 'no_such_module_here'" in told.out
    assert "broken as said" in told.err


def test_without_facts_jobs_run_in_an_interpreter_of_their_own(tmp_path, monkeypatch, capsys):
    def gather() -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(cuda_facts, "gather", gather)
    starter = Starter(preload=True, cuda=True)
    monkeypatch.setattr("ts_bench.processes._interpreter", lambda *args: 0)
    files = [tmp_path / name for name in ("job", "result", "log")]
    assert starter._forked(*files, 5.0) == NO_CUDA
    assert starter.run(*files, 5.0) == 0
    assert not starter.preload
    assert "preloading does not work with CUDA here: no driver" in capsys.readouterr().err


FORKING = """
import os, sys
from pathlib import Path
from ts_bench import processes

folder = Path(sys.argv[1])
starter = processes.Starter(preload=True, cuda=True)
job = '{"engine": "torch", "variant": "plain", "device": "cuda", "warmup": 1, "steps": 1, '
job += '"threads": 1, "scenario": SCENARIO}'
import json
from ts_bench.scenarios import SCENARIOS
(folder / "job").write_text(job.replace("SCENARIO", json.dumps(SCENARIOS["tiny"].to_dict())))
code = starter.run(folder / "job", folder / "result", folder / "log", 120)
print((folder / "log").read_text())
assert starter.preload
assert code == 0, code
assert json.loads((folder / "result").read_text())["status"] == "ok"
"""


@pytest.mark.gpu
def test_on_a_gpu_workers_are_forked_and_use_cuda(tmp_path) -> None:
    command = [sys.executable, "-c", FORKING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (first, *_) = gather()
    assert first["name"] == torch.cuda.get_device_name(0)
