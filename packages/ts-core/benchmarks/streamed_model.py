"""Step time of StreamedModel beside the same blocks resident, and the share of the link it uses.

    python packages/ts-core/benchmarks/streamed_model.py [--blocks 12] [--tokens 8192]

Each block is a gated MLP of 5120 x 13824 (bf16, 0.42 GB), as in a 14B model. Runs in one process,
on a GPU when there is one (else small, on the host device, to check that it runs). Times are
medians of 5.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from ts_core import StreamedModel
from ts_core.memory.arena import default_arena


class Block(nn.Module):
    """A gated MLP with a residual connection."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        options = {"bias": False, "dtype": torch.bfloat16}
        self.gate = nn.Linear(width, inner, **options)
        self.up = nn.Linear(width, inner, **options)
        self.down = nn.Linear(inner, width, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(F.silu(self.gate(x)) * self.up(x))
        return out


def median_s(work: Callable[[], object], device: torch.device, runs: int = 5) -> float:
    """Median seconds of `work` after one warm-up."""
    times = []
    for _ in range(runs + 1):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Measure and print one table."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocks", type=int, default=12 if cuda else 4)
    parser.add_argument("--tokens", type=int, default=8192 if cuda else 64)
    parser.add_argument("--width", type=int, default=5120 if cuda else 64)
    parser.add_argument("--inner", type=int, default=13824 if cuda else 128)
    asked = parser.parse_args()
    device = torch.device("cuda" if cuda else "cpu")
    if cuda:
        torch.cuda.init()
    with device:  # random numbers are quicker there
        blocks = [Block(asked.width, asked.inner).cpu() for _ in range(asked.blocks)]
    block_bytes = sum(p.numel() * p.element_size() for p in blocks[0].parameters())
    x = torch.randn(8, asked.tokens // 8, asked.width, device=device, dtype=torch.bfloat16)

    rate = float("nan")
    if cuda:
        pinned = default_arena().empty((block_bytes,), torch.uint8, tag="benchmark")
        target = torch.empty(block_bytes, dtype=torch.uint8, device=device)
        rate = block_bytes / median_s(lambda: target.copy_(pinned, non_blocking=True), device)
        del pinned, target
        print(f"link, pinned host to device: {rate / 1e9:.1f} GB/s")
    print(f"{asked.blocks} blocks of {block_bytes / 1e9:.3f} GB, {asked.tokens} tokens")
    print(f"{'':34}{'forward s':>10}{'of link':>9}{'train s':>10}{'of link':>9}{'peak GB':>9}")
    for frozen, ahead, microbatches in [(True, 1, 1), (True, 2, 1), (False, 1, 1), (False, 1, 4)]:
        for block in blocks:
            block.requires_grad_(not frozen)
        start = x.clone().requires_grad_()
        with StreamedModel(blocks, device, ahead, microbatches=microbatches) as model:
            report(model, start, frozen, ahead, microbatches, rate, device)
    if cuda:
        resident = nn.Sequential(*blocks).to(device)
        for block in blocks:
            block.requires_grad_(True)

        def step() -> None:
            resident(x).sum().backward()
            resident.zero_grad()

        with torch.no_grad():
            forward = median_s(lambda: resident(x), device)
        torch.cuda.reset_peak_memory_stats()
        train = median_s(step, device)
        peak = torch.cuda.max_memory_allocated() / 1e9
        print(f"{'resident, trained':34}{forward:10.3f}{'':9}{train:10.3f}{'':9}{peak:9.1f}")


def report(
    model: StreamedModel,
    x: torch.Tensor,
    frozen: bool,
    ahead: int,
    microbatches: int,
    rate: float,
    device: torch.device,
) -> None:
    """Measure one setting and print its line."""

    def forward() -> None:
        model.eval()(x)

    def step() -> None:
        model.train()(x).sum().backward()
        model.zero_grad()
        x.grad = None

    shares, times = [], []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for work in (forward, step):
        seconds = median_s(work, device)
        model.reset_stats()
        work()
        times.append(seconds)
        shares.append(model.stats()["load_bytes"] / seconds / rate)
    peak = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else float("nan")
    kind = "frozen" if frozen else "trained"
    name = f"{kind}, {ahead} ahead, {microbatches} microbatch" + "es" * (microbatches > 1)
    print(f"{name:34}{times[0]:10.3f}{shares[0]:9.0%}{times[1]:10.3f}{shares[1]:9.0%}{peak:9.1f}")


if __name__ == "__main__":
    main()
