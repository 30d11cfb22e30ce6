"""`trainstream report`: pages of finished, running, killed and several runs."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import socket
import xml.etree.ElementTree as ET
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import psutil
import pytest
from matplotlib.colors import to_rgba

from ts_bench.runs.command import command
from ts_bench.runs.figures import (
    DARK,
    LIGHT,
    MOST_POINTS,
    Line,
    Plot,
    draw,
    draw_blocks,
    log_ticks,
    smoothed,
    thinned,
)
from ts_bench.runs.page import render
from ts_bench.runs.reading import FINISHED, RUNNING, STOPPED, read_run, read_runs
from ts_bench.runs.series import blocks, plots
from ts_core.errors import DataError, OptionError


def _session(**changes: Any) -> dict[str, Any]:
    me = psutil.Process(os.getpid())
    line = {
        "kind": "session",
        "step": 0,
        "time": 1000.0,
        "pid": me.pid,
        "process_started": me.create_time(),
        "host": socket.gethostname(),
        "cpus": 2,
        "ram_gb": 8.0,
        "gpu": None,
        "versions": {"torch": "2.11.0"},
    }
    return {**line, **changes}


def _step(step: int, **changes: Any) -> dict[str, Any]:
    line = {
        "kind": "step",
        "step": step,
        "time": 1000.0 + step,
        "loss": 2.0 / step,
        "grad_norm": 1.0 / step,
        "lr": 1e-4,
        "step_s": 0.5,
        "tokens": 100,
        "tokens_per_second": 200.0,
        "rss_gb": 1.5,
        "ts_vram_alloc_gb": 0.5,
        "ts_vram_peak_gb": 0.75,
    }
    return {**line, **changes}


PLACEMENT = {
    "kind": "placement",
    "step": 0,
    "time": 1001.0,
    "slots": 2,
    "slot_bytes": 3 << 20,
    "blocks": [
        {"bytes": 2 << 20, "place": "device", "format": "nf4", "activations": None},
        {"bytes": 3 << 20, "place": "streams", "format": "int8", "activations": "recompute"},
    ],
}


@pytest.fixture
def run_folder(tmp_path: Path) -> Callable[..., Path]:
    """run_folder(name, lines, finished=..., **config): a folder as a fine-tune leaves it."""

    def make(
        name: str, lines: list[dict[str, Any]], *, finished: bool = False, **config: Any
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        settings = {"model": "tiny", "data": ["a.txt"], "method": "lora", "steps": 4, **config}
        notes = {"format": 1, "config": settings, "steps": settings["steps"]}
        (folder / "run.json").write_text(json.dumps(notes))
        (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if finished:
            (folder / "results.json").write_text(json.dumps({"format": 1}))
        return folder

    return make


WHOLE: list[dict[str, Any]] = [
    _session(),
    {"kind": "event", "step": 0, "time": 1001.0, "text": "plan: <block 1> streams & waits"},
    PLACEMENT,
    {"kind": "eval", "step": 0, "time": 1002.0, "loss": 2.0},
    {"kind": "sample", "step": 0, "time": 1002.0, "when": "before", "prompt": "a<b", "text": "uh"},
    *(_step(step) for step in (1, 2, 3, 4)),
    {"kind": "checkpoint", "step": 4, "time": 1005.0, "path": "checkpoints/checkpoint-4"},
    {"kind": "eval", "step": 4, "time": 1006.0, "loss": 1.0},
    {"kind": "sample", "step": 4, "time": 1006.0, "when": "after", "prompt": "a<b", "text": "yes"},
    {"kind": "end", "step": 4, "time": 1007.0, "status": "finished"},
]


class _Page(HTMLParser):
    """The text of a page, its tags, and whether they nest."""

    VOID = ("meta", "br", "img", "link")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def _drawings(page: str) -> list[ET.Element]:
    return [ET.fromstring(found) for found in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_page_of_a_finished_run(run_folder: Callable[..., Path]) -> None:
    page = render([read_run(run_folder("one", WHOLE, finished=True))])
    text = _Page(page).text
    for words in (
        "lora fine-tune of tiny on a.txt",
        "finished: 4 of 4 steps",
        "2.000 → 1.000 held-out loss",
        "7.389 → 2.718 perplexity",
        "500 ms step time, median",
        "200 tokens per second",
        "plan: <block 1> streams & waits",
        "2 blocks, 5.0 MiB as stored (int8, nf4). 1 stay on the device; 1 are copied in",
        "through 2 slots of 3.0 MiB. Activations are recomputed in backward in 1 blocks.",
        "given a<b before uh after yes",
        "checkpoint saved: checkpoints/checkpoint-4",
        "the run finished",
        "no GPU; 2 CPU cores, 7.5 GiB of RAM",
    ):
        assert words in text, words
    assert len(_drawings(page)) == 8  # seven plots, and the blocks


def test_page_needs_nothing_else_and_follows_the_reader_into_the_dark(
    run_folder: Callable[..., Path],
) -> None:
    page = render([read_run(run_folder("one", WHOLE, finished=True))])
    assert not re.search(r"<script|<link|@import|src=", page)
    links = set(re.findall(r"https?://[^\"' <)]+", page))
    assert all("w3.org" in link for link in links)  # names of XML, which nothing fetches
    assert "prefers-color-scheme: dark" in page
    assert "DejaVu" not in page
    drawings = "".join(re.findall(r"<svg.*?</svg>", page, re.DOTALL))
    colors = set(re.findall(r"#[0-9a-f]{6}", re.sub(r'(id|href)="[^"]*"', "", drawings)))
    assert not colors  # every colour is a variable of the page
    for theme in (LIGHT, DARK):
        assert all(color in page for color in (theme.ink, theme.paper, *theme.series))
    ids = re.findall(r'\bid="([^"]+)"', drawings)
    assert len(ids) == len(set(ids)) > 20
    for used in re.findall(r'(?:url\(#|href="#)([^)"]+)', drawings):
        assert used in ids


def test_states(run_folder: Callable[..., Path]) -> None:
    begun = WHOLE[:7]
    running = read_run(run_folder("running", begun))
    assert running.state == RUNNING and running.status().startswith("running: 2 of 4 steps, last")
    assert "run trainstream report again" in render([running])
    for other in ({"host": "elsewhere"}, {"pid": 2**22 + 1}, {"process_started": 1.0}):
        lines = [_session(**other), *begun[1:]]
        killed = read_run(run_folder(f"killed-{next(iter(other))}", lines))
        assert killed.state == STOPPED
        assert killed.status().startswith("stopped without a word after 2 of 4 steps (killed?)")
    gone = _session(pid=2**22 + 1)
    for status, words in (
        ("interrupted", "interrupted after 2 of 4 steps; the same command goes on"),
        ("failed", "failed after 2 of 4 steps: NonFiniteError: nan"),
    ):
        end = {"kind": "end", "step": 2, "time": 1.0, "status": status}
        end["reason"] = "NonFiniteError: nan"
        lines = [gone, *begun[1:], end]
        assert words in read_run(run_folder(status, lines)).status()
        went_on = read_run(run_folder(f"{status}-went-on", [*lines, gone]))
        assert "stopped without a word" in went_on.status()
    assert read_run(run_folder("finished", begun, finished=True)).state == FINISHED


def test_a_run_killed_in_the_middle_of_a_line(run_folder: Callable[..., Path]) -> None:
    folder = run_folder("one", WHOLE[:8])
    with (folder / "history.jsonl").open("a") as stream:
        stream.write('{"kind": "step", "st')
    run = read_run(folder)
    assert run.steps_done == 3 and run.unreadable == 1
    _Page(render([run]))


def test_a_run_that_has_only_begun(run_folder: Callable[..., Path]) -> None:
    text = _Page(render([read_run(run_folder("one", []))])).text
    assert "No step has been taken yet" in text
    folder = run_folder("two", [])
    (folder / "history.jsonl").unlink()
    assert "0 of 4 steps" in _Page(render([read_run(folder)])).text


def test_numbers_that_are_not_finite_or_missing(run_folder: Callable[..., Path]) -> None:
    lines = [
        _session(),
        _step(1, loss=math.nan, grad_norm=None),
        _step(2, loss=math.inf, lr="fast", tokens=None),
        _step(3, step_s=0.0),
        {"kind": "eval", "step": 3, "time": 1.0, "loss": math.nan},
        {"kind": "unheard of", "step": 3},
        {"kind": "placement", "step": 3, "blocks": [{"bytes": 5, "place": "the moon"}]},
    ]
    page = render([read_run(run_folder("one", lines))])
    _Page(page)
    assert _drawings(page)


def test_several_runs_share_their_axes(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    first = run_folder("a/run", WHOLE, finished=True, lr=1e-4)
    second = run_folder("b/run", [_session(), *(_step(s, loss=3.0) for s in (1, 2))], lr=2e-4)
    runs = read_runs([first, second])
    assert [run.name for run in runs] == ["a/run", "b/run"]
    loss = plots(runs)[0]
    assert [line.label for line in loss.lines] == ["a/run", "a/run, held out", "b/run"]
    assert [line.color for line in loss.lines] == [0, 0, 1]
    page = _Page(render(runs))
    assert "Comparison of a/run, b/run" in page.text
    assert "Configuration (what differs comes first) a/run b/run lr 0.0001 0.0002" in page.text
    with pytest.raises(DataError, match="given twice"):
        read_runs([first, tmp_path / "a" / ".." / "a" / "run"])


def test_memory_is_shown_in_a_unit_that_fits(run_folder: Callable[..., Path]) -> None:
    small = read_run(
        run_folder("small", [_session(), _step(1, ts_vram_peak_gb=0.9, rss_gb=2**31 / 1e9)])
    )
    titles = {plot.key: plot.title for plot in plots([small])}
    assert titles["device-memory"] == "device memory, MiB"
    assert titles["host-memory"] == "host memory, GiB"
    host = next(plot for plot in plots([small]) if plot.key == "host-memory")
    assert host.lines[0].y == pytest.approx([2.0])


def test_memory_in_use_shows_beneath_the_most_so_far(run_folder: Callable[..., Path]) -> None:
    step = _step(1, ts_vram_alloc_gb=0.9, ts_vram_peak_gb=0.9)
    run = read_run(run_folder("one", [_session(), step]))
    device = next(plot for plot in plots([run]) if plot.key == "device-memory")
    assert [(line.label, line.style) for line in device.lines] == [
        ("in use", "line"),
        ("most so far", "dashed"),
    ]


def test_preference_runs_show_their_accuracy(run_folder: Callable[..., Path]) -> None:
    lines = [
        _session(),
        *(_step(s, reward_accuracy=s / 4) for s in (1, 2, 3, 4)),
        {"kind": "eval", "step": 4, "time": 1.0, "loss": 0.5, "reward_accuracy": 0.75},
    ]
    run = read_run(run_folder("one", lines, method="dpo"))
    titles = [plot.title for plot in plots([run])]
    assert titles[:2] == ["loss", "share of pairs with the chosen answer ahead"]
    text = _Page(render([run])).text
    assert "75% held-out pairs with the chosen answer ahead" in text
    assert "perplexity" not in text


def test_blocks_take_the_last_placement(run_folder: Callable[..., Path]) -> None:
    moved = {**PLACEMENT, "step": 2, "blocks": [{"bytes": 1 << 20, "place": "disk"}]}
    rows, names = blocks([read_run(run_folder("one", [_session(), PLACEMENT, moved]))])
    assert rows == [("one", [(1.0, 2)])] and names[2] == "streams from disk"


def test_thinning_keeps_the_peaks() -> None:
    count = 50_000
    x = list(range(count))
    y = [0.0] * count
    y[31_234] = 9.0
    y[40_001] = -9.0
    kept_x, kept_y = thinned(x, y)
    assert len(kept_x) <= MOST_POINTS + 2
    assert max(kept_y) == 9.0 and min(kept_y) == -9.0
    assert kept_x[0] == 0 and kept_x[-1] == count - 1 and list(kept_x) == sorted(set(kept_x))
    assert thinned([1], [2]) == ([1], [2])


def test_smoothing_of_a_constant_is_that_constant() -> None:
    assert smoothed([3.0] * 5, 10) == pytest.approx([3.0] * 5)
    assert smoothed([1.0, 3.0], 3) == pytest.approx([1.0, (0.5 * 1 + 1 * 3) / 1.5])


def test_a_picture_of_blocks_says_what_its_colours_mean() -> None:
    rows = [("a", [(1.0, 0), (1.0, 2)]), ("b", [(1.0, 0)])]
    names = ["stays on the device", "streams", "on disk"]
    (legend,) = draw_blocks(rows, names, LIGHT, legend=True).legends
    assert [text.get_text() for text in legend.get_texts()] == ["stays on the device", "on disk"]
    assert [patch.get_facecolor() for patch in legend.get_patches()] == [
        to_rgba(LIGHT.series[0]),
        to_rgba(LIGHT.series[2]),
    ]
    assert not draw_blocks(rows, names, LIGHT).legends  # the page has one of its own


def test_the_command(
    run_folder: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    command.configure(parser)
    folder = run_folder("one", WHOLE, finished=True)
    pictures = tmp_path / "pictures"
    assert command.run(parser.parse_args([str(folder), "--png", str(pictures)])) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == str(folder / "report.html")
    assert (folder / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert sorted(printed[1:]) == sorted(str(file) for file in pictures.iterdir())
    assert (pictures / "loss.png").read_bytes() != (pictures / "loss-dark.png").read_bytes()
    monkeypatch.chdir(tmp_path)
    other = run_folder("two", WHOLE)
    assert command.run(parser.parse_args([str(folder), str(other)])) == 0
    assert (tmp_path / "comparison.html").is_file()
    assert not [path for path in tmp_path.rglob("*.partial")]
    with pytest.raises(OptionError, match="is a folder"):
        command.run(parser.parse_args([str(folder), "-o", str(tmp_path)]))
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="cannot be written"):
        command.write([folder], tmp_path / "file" / "page.html")


def test_folders_that_are_no_runs(run_folder: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder"):
        read_run(tmp_path / "none")
    with pytest.raises(DataError, match=r"has no run\.json"):
        read_run(tmp_path)
    folder = run_folder("one", [])
    (folder / "run.json").write_text("{")
    with pytest.raises(DataError, match=r"run\.json cannot be read"):
        read_run(folder)
    (folder / "run.json").write_text("[]")
    with pytest.raises(DataError, match="holds a list"):
        read_run(folder)
    (folder / "run.json").write_text('{"format": 99, "config": {}}')
    with pytest.raises(DataError, match="has format 99; this reads 1"):
        read_run(folder)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.07, 12, [0.1, 1, 10]),
        (0.5, 5, [0.5, 1, 2, 5]),
        (0.15, 1.5, [0.2, 0.5, 1]),
        (1e-4, 1e5, [1e-4, 1e-2, 1, 100, 1e4]),
    ],
)
def test_ticks_of_a_logarithmic_axis(low: float, high: float, ticks: list[float]) -> None:
    assert log_ticks(low, high) == pytest.approx(ticks)


@pytest.mark.parametrize("low", [1e-6, 0.013, 1.4, 97.0])
@pytest.mark.parametrize("ratio", [1.01, 1.5, 3, 9, 11, 30, 120, 1e5, 1e9])
def test_a_few_labels_of_a_logarithmic_axis_lie_apart(low: float, ratio: float) -> None:
    plot = Plot("norm", "gradient norm", [Line([1, 2], [low, low * ratio], None)], log=True)
    figure = draw(plot, LIGHT)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    bottom, top = axes.get_ylim()
    shown = [
        label.get_window_extent()
        for label in axes.get_yticklabels(which="both")
        if label.get_text() and bottom <= label.get_position()[1] <= top
    ]
    assert 2 <= len(shown) <= 6
    for one, other in itertools.pairwise(sorted(shown, key=lambda box: box.y0)):
        assert one.y1 < other.y0


@pytest.mark.parametrize(
    ("log", "title"), [(True, "gradient norm (log scale)"), (False, "gradient norm")]
)
def test_a_logarithmic_axis_is_called_so(log: bool, title: str) -> None:
    plot = Plot("norm", "gradient norm", [Line([1, 2], [0.3, 1.0], None)], log=log)
    (axes,) = draw(plot, LIGHT).axes
    assert axes.get_title(loc="left") == title


def test_a_long_legend_lies_outside_the_plot() -> None:
    """Grid lines do not strike it through."""
    names = [f"run-number-{index} with a long name" for index in range(4)]
    lines = [Line([1, 2], [1, index], name, index) for index, name in enumerate(names)]
    figure = draw(Plot("loss", "loss", lines), LIGHT)
    figure.draw_without_rendering()
    (legend,) = figure.legends
    (axes,) = figure.axes
    assert axes.get_legend() is None
    assert [text.get_text() for text in legend.get_texts()] == names
    assert not legend.get_window_extent().overlaps(axes.get_tightbbox())
