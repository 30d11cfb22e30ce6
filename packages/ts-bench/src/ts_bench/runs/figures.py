"""The plots of a report, drawn by matplotlib in the colours of a theme.

For the page a figure is drawn once, in stand-in colours that `svg` turns into the page's CSS
variables, so that one drawing serves light and dark.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

MOST_POINTS = 1500
_WIDTH, _HEIGHT = 5.6, 2.75
_LEGEND_ROW = 0.17  # inches
_MOST_TICKS = 6


@dataclass(frozen=True)
class Theme:
    """Colours by role."""

    ink: str
    muted: str
    grid: str
    paper: str
    series: tuple[str, ...]


LIGHT = Theme(
    ink="#1c2733",
    muted="#5b6875",
    grid="#dde3e8",
    paper="#ffffff",
    series=("#1f6feb", "#d9730d", "#1a8f5a", "#c2378f", "#7a4fd6", "#0b8a9e"),
)
DARK = Theme(
    ink="#e3e9ef",
    muted="#94a1ae",
    grid="#2c3742",
    paper="#161d24",
    series=("#6cb2ff", "#ffab5e", "#5fd39a", "#f58bcb", "#b79cff", "#4fd3e6"),
)
# Colours that nothing else has; `svg` replaces each by the CSS variable of that name.
_STAND_IN = Theme(
    ink="#010101",
    muted="#010102",
    grid="#010103",
    paper="#010104",
    series=("#010105", "#010106", "#010107", "#010108", "#010109", "#01010a"),
)


@dataclass(frozen=True)
class Line:
    """One series of a plot.

    Attributes:
        x, y: the points.
        label: for the legend; None shows none.
        color: index among the theme's series colours.
        style: "line", "faint" (raw values behind a smoothed line), "dots" (with a dashed line), or
            "dashed".
    """

    x: Sequence[float]
    y: Sequence[float]
    label: str | None
    color: int = 0
    style: str = "line"


@dataclass(frozen=True)
class Plot:
    """One plot: series over optimizer steps.

    Attributes:
        key: short name, for ids.
        title: what is shown, with its unit.
        lines: the series.
        log: logarithmic values.
        level: a horizontal line (value, label), or None.
        from_zero: whether the axis of values begins at 0.
        marks: steps at which something happened, drawn as vertical lines.
    """

    key: str
    title: str
    lines: list[Line]
    log: bool = False
    level: tuple[float, str] | None = None
    from_zero: bool = False
    marks: list[float] = field(default_factory=list)


def draw(plot: Plot, theme: Theme) -> Figure:
    """The plot as a figure."""
    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    axes = figure.add_subplot()
    labels = [line.label for line in plot.lines if line.label is not None]
    for line in plot.lines:
        x, y = thinned(line.x, line.y)
        color = theme.series[line.color % len(theme.series)]
        axes.plot(x, y, color=color, label=line.label, **_STYLES[line.style](len(x)))
    for mark in plot.marks:
        axes.axvline(mark, color=theme.muted, linewidth=0.8, linestyle=(0, (2, 3)))
    if plot.level is not None:
        value, text = plot.level
        axes.axhline(value, color=theme.muted, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            text,
            (1, value),
            xycoords=("axes fraction", "data"),
            xytext=(-3, 3),
            textcoords="offset points",
            ha="right",
            fontsize=7.5,
            color=theme.muted,
        )
    if plot.log:
        axes.set_yscale("log")
    title = f"{plot.title} (log scale)" if plot.log else plot.title
    _dress(figure, axes, theme, title)
    axes.yaxis.set_major_formatter(_short)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("step", fontsize=8, color=theme.muted)
    axes.margins(x=0.02, y=0.08)
    if plot.from_zero:
        highest = max((max(line.y) for line in plot.lines if len(line.y)), default=0)
        axes.set_ylim(0, 1.08 * highest if highest > 0 else 1)
    if plot.log:
        axes.yaxis.set_major_locator(FixedLocator(log_ticks(*axes.get_ylim())))
        axes.yaxis.set_minor_locator(NullLocator())
    if labels:
        _add_legend(figure, axes, labels, title, theme)
    return figure


def _add_legend(figure: Figure, axes: Any, labels: list[str], title: str, theme: Theme) -> None:
    """Beside the title where it is short, else beneath a plot that grows by its rows."""
    looks: dict[str, Any] = {
        "fontsize": 7.5,
        "frameon": False,
        "labelcolor": theme.ink,
        "handlelength": 1.4,
        "columnspacing": 1.2,
    }
    if len(labels) <= 3 and sum(map(len, labels)) + len(title) < 62:
        axes.legend(
            loc="lower right",
            bbox_to_anchor=(1, 1),
            ncols=len(labels),
            borderaxespad=0.2,
            **looks,
        )
        return
    columns = 2 if max(map(len, labels)) <= 40 else 1
    figure.set_figheight(_HEIGHT + _LEGEND_ROW * math.ceil(len(labels) / columns))
    figure.legend(loc="outside lower left", ncols=columns, **looks)


def log_ticks(low: float, high: float) -> list[float]:
    """Where to label a logarithmic axis from `low` to `high`: at most about six places.

    1, 2 and 5 of each decade, where these are few; else powers of ten, or where those are all but
    none in view, round numbers.
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    seen = [tick for tick in steps if low <= tick <= high]
    if len(seen) < 3:
        even = MaxNLocator(nbins=_MOST_TICKS - 1).tick_values(low, high)
        return [float(tick) for tick in even if low <= tick <= high]
    if len(seen) <= _MOST_TICKS:
        return seen
    tens = [10.0**power for power in powers if low <= 10.0**power <= high]
    return tens[:: math.ceil(len(tens) / _MOST_TICKS)]


