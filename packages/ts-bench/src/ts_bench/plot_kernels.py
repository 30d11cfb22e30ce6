"""The kernels bound by memory as a picture: bytes that must move, per second, of each contender."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ts_bench.plot import LIMIT_COLOR, OURS_COLOR, RIVAL_COLOR, save

COLORS = {
    "ts_kernels": OURS_COLOR,
    "eager": RIVAL_COLOR,
    "compile": "#8195a0",
    "liger": "#d9a441",
}


def plot_kernels(kernels: dict[str, Any], path: Path) -> bool:
    """Draw what `all_kernels.py --json` wrote.

    Args:
        kernels: {device, torch, copy_gb_s, rows}; rows whose shares are None are left out.
        path: the file to write; its ending chooses the format.

    Returns:
        Whether there was anything to draw.
    """
    from matplotlib.figure import Figure

    rows = [row for row in kernels["rows"] if row["forward_share"] is not None]
    if not rows:
        return False
    cases = list(dict.fromkeys((row["kernel"], row["size"]) for row in rows))
    groups = [[row for row in rows if (row["kernel"], row["size"]) == case] for case in cases]
    bars = sum(map(len, groups))
    figure = Figure(figsize=(9.5, 0.16 * bars + 0.13 * len(cases) + 1.0), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    copy = kernels["copy_gb_s"]
    for axes, way in ((left, "forward"), (right, "backward")):
        _bars(axes, groups, [f"{kernel}, {size}" for kernel, size in cases], f"{way}_share", copy)
        axes.set_title(f"{way}, GB/s", loc="left", fontsize=9, fontweight="bold")
    handles, labels = left.get_legend_handles_labels()
    found = dict(zip(labels, handles, strict=True))
    figure.legend(found.values(), found, loc="outside lower right", ncols=5, fontsize=7)
    figure.suptitle(f"{kernels['device']}, torch {kernels['torch']}, bf16", fontsize=8)
    save(figure, path)
    return True


def _bars(
    axes: Any,
    groups: Sequence[Sequence[dict[str, Any]]],
    labels: list[str],
    share: str,
    copy: float,
) -> None:
    place, middles = 0.0, []
    for group in groups:
        for row in group:
            contender = row["contender"]
            rate = row[share] * copy
            color = COLORS.get(contender, "#999999")
            axes.barh(place, rate, height=0.9, color=color, label=contender)
            inside = rate > 0.8 * copy  # beside the bar it would lie on the line
            axes.annotate(
                f"{rate:.0f}",
                (rate, place),
                xytext=(-3 if inside else 3, 0),
                textcoords="offset points",
                ha="right" if inside else "left",
                va="center",
                fontsize=6,
                color="white" if inside else "black",
            )
            place += 1.0
        middles.append(place - len(group) / 2 - 0.5)
        place += 0.8
    axes.axvline(copy, color=LIMIT_COLOR, linewidth=1, linestyle="--", label=f"copy {copy:.0f}")
    axes.set_yticks(middles, labels, fontsize=7)
    axes.set_ylim(place - 0.8, -0.8)
    axes.tick_params(axis="x", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
