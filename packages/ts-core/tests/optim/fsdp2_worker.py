"""One process of test_fsdp2: python fsdp2_worker.py FOLDER CASES_JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ts_core import OffloadAdamW
from ts_core.testing.processes import fork_ranks


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 33), nn.Tanh(), nn.Linear(33, 8, bias=False))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))


def main(rank: int, folder: Path, cases: dict[str, tuple[dict[str, Any], int]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = dist.init_device_mesh("cpu", (2,))
    for name, (options, micro) in cases.items():
        found = train(mesh, rank, options, micro)
        if rank == 0:
            torch.save(found, folder / f"{name}.pt")
    dist.destroy_process_group()


def train(mesh: Any, rank: int, options: dict[str, Any], micro: int) -> dict[str, Any]:
    model = build()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = OffloadAdamW(model.parameters(), lr=1e-2, accumulation_steps=micro, **options)
    norms = []
    for step in range(6):
        for part in range(micro):
            (model(batch(step * micro + part, rank)).square().mean() / micro).backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.last_grad_norm)
        if step == 2:  # state passes through a state dict, as DTensors
            saved = optimizer.state_dict()
            assert all(isinstance(e["exp_avg"], DTensor) for e in saved["state"].values())
            optimizer.detach()
            optimizer = OffloadAdamW(
                model.parameters(), lr=1e-2, accumulation_steps=micro, **options
            )
            optimizer.load_state_dict(saved)
    full = {name: p.full_tensor() for name, p in model.named_parameters()}
    return {"params": full, "norms": norms}


if __name__ == "__main__":
    fork_ranks(lambda rank: main(rank, Path(sys.argv[1]), json.loads(sys.argv[2])))
