from __future__ import annotations

import gzip
import json

import pytest
import torch

from ts_bench.activity import COPY, KERNEL, Span, covered, profile, summarize


def _span(kind: str, start: float, end: float) -> Span:
    return Span(kind, f"{kind} {end - start:g}", start, end)


def test_activity_counts_overlapping_work_once() -> None:
    spans = [_span(KERNEL, 0, 4), _span(KERNEL, 1, 2), _span(COPY, 3, 6), _span(KERNEL, 10, 12)]
    assert covered(spans) == 8
    found = summarize(spans, steps=2, timed_s=7.0)
    assert (found["kernel_s"], found["copy_s"], found["busy_s"]) == (3, 1.5, 4)
    assert (found["idle_s"], found["kernels"], found["copies"]) == (3, 1.5, 0.5)
    assert found["top"][0] == ["kernel 4", 2.0, 0.5]
    assert found["wall_s"] == 6.0  # with the time between, in which timed steps do not wait
    nothing = summarize([], steps=1, timed_s=1.0)
    assert (nothing["idle_s"], nothing["wall_s"]) == (1.0, 0.0)


@pytest.mark.gpu
def test_a_trace_of_the_profiled_steps_is_kept(tmp_path) -> None:
    a = torch.randn(512, 512, device="cuda")
    path = tmp_path / "trace.json.gz"
    found = profile(lambda: torch.mm(a, a), 3, 1e-3, path)
    assert found["kernels"] >= 1
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    assert sum(event.get("cat") == "kernel" for event in events) >= 3
