"""OffloadAdamW on FSDP2's DTensor parameters: two gloo processes against one without sharding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ts_core.testing.processes import run_ranks

LIMIT = 3e-7


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 8, bias=False))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))


CASES: dict[str, tuple[dict[str, Any], int]] = {
    "eager": ({}, 1),
    "clipped-accumulated": ({"max_grad_norm": 0.05}, 2),
}


@pytest.fixture(scope="module")
def found_by_case(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each case ended with; all run in the same two processes."""
    folder = tmp_path_factory.mktemp("fsdp2")
    worker = Path(__file__).with_name("fsdp2_worker.py")
    run_ranks(worker, str(folder), json.dumps(CASES))
    return {name: torch.load(folder / f"{name}.pt") for name in CASES}


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.parametrize("name", CASES)
def test_two_processes_equal_one(name: str, found_by_case: dict[str, Any]) -> None:
    (options, micro), found = CASES[name], found_by_case[name]
    reference = build()
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    clip = options.get("max_grad_norm")
    for step in range(6):
        for part in range(micro):
            for rank in range(2):
                loss = reference(batch(step * micro + part, rank)).square().mean()
                (loss / (2 * micro)).backward()
        if clip is not None:
            norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), clip)
            assert found["norms"][step] == pytest.approx(norm.item(), rel=1e-5)
        theirs.step()
        theirs.zero_grad()
    for name, parameter in reference.named_parameters():
        # Gradients themselves are summed in another order over the processes.
        assert (found["params"][name] - parameter).abs().max() <= 20 * LIMIT
