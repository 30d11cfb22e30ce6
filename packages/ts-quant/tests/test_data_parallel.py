"""DistributedDataParallel around stored weights: every process computes what the first one does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

WORKER = """
import sys
import torch
import torch.distributed as dist
import ts_quant

rank, folder, codec = int(sys.argv[1]), sys.argv[2], sys.argv[3]
store = dist.FileStore(f"{folder}/store", 2)
dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
torch.manual_seed(rank)  # the processes start from different weights
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 4))
q = ts_quant.quantize(model[0].weight, codec)
model[0].weight = torch.nn.Parameter(q, requires_grad=False)
before = q.dequantize()
parallel = torch.nn.parallel.DistributedDataParallel(model)
x = torch.linspace(-1, 1, 128).view(2, 64) * (rank + 1)
parallel(x).square().sum().backward()
found = {"before": before, "after": model[0].weight.dequantize(), "grad": model[1].weight.grad}
assert type(model[0].weight) is ts_quant.QuantTensor
torch.save(found, f"{folder}/{rank}.pt")
dist.destroy_process_group()
"""


@pytest.mark.skipif(
    not torch.distributed.is_gloo_available(), reason="this torch has no gloo processes"
)
@pytest.mark.parametrize("codec", ["nf4", "fp8"])
def test_processes_take_the_first_ones_weights(codec: str, tmp_path: Path) -> None:
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(tmp_path), codec],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for worker in workers:
        _, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert not torch.equal(first["before"], second["before"])
    assert torch.equal(first["after"], first["before"])
    assert torch.equal(second["after"], first["after"])
    assert torch.equal(second["grad"], first["grad"])
