"""One process of test_data_parallel: python ranks_worker.py FOLDER CASES_JSON.

Cases run one after the other; what each ends with is in FOLDER/NAME.RANK.pt.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ts_core import OffloadAdamW, memory_report, wrap
from ts_core.errors import StateError
from ts_core.testing import inject_delays
from ts_core.testing.processes import fork_ranks

STEPS = 5


class Branches(nn.Module):
    """Rank 1 never uses `extra`, no rank ever uses `idle`."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
        self.extra = nn.Linear(24, 24)
        self.idle = nn.Linear(24, 2)
        self.head = nn.Linear(24, 3, bias=False)
        if frozen:
            for layer in self.layers:
                layer.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor, use_extra: bool) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        if use_extra:
            x = x + self.extra(x)
        return self.head(x)


def build(case: dict[str, Any], seed: int) -> Branches:
    torch.manual_seed(seed)
    return Branches(case.get("frozen", False)).to(getattr(torch, case.get("dtype", "float32")))


def loss_of(model: nn.Module, case: dict[str, Any], step: int, part: int, rank: int) -> Any:
    seed = 1000 * step + 10 * part + rank
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(seed))
    x = x.to(getattr(torch, case.get("dtype", "float32")))
    return model(x, use_extra=rank == 0).float().square().mean() / case.get("micro", 1)


def optimizer_for(model: nn.Module, case: dict[str, Any]) -> tuple[nn.Module, OffloadAdamW]:
    options = {"accumulation_steps": case.get("micro", 1), **case.get("options", {})}
    if case.get("wrap"):
        model, optimizer = wrap(model, torch.optim.AdamW(model.parameters(), lr=1e-2),
                                device="host", **options)  # fmt: skip
        return model, optimizer
    return model, OffloadAdamW(model.parameters(), lr=1e-2, **options)


def run(rank: int, case: dict[str, Any]) -> dict[str, Any]:
    model: nn.Module = build(case, seed=rank)  # other values on each rank: those of 0 count
    if case.get("different"):
        model.head = nn.Linear(24, 3 + rank, bias=False)
    model, optimizer = optimizer_for(model, case)
    norms = []
    with inject_delays(rank) if case.get("delays") else contextlib.nullcontext():
        for step in range(STEPS):
            for part in range(case.get("micro", 1)):
                loss_of(model, case, step, part, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
            norms.append(optimizer.last_grad_norm)
            if step == 2 and not case.get("wrap"):
                saved = optimizer.state_dict()
                optimizer.detach()
                model, optimizer = optimizer_for(model, case)
                optimizer.load_state_dict(saved)
    assert optimizer.processes == 2
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = {"params": params, "norms": norms, "threads": optimizer.threads}
    if case.get("wrap"):
        found["events"] = memory_report(model)["events"]
    return found


def main(rank: int, folder: str, cases: dict[str, dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, case in cases.items():
        try:
            found = run(rank, case)
        except StateError as error:
            found = {"error": str(error)}
        torch.save(found, Path(folder) / f"{name}.{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    fork_ranks(lambda rank: main(rank, sys.argv[1], json.loads(sys.argv[2])))
