"""TrainStreamTrainer in two processes: the losses and weights of one process with all samples."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from ts_core.testing.processes import run_ranks

WORKER = Path(__file__).with_name("trainer_ranks_worker.py")

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without distributed"
)


def worker_module() -> Any:
    spec = importlib.util.spec_from_file_location("trainer_ranks_worker", WORKER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_two(folder: Path, started: int = 0) -> list[Any]:
    """Run the worker in two processes, as torchrun would; what each process ended with."""
    run_ranks(WORKER, str(folder), started=started)
    return [torch.load(folder / f"found.{rank}.pt") for rank in range(2)]


def history(found: dict[str, Any], key: str) -> torch.Tensor:
    return torch.tensor([line[key] for line in found["history"] if key in line])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_train_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NCCL; rounding differs more, as a GPU multiplies other batches by other kernels."""
    monkeypatch.setenv("TRAINSTREAM_TEST_RANKS", "cuda")
    wanted = worker_module().train(tmp_path / "alone", rank=0, processes=1)
    (first, again, _), (second, other, _) = run_two(tmp_path, started=2)
    for name, value in first["params"].items():
        assert torch.equal(value, second["params"][name]), name
        torch.testing.assert_close(value, wanted["params"][name], rtol=0, atol=2e-5)
        assert torch.equal(value, again["params"][name]), name
        assert torch.equal(value, other["params"][name]), name
    for key in ("loss", "eval_loss"):
        torch.testing.assert_close(history(first, key), history(wanted, key), rtol=2e-5, atol=0)


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    wanted = worker_module().train(tmp_path / "alone", rank=0, processes=1)
    (first, again, others), (second, other, _) = run_two(tmp_path)
    for name, value in first["params"].items():
        assert torch.equal(value, second["params"][name]), name
        torch.testing.assert_close(value, wanted["params"][name], rtol=0, atol=2e-6)
    for key, rtol in (("loss", 2e-6), ("eval_loss", 2e-6), ("grad_norm", 1e-5)):
        found = history(first, key)
        assert len(found) >= 2
        torch.testing.assert_close(found, history(wanted, key), rtol=rtol, atol=0)
    assert first["saved"] == ["checkpoint-3", "checkpoint-6"]
    for name, value in first["params"].items():  # resumed from the middle
        assert torch.equal(value, again["params"][name]), name
        assert torch.equal(value, other["params"][name]), name
    for kind, several in others.items():
        one = worker_module().train(tmp_path / f"{kind} alone", 0, 1, kind)
        for key, rtol in (("loss", 5e-6), ("eval_loss", 5e-6), ("grad_norm", 1e-5)):
            torch.testing.assert_close(
                history(several, key),
                history(one, key),
                rtol=rtol,
                atol=0,
                msg=lambda m, k=kind, n=key: f"{k}, {n}: {m}",
            )
