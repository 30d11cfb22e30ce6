"""A run of `ts-bench adam` as a table and as a picture."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import TextIO

from ts_bench.adam import AdamRun, Timing
from ts_bench.adam_updates import NATIVE, STREAM

HEADINGS = (
    "update",
    "parameters",
    "moments",
    "SIMD",
    "G params/s",
    "best",
    "GB/s",
    "of stream",
    "of torch",
    "CPU s/G",
)
RIGHT = frozenset(HEADINGS[4:])
OURS_COLOR = "#1f6f8b"
RIVAL_COLOR = "#b9c4c9"
STREAM_COLOR = "#c0392b"


def title(run: AdamRun) -> str:
    """One line that says what was measured where."""
    return (
        f"host AdamW, {run.count / 1e6:g} M parameters, {run.threads} threads, "
        f"{run.machine['cpu']}, {run.rounds} rounds, {run.date[:10]}"
    )


def cells(run: AdamRun, timing: Timing) -> list[str]:
    """The cells of one contestant, under `HEADINGS`."""
    of_stream, of_torch = run.of_stream(timing), run.of_torch(timing)
    return [
        timing.name,
        timing.parameters,
        timing.moments,
        timing.level,
        f"{run.params_per_s(timing) / 1e9:.3f}",
        f"{run.count / min(timing.wall_s) / 1e9:.3f}",
        f"{run.bytes_per_s(timing) / 1e9:.1f}",
        "" if of_stream is None else f"{100 * of_stream:.0f} %",
        "" if of_torch is None else f"{of_torch:.2f}x",
        f"{median(timing.cpu_s) / run.count * 1e9:.2f}",
    ]


def show(run: AdamRun, file: TextIO | None = None) -> None:
    """Prints the table: drawn by rich in a terminal, as plain text elsewhere."""
    file = file or sys.stdout
    rows = [cells(run, timing) for timing in ordered(run)]
    if file.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(title=title(run), title_justify="left")
        for heading in HEADINGS:
            table.add_column(heading, justify="right" if heading in RIGHT else "left")
        for row in rows:
            table.add_row(*row, style="dim" if row[0] == STREAM else None)
        Console(file=file).print(table)
    else:
        lines = [list(HEADINGS), *rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(HEADINGS))]
        print(title(run), file=file)
        for line in lines:
            padded = [
                cell.rjust(width) if heading in RIGHT else cell.ljust(width)
                for cell, width, heading in zip(line, widths, HEADINGS, strict=True)
            ]
            print("  ".join(padded).rstrip(), file=file)
    for name, reason in run.missing.items():
        print(f"{name}: not measured, {reason}", file=file)


def ordered(run: AdamRun) -> list[Timing]:
    """By layout in the order measured, within a layout the fastest first."""
    layouts = list(dict.fromkeys((t.parameters, t.moments) for t in run.timings))
    return sorted(
        run.timings,
        key=lambda t: (layouts.index((t.parameters, t.moments)), median(t.wall_s)),
    )


def plot(run: AdamRun, path: Path) -> None:
    """Draws parameters per second, with the plain stream of the same bytes as a mark.

    Args:
        run: what was measured.
        path: the file to write; its ending chooses the format (png, svg, pdf).
    """
    from matplotlib.figure import Figure

    bars = [timing for timing in ordered(run) if timing.name != STREAM]
    streams = {(t.parameters, t.moments): t for t in run.timings if t.name == STREAM}
    figure = Figure(figsize=(9, 0.32 * len(bars) + 1.4), layout="constrained")
    axes = figure.subplots()
    places = range(len(bars))
    rates = [run.params_per_s(timing) / 1e9 for timing in bars]
    colors = [OURS_COLOR if timing.name == NATIVE else RIVAL_COLOR for timing in bars]
    axes.barh(places, rates, color=colors, height=0.7)
    for place, timing, rate in zip(places, bars, rates, strict=True):
        stream = streams.get((timing.parameters, timing.moments))
        mark = 0.0 if stream is None else run.params_per_s(stream) / 1e9
        if stream is not None:
            axes.vlines(mark, place - 0.42, place + 0.42, color=STREAM_COLOR, linewidth=1.5)
        axes.annotate(
            f"{rate:.2f} G/s, {run.bytes_per_s(timing) / 1e9:.0f} GB/s",
            (max(rate, mark), place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
    labels = [" ".join([t.name, t.level]).strip() for t in bars]
    axes.set_yticks(
        places,
        [
            f"{label}: {t.parameters}, {t.moments} moments"
            for label, t in zip(labels, bars, strict=True)
        ],
        fontsize=7,
    )
    axes.invert_yaxis()
    marks = [run.params_per_s(stream) / 1e9 for stream in streams.values()]
    axes.set_xlim(0, 1.3 * max([*rates, *marks]))
    axes.set_xlabel(
        "10^9 parameters per second (red: plain read and rewrite of the same bytes)", fontsize=8
    )
    axes.set_title(title(run), fontsize=8, loc="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
