"""What a GPU did during training steps, from torch's profiler: kernels, copies, and nothing.

The profiled steps come after the timed ones, since profiling slows the host down. So times of
kernels and copies are those of the profile, while idle time is counted against the timed steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TOP = 8
KERNEL, COPY = "kernel", "copy"
# Names of device events that are no work: spans that torch marks around an optimizer's step.
_SPANS = ("Optimizer.", "ProfilerStep", "## ")


@dataclass(frozen=True)
class Span:
    """Something the device did: `kind` is KERNEL or COPY, times are in seconds."""

    kind: str
    name: str
    start: float
    end: float


def profile(
    step: Callable[[], object], steps: int, timed_s: float, trace: Path | None = None
) -> dict[str, Any]:
    """Profile some steps on the current CUDA device.

    Args:
        step: runs one step.
        steps: how many.
        timed_s: seconds of a step without a profiler, against which idle time is counted.
        trace: file to write what ran when to, for Perfetto or chrome://tracing (gzipped if its
            name ends in .gz).

    Returns:
        As `summarize`.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    torch.cuda.synchronize()
    with torch_profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    spans = []
    for event in profiler.events():
        if "CUDA" not in str(event.device_type) or event.name.startswith(_SPANS):
            continue
        if getattr(event, "is_user_annotation", False):
            continue
        copies = event.name.lower().startswith(("memcpy", "memset"))
        times = event.time_range
        spans.append(
            Span(COPY if copies else KERNEL, event.name, times.start / 1e6, times.end / 1e6)
        )
    return summarize(spans, steps, timed_s)


def summarize(spans: Sequence[Span], steps: int, timed_s: float) -> dict[str, Any]:
    """Seconds per step, overlapping work counted once.

    Returns:
        kernel_s: a kernel runs; copy_s: a copy runs; busy_s: either does; idle_s: what remains of
        `timed_s`; wall_s: from the first to the last, as long as timed steps should be but for what
        a profiler costs the host; kernels, copies: how many per step; top: [name, seconds, count]
        per step of the kernels that take longest.
    """
    kernels = [span for span in spans if span.kind == KERNEL]
    copies = [span for span in spans if span.kind == COPY]
    busy_s = covered(spans) / steps
    by_name: dict[str, list[float]] = {}
    for span in kernels:
        found = by_name.setdefault(span.name, [0.0, 0.0])
        found[0] += (span.end - span.start) / steps
        found[1] += 1 / steps
    top = sorted(by_name.items(), key=lambda item: item[1][0], reverse=True)[:TOP]
    return {
        "steps": steps,
        "kernel_s": covered(kernels) / steps,
        "copy_s": covered(copies) / steps,
        "busy_s": busy_s,
        "idle_s": max(0.0, timed_s - busy_s),
        "wall_s": _wall(spans) / steps,
        "kernels": len(kernels) / steps,
        "copies": len(copies) / steps,
        "top": [[name[:100], seconds, count] for name, (seconds, count) in top],
    }


def _wall(spans: Sequence[Span]) -> float:
    begun = min((span.start for span in spans), default=0.0)
    return max((span.end for span in spans), default=0.0) - begun


def covered(spans: Iterable[Span]) -> float:
    """Seconds during which at least one of the spans runs."""
    total, end = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start):
        if span.end > end:
            total += span.end - max(span.start, end)
            end = span.end
    return total


def link_rates(
    device: torch.device, size_bytes: int = 256 << 20, times: int = 4
) -> dict[str, float]:
    """1e9 bytes per second of large page-locked copies, by direction, the best of `times` each."""
    host = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size_bytes, dtype=torch.uint8, device=device)
    best = {}
    for way, (target, source) in {"h2d": (there, host), "d2h": (host, there)}.items():
        found = []
        for _ in range(times + 1):
            begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begun.record()
            target.copy_(source, non_blocking=True)
            ended.record()
            ended.synchronize()
            found.append(size_bytes / begun.elapsed_time(ended) / 1e6)
        best[way] = max(found[1:])
    return best
