"""A page of recorded figures: everything that ran, and what did not."""

from __future__ import annotations

import dataclasses
import json

import matplotlib
import pytest

from ts_bench import records
from ts_bench.cli import main
from ts_bench.plot import plot
from ts_bench.plot_kernels import plot_kernels
from ts_bench.records import Measurement, Record
from ts_bench.scenarios import SCENARIOS
from ts_bench.summary import summarize

STREAMED = SCENARIOS["lora-14b-bf16-1x512-24g"]


def _record(**changes) -> Record:
    figures = Measurement(
        step_s=[0.5, 0.4, 0.6],
        losses=[11.9, 11.8],
        prepare_s=1.0,
        warmup_s=1.0,
        peak_allocated_bytes=22 * 10**9,
        peak_reserved_bytes=23 * 10**9,
        prepare_peak_bytes=None,
        host_rss_bytes=10**9,
        host_peak_rss_bytes=None,
        details={"plan": {"predicted": {"total": 21 * 10**9}}},
        host_s=[0.1, 0.1, 0.2],
        activity={"kernel_s": 0.15, "idle_s": 0.05},
        transferred={"h2d": 11e9, "d2h": 0.0},
        link_gb_s={"h2d": 55.0, "d2h": 55.0},
    )
    made = Record(
        run_id="run",
        date="2026-12-01T12:00:00+00:00",
        command="ts-bench suite stream",
        scenario=STREAMED.to_dict(),
        engine="trainstream",
        description="",
        variant="default",
        repeat=0,
        position=0,
        status=records.OK,
        reason="",
        settings={"steps": 3},
        environment={
            "versions": {"torch": "2.11.0"},
            "machine": {"cpu": "a CPU", "cores": 16, "ram_bytes": 2**37, "python": "3.12"},
            "device": {"type": "cuda", "name": "a GPU", "memory_bytes": 141 << 30},
        },
        measurement=figures,
    )
    return dataclasses.replace(made, **changes)


def test_a_page_has_tables_outputs_tests_and_its_sources(tmp_path, capsys) -> None:
    run, results = tmp_path / "records.jsonl", tmp_path / "results.jsonl"
    records.append(run, _record())
    records.append(
        run, _record(engine="unsloth", status="crashed", reason="a | b", measurement=None)
    )
    lines = [
        {"kind": "test-start", "id": "packages/x/tests/test_a.py::one"},
        {"kind": "test-start", "id": "packages/x/tests/test_a.py::hangs"},
        {"kind": "test", "id": "packages/x/tests/test_a.py::one", "outcome": "failed",
         "seconds": 1.0, "text": "long\nE  assert 1 == 2"},
        {"kind": "script", "stage": "decode", "command": "python decode.py --quick",
         "date": "2026-12-01T12:01:00+00:00", "status": "timed out (5 s)", "seconds": 5.0,
         "output": "nf4 3.7 TB/s\n"},
        {"kind": "converge", "way": "on"},
    ]  # fmt: skip
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "docs"
    assert main(["page", str(run), str(results), "--out", str(out), "--name", "day"]) == 0
    assert capsys.readouterr().out == f"{out / 'day.md'}\n"
    page = (out / "day.md").read_text()
    assert page.startswith("# 2026-12-01, a GPU\n")
    assert "141 GiB of device memory, 16 cores of a CPU, 128 GiB RAM" in page
    assert "    ts-bench suite stream\n" in page
    # 500 ms, queued in 100, kernels 150, idle 50, 11 GB at 55 GB/s: 40 % of the link
    wanted = ["500.0 ms", "1.00x", "100.0 ms", "150.0 ms", "50.0 ms", "11.00 GB", "40%"]
    (row,) = [line for line in page.splitlines() if line.startswith("| trainstream |")]
    assert [cell for cell in wanted if cell not in row] == []
    assert "22.00 GB | 21.00 GB" in row
    assert "| unsloth | crashed |" in page
    assert "a \\| b" in page
    assert "## decode\n\n    python decode.py --quick" in page
    assert "timed out (5 s)." in page
    assert "    nf4 3.7 TB/s" in page
    assert "- failed: `packages/x/tests/test_a.py::one`: E  assert 1 == 2" in page
    assert "- did not end in time: `packages/x/tests/test_a.py::hangs`" in page
    assert (out / "day-lora-bf16.png").read_bytes().startswith(b"\x89PNG")
    assert "![lora-bf16: step times and memory](day-lora-bf16.png)" in page
    assert (out / "day-records.jsonl").read_text() == run.read_text()


def test_kernels_are_drawn_small(tmp_path) -> None:
    def row(kernel: str, size: str, contender: str, share: float | None) -> dict[str, object]:
        shares = {"forward_share": share, "backward_share": share}
        return {"kernel": kernel, "size": size, "contender": contender, **shares}

    contenders = {"ts_kernels": 0.95, "eager": 0.2, "compile": 0.8, "liger": 0.85}
    sizes = [f"{rows} x 5120" for rows in (512, 1024, 2048, 4096, 8192)]
    kernels = ["rms_norm", "add_rms_norm", "rotary", "gated_mlp, silu"]
    rows = [row(k, s, *each) for k in kernels for s in sizes for each in contenders.items()]
    rows.append(row("lora_linear", "512", "ts_kernels", None))
    data = {"device": "a GPU", "torch": "2.11.0", "copy_gb_s": 4300.0, "rows": rows}
    path, other = tmp_path / "kernels.json", tmp_path / "machine.json"
    path.write_text(json.dumps(data, indent=1))
    other.write_text(json.dumps({"kind": "machine"}))
    out = tmp_path / "docs"
    assert main(["page", str(path), str(other), "--out", str(out), "--name", "day"]) == 0
    picture = out / "day-kernels.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size < 200_000
    assert "![kernels: bytes per second](day-kernels.png)" in (out / "day.md").read_text()
    assert json.loads((out / "day-kernels.json").read_text()) == data
    assert not plot_kernels({**data, "rows": rows[-1:]}, tmp_path / "none.png")
    other.write_text("{}")
    assert main(["page", str(other), "--out", str(out), "--name", "day"]) == 2


def test_pictures_leave_out_what_did_not_run(tmp_path) -> None:
    """And name the options of an engine that are on."""
    path = tmp_path / "picture.svg"
    replay = _record(engine="trainstream[kernels=True,slots=3]", variant="checkpointing")
    absent = _record(engine="unsloth", status=records.NOT_INSTALLED, measurement=None)
    full = _record(engine="bitsandbytes", status=records.OUT_OF_MEMORY, measurement=None)
    assert not plot(summarize([absent, full]), path, {}, "caption")
    assert not path.exists()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        assert plot(summarize([replay, absent, full]), path, {}, "caption")
    drawn = path.read_text()
    assert "kernels, slots=3, checkpointing" in drawn
    assert "out of memory" in drawn
    assert "unsloth" not in drawn


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "nothing to make a page of"),
        ("no json\n", "line 1: no JSON object"),
        ("[1]\n", "line 1: no JSON object"),
        ('{"a": 1}\n', "neither a record"),
    ],
)
def test_what_is_no_figure_is_refused(tmp_path, capsys, text, told) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    assert main(["page", str(path), "--out", str(tmp_path), "--name", "day"]) == 2
    assert told in capsys.readouterr().err
