"""DistributedDataParallel around stored weights: every process computes what the first one does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

CODECS = ["nf4", "fp8"]
WORKER = """
import sys
import torch
import torch.distributed as dist
import ts_quant

rank, folder, codecs = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
store = dist.FileStore(f"{folder}/store", 2)
dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
torch.manual_seed(rank)  # the processes start from different weights
found = {}
for codec in codecs:
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Linear(32, 4))
    q = ts_quant.quantize(model[0].weight, codec)
    model[0].weight = torch.nn.Parameter(q, requires_grad=False)
    found[f"{codec} before"] = q.dequantize()
    x = torch.linspace(-1, 1, 128).view(2, 64) * (rank + 1)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    parallel(x).square().sum().backward()
    assert type(model[0].weight) is ts_quant.QuantTensor
    found[f"{codec} after"] = model[0].weight.dequantize()
    found[f"{codec} grad"] = model[1].weight.grad
torch.save(found, f"{folder}/{rank}.pt")
dist.destroy_process_group()
"""


@pytest.mark.skipif(
    not torch.distributed.is_gloo_available(), reason="this torch has no gloo processes"
)
def test_processes_take_the_first_ones_weights(tmp_path: Path) -> None:
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(tmp_path), *CODECS],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for worker in workers:
            _, errors = worker.communicate(timeout=120)
            assert worker.returncode == 0, errors
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    for codec in CODECS:
        assert not torch.equal(first[f"{codec} before"], second[f"{codec} before"])
        assert torch.equal(first[f"{codec} after"], first[f"{codec} before"])
        assert torch.equal(second[f"{codec} after"], first[f"{codec} after"])
        assert torch.equal(second[f"{codec} grad"], first[f"{codec} grad"])
