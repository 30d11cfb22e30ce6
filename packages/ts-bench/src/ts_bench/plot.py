"""Rows as a picture: step time and device memory, one row of panels per scenario."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ts_bench import records
from ts_bench.summary import Row, is_ours

OURS_COLOR = "#1f6f8b"
RIVAL_COLOR = "#b9c4c9"
LIMIT_COLOR = "#c0392b"
DPI = 100
# What says nothing about an engine has no place in a picture (tables have it).
_UNTOLD = (records.NOT_RUN, records.NOT_INSTALLED)


def plot(rows: Sequence[Row], path: Path, limits_gb: dict[str, float | None], caption: str) -> bool:
    """Draw rows to a file; its ending chooses the format (png, svg, pdf).

    Args:
        rows: from `summarize`. Those that did not run are left out, and scenarios without others.
        path: the file to write.
        limits_gb: memory cap by scenario, drawn as a line; None where there is none.
        caption: one line below the panels, such as the device and the date.

    Returns:
        Whether there was anything to draw.
    """
    from matplotlib.figure import Figure

    ran = {row.scenario for row in rows if row.status == records.OK}
    shown = [row for row in rows if row.scenario in ran and row.status not in _UNTOLD]
    names = list(dict.fromkeys(row.scenario for row in shown))
    if not names:
        return False
    groups = [[row for row in shown if row.scenario == name] for name in names]
    heights = [0.38 * len(group) + 0.6 for group in groups]
    figure = Figure(figsize=(9.5, sum(heights) + 0.4), layout="constrained")
    panels = figure.subplots(len(groups), 2, squeeze=False, gridspec_kw={"height_ratios": heights})
    for name, group, (left, right) in zip(names, groups, panels, strict=True):
        on_device = any(row.peak_allocated_gb is not None for row in group)
        memory = [row.peak_allocated_gb if on_device else row.host_gb for row in group]
        kind = "peak device memory" if on_device else "host memory"
        _bars(left, group, [row.step_ms for row in group], "{:.0f}", ranges=True)
        _bars(right, group, memory, "{:.1f}")
        left.set_title(f"{name}: step time, ms", loc="left", fontsize=9, fontweight="bold")
        right.set_title(f"{kind}, GB", loc="left", fontsize=9)
        right.set_yticklabels([])
        limit = limits_gb.get(name)
        if limit is not None and on_device:
            right.axvline(limit, color=LIMIT_COLOR, linewidth=1, linestyle="--")
            right.set_xlim(0, limit * 1.25)
            right.set_title(f"cap {limit:g} GB", loc="right", fontsize=8, color=LIMIT_COLOR)
    figure.supxlabel(caption, fontsize=8)
    save(figure, path)
    return True


def save(figure: Any, path: Path) -> None:
    """Write a figure, small; its folder is made if it does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    smaller = {"pil_kwargs": {"optimize": True}} if path.suffix == ".png" else {}
    figure.savefig(path, dpi=DPI, **smaller)


def _bars(axes, group, values, form, ranges=False) -> None:  # type: ignore[no-untyped-def]
    places = range(len(group))
    colors = [OURS_COLOR if is_ours(row.engine) else RIVAL_COLOR for row in group]
    axes.barh(places, [value or 0.0 for value in values], color=colors, height=0.65)
    largest = max((value for value in values if value is not None), default=1.0)
    axes.set_xlim(0, largest * 1.25)
    for place, row, value in zip(places, group, values, strict=True):
        text = form.format(value) if value is not None else row.status
        end = value or 0.0
        low, high = row.step_ms_range or (0.0, 0.0)
        if ranges and low < high:
            axes.plot((low, high), (place, place), color="black", linewidth=1)
            end = high
        axes.annotate(
            text,
            (end, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color="black" if row.status == records.OK else LIMIT_COLOR,
        )
    axes.set_yticks(list(places), [_name(row) for row in group], fontsize=8)
    axes.invert_yaxis()
    axes.tick_params(axis="x", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _name(row: Row) -> str:
    """The engine, its options below it (those that are on by name alone)."""
    name, _, options = row.engine.rstrip("]").partition("[")
    told = [re.sub(r"=True$", "", option) for option in options.split(",") if option]
    if row.variant not in ("", "default", "plain"):
        told.append(row.variant)
    return f"{name}\n{', '.join(told)}" if told else name
