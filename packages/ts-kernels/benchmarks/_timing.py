"""Timing of short device work: CUDA-graph replays over rotating inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

L2_SEVERAL_TIMES = 256 * 2**20  # bytes of distinct inputs, so that none is found in the cache


def milliseconds(calls: Sequence[Callable[[], Any]], repeats: int = 7) -> float:
    """Median time of one call, without launch overhead: all calls are captured as one graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(calls))
    return sorted(times)[len(times) // 2]


def copy_rate_gb_s() -> float:
    """Copy by a kernel (a captured copy_ would use the slower copy engine), read plus written."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    ms = milliseconds([lambda: torch.neg(source, out=target)] * 3)
    return 2 * source.numel() * 4 / ms / 1e6


def liger(path: str) -> Any | None:
    """A name from the Liger kernels, or None where they are not installed."""
    import importlib

    module, name = path.rsplit(".", 1)
    try:
        return getattr(importlib.import_module(f"liger_kernel.{module}"), name)
    except ModuleNotFoundError:
        return None
