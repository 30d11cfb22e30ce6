from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ts_bench.activity import KERNEL, Span
from ts_bench.cli import main
from ts_bench.rounds import Settings
from ts_bench.timeline import COMPUTE, DOWN, UP, UPDATES, busy, read_trace
from ts_core.errors import OptionError


def _event(kind: str, name: str, start_us: float, for_us: float) -> dict[str, Any]:
    return {"cat": kind, "name": name, "ts": start_us, "dur": for_us}


EVENTS = [
    _event("cuda_runtime", "cudaLaunchKernel", 0, 5),
    _event("kernel", "nvjet", 1000, 2000),
    _event("kernel", "adamw_kernel", 2000, 1000),
    _event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1500, 500),
    _event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 4000, 1000),
    _event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 9000, 1000),
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "auto-full.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": EVENTS}).encode()))
    return path


def test_work_is_sorted_into_lanes(trace: Path) -> None:
    lanes = read_trace(trace)
    found = {lane: [(s.start, s.end) for s in spans] for lane, spans in lanes.items()}
    expected = {
        COMPUTE: [(0.0, 0.002)],
        UPDATES: [(0.001, 0.002)],
        UP: [(0.0005, 0.001)],
        DOWN: [(0.003, 0.004)],
    }
    for lane, spans in expected.items():
        assert found[lane] == [pytest.approx(span) for span in spans]


def test_shares_of_time() -> None:
    spans = [Span(KERNEL, "", *ends) for ends in ((0.0, 1.5), (1.0, 1.75), (3.0, 9.0), (3.5, 3.6))]
    assert busy(spans, 4.0, 4) == pytest.approx([1.0, 0.75, 0.0, 1.0])
    assert busy([], 1.0, 2) == [0.0, 0.0]
    many = [Span(KERNEL, "", k / 1000, k / 1000 + 0.0005) for k in range(1000)]
    assert busy(many, 1.0, 7) == pytest.approx([0.5] * 7, abs=0.01)


def test_a_picture_of_traces(trace: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "steps.png"
    assert main(["timeline", str(trace), str(trace), "--title", "before", "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG") and str(out) in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        b"no json",
        b"{}",
        b"\x1f\x8bcut",
        b"[1]",
        b'{"traceEvents": [1]}',
        b'{"traceEvents": [{"cat": "kernel", "name": "a"}]}',
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(text)
    with pytest.raises(OptionError, match="no trace of torch's profiler"):
        read_trace(path)


def test_a_trace_without_a_gpu_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cpu.json"
    path.write_text(json.dumps({"traceEvents": EVENTS[:1]}))
    with pytest.raises(OptionError, match="no work of a GPU"):
        read_trace(path)


@pytest.mark.parametrize(("device", "profiled"), [("cpu", 2), ("cuda", 0)])
def test_traces_of_nothing_are_refused(tmp_path: Path, device: str, profiled: int) -> None:
    with pytest.raises(OptionError, match="traces"):
        Settings(device=device, profiled=profiled, traces=tmp_path)
    assert Settings(device="cuda", profiled=1, traces=tmp_path).traces == tmp_path
