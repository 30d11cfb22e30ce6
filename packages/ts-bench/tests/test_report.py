"""Records on disk, summaries, tables and pictures."""

from __future__ import annotations

import dataclasses
import io

import pytest

from ts_bench import records
from ts_bench.plot import plot
from ts_bench.records import Measurement, Record
from ts_bench.report import HEADINGS, OPTIONAL, show, text_tables
from ts_bench.scenarios import SCENARIOS
from ts_bench.summary import summarize
from ts_core.errors import DataError


def _record(engine, step_s=None, *, repeat=0, variant="plain", status="ok", reason="", peak=None):
    measurement = None
    if step_s is not None:
        measurement = Measurement(
            step_s=list(step_s),
            losses=[11.93, 11.5],
            prepare_s=1.0,
            warmup_s=2.0,
            peak_allocated_bytes=peak,
            peak_reserved_bytes=None if peak is None else peak + 10**9,
            prepare_peak_bytes=None,
            host_rss_bytes=3 * 10**9,
            host_peak_rss_bytes=None,
        )
    return Record(
        run_id="run",
        date="2026-11-29T12:00:00+00:00",
        command="ts-bench compare",
        scenario=SCENARIOS["lora-14b-nf4-1x512-24g"].to_dict(),
        engine=engine,
        description="",
        variant=variant,
        repeat=repeat,
        position=0,
        status=status,
        reason=reason,
        settings={"steps": 3},
        environment={"versions": {"torch": "2.11.0"}, "device": {"name": "a GPU"}},
        measurement=measurement,
    )


FOUND = [
    _record("bitsandbytes", status=records.OUT_OF_MEMORY, reason="CUDA out of memory"),
    _record("bitsandbytes", [0.7, 0.8, 9.0], variant="checkpointing", peak=12 * 10**9),
    _record("trainstream", [0.2, 0.2, 0.3], variant="default", peak=20 * 10**9),
    _record("torch", status=records.OUT_OF_MEMORY, reason="CUDA out of memory"),
    _record("bitsandbytes", [0.6], repeat=1, variant="checkpointing", peak=13 * 10**9),
    _record("trainstream", [0.1], repeat=1, variant="default", peak=21 * 10**9),
    _record("unsloth", status=records.NOT_INSTALLED, reason="pip install unsloth", variant=""),
]


def test_summary_takes_medians_and_ratios_within_a_round() -> None:
    rows = {row.engine: row for row in summarize(FOUND)}
    assert list(rows) == ["bitsandbytes", "trainstream", "torch", "unsloth"]
    rival = rows["bitsandbytes"]
    assert rival.step_ms == pytest.approx(700)  # of 800 and 600
    assert rival.step_ms_range == pytest.approx((600, 800))
    assert rival.ratio == pytest.approx((0.8 / 0.2 + 0.6 / 0.1) / 2)
    assert (rival.peak_allocated_gb, rival.peak_reserved_gb, rival.rounds) == (13, 14, 2)
    assert (rival.variant, rival.note) == ("checkpointing", "plain: out of memory")
    assert rows["trainstream"].ratio == 1
    assert rows["torch"].status == records.OUT_OF_MEMORY
    assert rows["torch"].step_ms is None
    assert rows["unsloth"].note == "pip install unsloth"


def test_the_range_is_of_medians_of_ten_steps() -> None:
    noisy = [0.1] * 9 + [5.0] + [0.3] * 10 + [0.2] * 10
    found = [_record("trainstream", noisy), _record("trainstream", [0.4] * 3, repeat=1)]
    (row,) = summarize(found)
    assert row.step_ms_range == pytest.approx((100, 400))
    assert summarize(found[:1])[0].step_ms_range == pytest.approx((100, 300))


def test_another_baseline() -> None:
    rows = {row.engine: row for row in summarize(FOUND, "bitsandbytes")}
    assert rows["trainstream"].ratio == pytest.approx((0.2 / 0.8 + 0.1 / 0.6) / 2)
    assert rows["bitsandbytes"].ratio == 1


