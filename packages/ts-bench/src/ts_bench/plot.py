"""Rows as a picture: step time and device memory, one row of panels per scenario."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ts_bench import records
from ts_bench.summary import Row, is_ours

OURS_COLOR = "#1f6f8b"
RIVAL_COLOR = "#b9c4c9"
LIMIT_COLOR = "#c0392b"


def plot(rows: Sequence[Row], path: Path, limits_gb: dict[str, float | None], caption: str) -> None:
    """Draw rows to a file; its ending chooses the format (png, svg, pdf).

    Args:
        rows: from `summarize`.
        path: the file to write.
        limits_gb: memory cap by scenario, drawn as a line; None where there is none.
        caption: one line below the panels, such as the device and the date.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row.scenario for row in rows))
    groups = [[row for row in rows if row.scenario == name] for name in names]
    heights = [0.45 * len(group) + 1.1 for group in groups]
    figure = Figure(figsize=(10, sum(heights) + 0.5), layout="constrained")
    panels = figure.subplots(len(groups), 2, squeeze=False, gridspec_kw={"height_ratios": heights})
    for name, group, (left, right) in zip(names, groups, panels, strict=True):
        on_device = any(row.peak_allocated_gb is not None for row in group)
        memory = [row.peak_allocated_gb if on_device else row.host_gb for row in group]
        kind = "peak device memory" if on_device else "host memory"
        _bars(left, group, [row.step_ms for row in group], "step time, ms", "{:.0f}")
        _bars(right, group, memory, f"{kind}, GB", "{:.2f}")
        left.set_title(name, loc="left", fontsize=10, fontweight="bold")
        right.set_yticklabels([])
        limit = limits_gb.get(name)
        if limit is not None and on_device:
            right.axvline(limit, color=LIMIT_COLOR, linewidth=1, linestyle="--")
            right.set_xlim(0, limit * 1.25)
            right.set_title(f"cap {limit:g} GB", loc="right", fontsize=8, color=LIMIT_COLOR)
    figure.supxlabel(caption, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _bars(axes, group, values, label, form) -> None:  # type: ignore[no-untyped-def]
    places = range(len(group))
    colors = [OURS_COLOR if is_ours(row.engine) else RIVAL_COLOR for row in group]
    axes.barh(places, [value or 0.0 for value in values], color=colors, height=0.65)
    largest = max((value for value in values if value is not None), default=1.0)
    axes.set_xlim(0, largest * 1.25)
    for place, row, value in zip(places, group, values, strict=True):
        text = form.format(value) if value is not None else row.status
        axes.annotate(
            text,
            (value or 0.0, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color="black" if row.status == records.OK else LIMIT_COLOR,
        )
    axes.set_yticks(list(places), [_name(row) for row in group], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(label, fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def _name(row: Row) -> str:
    plain = row.variant in ("", "default", "plain")
    return row.engine if plain else f"{row.engine}\n({row.variant})"
