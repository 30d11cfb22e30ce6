"""OffloadAdamW on FSDP2's DTensor parameters: two gloo processes against one without sharding."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

LIMIT = 3e-7


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 8, bias=False))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def run_processes(folder: str, options: dict[str, Any], micro: int) -> dict[str, Any]:
    worker = Path(__file__).with_name("fsdp2_worker.py")
    port = str(_free_port())
    running = [
        subprocess.Popen(
            [sys.executable, worker, str(rank), port, folder, json.dumps(options), str(micro)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in running:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors[-3000:]
    found: dict[str, Any] = torch.load(Path(folder) / "found.pt")
    return found


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.parametrize(
    ("options", "micro"),
    [({}, 1), ({"max_grad_norm": 0.05}, 2)],
    ids=["eager", "clipped-accumulated"],
)
def test_two_processes_equal_one(options: dict[str, Any], micro: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = run_processes(folder, options, micro)
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
