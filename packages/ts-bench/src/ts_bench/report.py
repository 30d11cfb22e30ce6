"""Rows as a table for people."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

from ts_bench import records
from ts_bench.summary import Row

HEADINGS = (
    "engine",
    "step",
    "range",
    "ratio",
    "queued",
    "kernels",
    "idle",
    "to GPU",
    "of link",
    "GPU peak",
    "planned",
    "reserved",
    "host",
    "loss",
    "notes",
)
RIGHT = frozenset(HEADINGS[1:13])
# Left out of a table where no row has them.
OPTIONAL = frozenset(("queued", "kernels", "idle", "to GPU", "of link", "planned"))


def cells(row: Row) -> list[str]:
    """The cells of one row, under `HEADINGS`."""
    name = row.engine
    if row.variant not in ("", "default", "plain"):
        name += f" ({row.variant})"
    if row.status != records.OK:
        return [name, row.status, *[""] * (len(HEADINGS) - 3), row.note]
    low, high = row.step_ms_range or (0.0, 0.0)
    return [
        name,
        _milliseconds(row.step_ms),
        f"{low:.1f}-{high:.1f}" if low < high else "",
        "" if row.ratio is None else f"{row.ratio:.2f}x",
        _optional(row.queued_ms, "{:.1f} ms"),
        _optional(row.kernel_ms, "{:.1f} ms"),
        _optional(row.idle_ms, "{:.1f} ms"),
        _optional(row.h2d_gb or None, "{:.2f} GB"),
        _optional(row.link_share or None, "{:.0%}"),
        _gigabytes(row.peak_allocated_gb),
        _optional(row.predicted_gb, "{:.2f} GB"),
        _gigabytes(row.peak_reserved_gb),
        _gigabytes(row.host_gb),
        f"{row.first_loss:.3f} > {row.last_loss:.3f}",
        row.note,
    ]


def table_of(rows: Sequence[Row]) -> list[list[str]]:
    """Headings and one line for each row, without columns that nothing is known for."""
    body = [cells(row) for row in rows]
    kept = [
        index
        for index, heading in enumerate(HEADINGS)
        if heading not in OPTIONAL or any(line[index] for line in body)
    ]
    return [[line[index] for index in kept] for line in (list(HEADINGS), *body)]


def text_tables(rows: Sequence[Row]) -> str:
    """One table per scenario, in plain text."""
    parts = []
    for scenario in dict.fromkeys(row.scenario for row in rows):
        table = table_of([row for row in rows if row.scenario == scenario])
        headings = table[0]
        widths = [max(len(line[i]) for line in table) for i in range(len(headings))]
        lines = [f"## {scenario}"]
        for line in table:
            padded = [
                cell.rjust(width) if heading in RIGHT else cell.ljust(width)
                for cell, width, heading in zip(line, widths, headings, strict=True)
            ]
            lines.append("  ".join(padded).rstrip())
        lines += _losses_told([row for row in rows if row.scenario == scenario])
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def show(rows: Sequence[Row], file: TextIO | None = None) -> None:
    """Print the tables: drawn by rich in a terminal, as plain text elsewhere."""
    file = file or sys.stdout
    if not file.isatty():
        print(text_tables(rows), file=file)
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(file=file)
    for scenario in dict.fromkeys(row.scenario for row in rows):
        here = [row for row in rows if row.scenario == scenario]
        headings, *body = table_of(here)
        told = " ".join(_losses_told(here)) or None
        table = Table(title=scenario, title_justify="left", caption=told, caption_justify="left")
        for heading in headings:
            table.add_column(heading, justify="right" if heading in RIGHT else "left")
        for row, line in zip(here, body, strict=True):
            table.add_row(*line, style=None if row.status == records.OK else "dim")
        console.print(table)


def _losses_told(rows: Sequence[Row]) -> list[str]:
    """Of which steps the losses are, in a line; none where nothing ran."""
    steps = next((row.loss_steps for row in rows if row.loss_steps), None)
    return [f"loss: of step 1 and of step {steps}"] if steps else []


def _optional(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"


def _gigabytes(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} GB"
