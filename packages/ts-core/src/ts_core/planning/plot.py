"""A drawing of a plan: blocks in a row, memory by use, and what bounds the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ts_core.errors import DataError, OptionError
from ts_core.planning.outcome import Outcome
from ts_core.planning.render import _NAMES
from ts_core.schedule.plan import human

_KINDS = (".png", ".svg", ".pdf")
_GREEN, _AMBER, _BLUE, _GREY, _RED = "#3a8f5c", "#e0a030", "#4477aa", "#b8bec6", "#c0392b"
_SHADES = [
    "#3a8f5c",
    "#e0a030",
    "#4477aa",
    "#8c6bb1",
    "#66a9a0",
    "#c2667a",
    "#9a9a5b",
    "#5d6d7e",
    "#d4a5a5",
]
_POLICY = {"keep": _GREEN, "offload": _AMBER, "recompute": _BLUE}


def draw(outcome: Outcome, target: str) -> None:
    """Draw the plan into a file.

    Raises:
        OptionError: matplotlib is not installed, or the file's kind is not known.
        DataError: the file cannot be written.
    """
    path = Path(target)
    if path.suffix.lower() not in _KINDS:
        raise OptionError(f"--plot {target}: use a name that ends in {', '.join(_KINDS)}.")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError(
            "--plot needs matplotlib, which is not installed: pip install matplotlib"
        ) from error
    figure = Figure(figsize=(9, 5.2), layout="constrained", dpi=130)
    rows: Any = figure.subplots(3, 1, height_ratios=[1.0, 1.5, 1.3])
    _draw_blocks(rows[0], outcome)
    _draw_memory(rows[1], outcome)
    _draw_time(rows[2], outcome)
    verdict = "fits" if outcome.fits else "DOES NOT FIT"
    figure.suptitle(
        f"{Path(outcome.model).name}: {outcome.training.in_words()}: {verdict}",
        color="black" if outcome.fits else _RED,
    )
    try:
        figure.savefig(path)
    except OSError as error:
        raise DataError(f"--plot {target} cannot be written: {error}") from error


def _draw_blocks(axes: Any, outcome: Outcome) -> None:
    plan = outcome.plan
    count = len(outcome.described.profile.pageable)
    paged = set(plan.paged)
    for index in range(count):
        axes.add_patch(_box(index, 1.1, _AMBER if index in paged else _GREEN))
        if plan.activations:
            axes.add_patch(_box(index, 0.0, _POLICY[plan.activations[index]]))
    axes.set_xlim(0, count)
    axes.set_ylim(-0.1, 2.1)
    axes.set_yticks([0.45, 1.55], ["activations", "weights"])
    axes.set_xlabel("block", labelpad=1)
    from matplotlib.patches import Patch

    names = [(_GREEN, "on the device"), (_AMBER, "host memory, streamed"), (_BLUE, "recomputed")]
    axes.legend(
        handles=[Patch(color=color, label=label) for color, label in names],
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=3,
        frameon=False,
        fontsize=8,
    )
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)


def _box(index: int, bottom: float, color: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((index + 0.06, bottom), 0.88, 0.9, color=color, linewidth=0)


def _draw_memory(axes: Any, outcome: Outcome) -> None:
    names = list(dict.fromkeys([*outcome.plan.predicted, *outcome.plan.host]))
    names = [name for name in names if name not in ("total", "budget")]
    colors = dict(zip(names, _SHADES, strict=False))
    shown = set()
    for row, sizes in ((1, outcome.plan.predicted), (0, outcome.plan.host)):
        left = 0.0
        for name in names:
            size = sizes.get(name, 0) / 2**30
            if size <= 0:
                continue
            label = None if name in shown else _NAMES.get(name, name)
            shown.add(name)
            axes.barh(row, size, left=left, color=colors[name], label=label, height=0.62)
            left += size
        budget = sizes.get("budget")
        if budget is not None:
            axes.plot([budget / 2**30] * 2, [row - 0.42, row + 0.42], color=_RED, linewidth=2)
            axes.text(
                budget / 2**30, row + 0.45, human(budget), color=_RED, fontsize=7, ha="center"
            )
    axes.set_yticks([0, 1], ["host", "device"])
    axes.set_ylim(-0.55, 1.75)
    axes.set_xlabel("GiB (the line is the budget)", labelpad=1)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=7)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_time(axes: Any, outcome: Outcome) -> None:
    seconds = outcome.plan.seconds
    names = {
        "updates": "host updates",
        "to_host": "link to host",
        "to_device": "link to device",
        "compute": "compute",
    }
    if not seconds:
        axes.set_axis_off()
        return
    values = [seconds[name] * 1000 for name in names]
    axes.barh(range(4), values, color=[_GREY, _AMBER, _AMBER, _GREEN], height=0.65)
    axes.axvline(seconds["step"] * 1000, color=_RED, linewidth=1.5)
    axes.set_yticks(range(4), list(names.values()))
    rates = outcome.machine.rates
    origin = "" if rates is None or rates.measured else ", assumed rates"
    axes.set_xlabel(
        f"ms per step: about {seconds['step'] * 1000:.0f} (what overlaps within a pass{origin})"
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
