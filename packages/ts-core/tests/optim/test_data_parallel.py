"""Data parallel training: two gloo processes against one with the same samples."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ts_core.testing.processes import run_ranks

WORKER = Path(__file__).with_name("ranks_worker.py")
LIMIT = 6e-6  # gradients are summed in another order over the processes

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without distributed"
)


def worker_module() -> Any:
    spec = importlib.util.spec_from_file_location("ranks_worker", WORKER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"options": {"max_grad_norm": 0.05}},
    "accumulated": {"micro": 3, "options": {"compute_grad_norm": True}, "delays": True},
    "device updates": {"options": {"mode": "gpu", "max_grad_norm": 0.05}, "delays": True},
    "wrapped and paged": {
        "wrap": True,
        "frozen": True,
        "micro": 2,
        "options": {"max_grad_norm": 0.5, "param_offload": True},
        "delays": True,
    },
    "low precision": {"dtype": "bfloat16", "options": {"max_grad_norm": 1.0}},
    "different": {"different": True},
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each case ended with, per rank; all run in the same two processes."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(WORKER, str(folder), json.dumps(CASES))
    return {name: [torch.load(folder / f"{name}.{rank}.pt") for rank in range(2)] for name in CASES}


def alone(case: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[float]]:
    """torch.optim.AdamW in one process, over the mean of both ranks' losses."""
    worker = worker_module()
    model = worker.build(case, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    clip = case.get("options", {}).get("max_grad_norm")
    norms = []
    for step in range(worker.STEPS):
        for part in range(case.get("micro", 1)):
            for rank in range(2):
                (worker.loss_of(model, case, step, part, rank) / 2).backward()
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in model.parameters() if p.grad is not None]
        )
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}, norms


EXACT = [name for name in CASES if name not in ("low precision", "different")]


def ranks_agree(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return (
        first["params"].keys() == second["params"].keys()
        and all(torch.equal(value, second["params"][k]) for k, value in first["params"].items())
        and first["norms"] == second["norms"]
    )


@pytest.mark.parametrize("name", EXACT)
def test_two_processes_equal_one(name: str, found: dict[str, list[dict[str, Any]]]) -> None:
    case, (first, second) = CASES[name], found[name]
    assert ranks_agree(first, second) and first["threads"] >= 1
    params, norms = alone(case)
    for key, value in params.items():
        assert (first["params"][key] - value).abs().max() <= LIMIT, key
    if case.get("options", {}).keys() & {"max_grad_norm", "compute_grad_norm"}:
        assert first["norms"] == pytest.approx(norms, rel=1e-5)
    if case.get("wrap"):
        assert any("data parallel over 2 processes" in line for line in first["events"])


def test_low_precision_gradients_are_summed_in_fp32(found: dict[str, Any]) -> None:
    first, second = found["low precision"]
    assert ranks_agree(first, second)
    params, norms = alone(CASES["low precision"])
    for key, value in first["params"].items():
        # Updates of 1e-2 per step whose sign may differ where a gradient is near zero.
        assert (value - params[key]).abs().mean() <= 2e-3, key
    assert first["norms"] == pytest.approx(norms, rel=0.02)


def test_processes_that_train_other_parameters_are_told(found: dict[str, Any]) -> None:
    for rank in range(2):
        error = found["different"][rank]["error"]
        assert "processes [1] train other parameters than process 0" in error