def test_rounds_without_the_baseline_give_no_ratio() -> None:
    found = [*FOUND, _record("lone", [5.0], repeat=7)]
    rows = {row.engine: row for row in summarize(found)}
    assert rows["lone"].ratio is None
    assert rows["lone"].step_ms == pytest.approx(5000)


def test_table_shows_every_engine() -> None:
    text = text_tables(summarize(FOUND))
    lines = text.splitlines()
    assert lines[0] == "## lora-14b-nf4-1x512-24g"
    assert lines[1].split() == " ".join(h for h in HEADINGS if h not in OPTIONAL).split()
    assert lines[6:] == ["loss: of step 1 and of step 2"]
    rival = lines[2]
    assert rival.startswith("bitsandbytes (checkpointing)")
    for part in ("700.0 ms", "600.0-800.0", "5.00x", "13.00 GB", "14.00 GB", "3.00 GB"):
        assert part in rival
    assert "11.930 > 11.500" in rival
    assert lines[4].split("  ")[0] == "torch"
    assert "out of memory" in lines[4]
    assert "not installed" in lines[5]
    assert "pip install unsloth" in lines[5]


def test_last_losses_are_of_the_same_step() -> None:
    """An engine that warms up for longer has seen more batches at its end."""
    longer = _record("trainstream", [0.2])
    assert longer.measurement is not None
    longer.measurement.losses[:] = [11.93, 11.5, 11.2, 11.9]
    rows = summarize([_record("torch", [0.3]), longer, FOUND[0]])
    assert [row.last_loss for row in rows] == [11.5, 11.5, None]
    assert [row.loss_steps for row in rows] == [2, 2, None]
    (alone,) = summarize([longer])
    assert (alone.last_loss, alone.loss_steps) == (11.9, 4)


def test_table_in_a_terminal_has_the_same_cells(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, pipe = Terminal(), io.StringIO()
    show(summarize(FOUND), terminal)
    show(summarize(FOUND), pipe)
    assert pipe.getvalue() == text_tables(summarize(FOUND)) + "\n"
    drawn = terminal.getvalue()
    for part in ("bitsandbytes (checkpointing)", "700.0 ms", "5.00x", "out of memory", "unsloth"):
        assert part in drawn


def test_picture_is_drawn(tmp_path) -> None:
    path = tmp_path / "sub" / "compare.png"
    plot(summarize(FOUND), path, {"lora-14b-nf4-1x512-24g": 24.0}, "a GPU, torch 2.11.0")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_records_survive_the_disk(tmp_path) -> None:
    path = tmp_path / "deep" / "records.jsonl"
    for record in FOUND:
        records.append(path, record)
    assert records.read([path]) == FOUND


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "not a benchmark record"),
        ("[]", "not a benchmark record"),
        ('{"schema": 1}', "not a benchmark record"),
        ('{"schema": 99}', "a record of schema 99, this reads 1"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, told) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(FOUND[0].to_json() + "\n" + line + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=f"records.jsonl, line 2: .*{told}"):
        records.read([path])


def test_missing_file_is_named(tmp_path) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl cannot be read"):
        records.read([tmp_path / "none.jsonl"])


def test_ranges_are_drawn_of_one_round_too() -> None:
    from matplotlib.figure import Figure

    from ts_bench.plot import _bars

    rows = summarize(FOUND)
    steady = dataclasses.replace(rows[0], step_ms=200.0, step_ms_range=(200.0, 200.0), rounds=1)
    moving = dataclasses.replace(steady, step_ms_range=(190.0, 230.0))
    axes = Figure().subplots()
    _bars(axes, [steady, moving], [200.0, 200.0], "{:.0f}", ranges=True)
    (line,) = axes.get_lines()
    assert list(line.get_xdata()) == [190.0, 230.0] and set(line.get_ydata()) == {1}