_STYLES: dict[str, Any] = {
    "line": lambda count: {"linewidth": 1.7, "marker": _alone(count)},
    "faint": lambda count: {"linewidth": 0.9, "alpha": 0.35, "marker": _alone(count)},
    "dots": lambda count: {"linewidth": 1, "linestyle": (0, (3, 2)), "marker": "o", "ms": 4},
    "dashed": lambda count: {
        "linewidth": 1.3,
        "linestyle": (0, (4, 2)),
        "marker": _alone(count),
    },
}


def _alone(count: int) -> str | None:
    """A single point needs a marker to be seen."""
    return "o" if count == 1 else None


def _short(value: float, place: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _dress(figure: Figure, axes: Any, theme: Theme, title: str) -> None:
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    axes.set_title(title, loc="left", fontsize=9.5, fontweight="bold", color=theme.ink)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(theme.grid)
    axes.tick_params(labelsize=8, colors=theme.muted, which="both", length=0, pad=4)
    axes.grid(axis="y", color=theme.grid, linewidth=0.8)
    axes.set_axisbelow(True)


def draw_blocks(
    rows: Sequence[tuple[str, Sequence[tuple[float, int]]]],
    names: Sequence[str],
    theme: Theme,
    *,
    legend: bool = False,
) -> Figure:
    """Where each block lives: a bar per block, as high as its bytes, in the colour of its place.

    Args:
        rows: per run its name and (MiB, index of the place among `names`) of each block.
        names: the places, in words.
        theme: colours.
        legend: whether to say what the colours mean (the page does, beside the picture).
    """
    figure = Figure(figsize=(2 * _WIDTH + 0.4, 0.75 + 0.95 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    for axes, (run, blocks) in zip(panels, rows, strict=True):
        _dress(figure, axes, theme, run if len(rows) > 1 else "")
        count = len(blocks)
        width = 0.86 if count <= 120 else 1.0
        for place, _ in enumerate(names):
            chosen = [i for i, block in enumerate(blocks) if block[1] == place]
            axes.bar(
                chosen,
                [blocks[i][0] for i in chosen],
                width=width,
                color=theme.series[place % len(theme.series)],
            )
        axes.set_xlim(-0.7, count - 0.3)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=3))
        axes.set_ylabel("MiB", fontsize=8, color=theme.muted)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[-1].set_xlabel("block", fontsize=8, color=theme.muted)
    if legend:
        used = sorted({place for _, blocks in rows for _, place in blocks})
        figure.legend(
            handles=[Patch(color=theme.series[i % len(theme.series)]) for i in used],
            labels=[names[i] for i in used],
            loc="outside upper right",
            ncols=len(used),
            fontsize=7.5,
            frameon=False,
            labelcolor=theme.ink,
        )
    return figure


def thinned(x: Sequence[float], y: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    """At most about MOST_POINTS points: of each stretch the lowest and the highest value."""
    count = len(x)
    if count <= MOST_POINTS:
        return x, y
    stretch = -(-2 * count // MOST_POINTS)
    kept: list[int] = []
    for begin in range(0, count, stretch):
        places = range(begin, min(begin + stretch, count))
        kept += sorted({min(places, key=y.__getitem__), max(places, key=y.__getitem__)})
    kept = sorted({0, *kept, count - 1})
    return [x[i] for i in kept], [y[i] for i in kept]


def smoothed(values: Sequence[float], span: int) -> list[float]:
    """Exponential moving average over about `span` values, without a bias at the beginning."""
    keep = 1 - 2 / (span + 1)
    total = weight = 0.0
    found = []
    for value in values:
        total = keep * total + (1 - keep) * value
        weight = keep * weight + (1 - keep)
        found.append(total / weight)
    return found


def svg(figure: Figure, prefix: str) -> str:
    """The figure, drawn in stand-in colours, as inline SVG in the page's CSS variables.

    Args:
        figure: drawn with `PAGE`.
        prefix: makes the ids of this drawing differ from those of others on the page.
    """
    import matplotlib

    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = re.sub(r"url\(#", f"url(#{prefix}-", text)
    text = re.sub(r'href="#', f'href="#{prefix}-', text)
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", text)
    for variable, color in _variables():
        text = text.replace(color, f"var({variable})")
    return text


PAGE = _STAND_IN


def _variables() -> list[tuple[str, str]]:
    named = [(f"--{role}", getattr(PAGE, role)) for role in ("ink", "muted", "grid", "paper")]
    return named + [(f"--s{index}", color) for index, color in enumerate(PAGE.series)]


def css_variables(theme: Theme) -> str:
    """The declarations that give the page's variables the colours of `theme`."""
    values = [(role, getattr(theme, role)) for role in ("ink", "muted", "grid", "paper")]
    values += [(f"s{index}", color) for index, color in enumerate(theme.series)]
    return " ".join(f"--{name}: {color};" for name, color in values)
