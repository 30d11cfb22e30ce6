"""TrainStreamTrainer in two processes: the losses and weights of one process with all samples."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

WORKER = Path(__file__).with_name("trainer_ranks_worker.py")

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without distributed"
)


def run(trainer: str, folder: Path, processes: int, *more: str) -> list[dict[str, Any]]:
    """Run the worker as torchrun would; returns what each process ended with."""
    folder.mkdir(exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = []
    for rank in range(processes):
        several = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        environment = {**os.environ, **(several if processes > 1 else {})}
        batch = str(2 // processes)
        command = [sys.executable, str(WORKER), trainer, str(folder), batch, *more]
        started.append(
            subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        )
    try:
        for process in started:
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors[-4000:]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    return [torch.load(folder / f"found.{rank}.pt") for rank in range(processes)]


def history(found: dict[str, Any], key: str) -> torch.Tensor:
    return torch.tensor([line[key] for line in found["history"] if key in line])


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    (wanted,) = run("TrainStreamTrainer", tmp_path / "alone", 1)
    first, second = run("TrainStreamTrainer", tmp_path / "ours", 2)
    for name, value in first["params"].items():
        assert torch.equal(value, second["params"][name]), name
        torch.testing.assert_close(value, wanted["params"][name], rtol=0, atol=2e-6)
    for key, rtol in (("loss", 2e-6), ("eval_loss", 2e-6), ("grad_norm", 1e-5)):
        found = history(first, key)
        assert len(found) >= 2
        torch.testing.assert_close(found, history(wanted, key), rtol=rtol, atol=0)
    assert first["saved"] == ["checkpoint-3", "checkpoint-6"]

    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "ours/run/checkpoint-3", resumed / "run/checkpoint-3")
    again, other = run("TrainStreamTrainer", resumed, 2, "resume")
    for name, value in first["params"].items():
        assert torch.equal(value, again["params"][name]), name
        assert torch.equal(value, other["params"][name]), name
