"""What is drawn of runs: which numbers, in which plot, in which colour."""

from __future__ import annotations

from collections.abc import Sequence

from ts_bench.runs.figures import Line, Plot, smoothed
from ts_bench.runs.reading import Run

_SMOOTH_FROM = 20  # steps; fewer are drawn as they are
_PLACES = {
    "device": "stays on the device",
    "streams": "streams from host memory",
    "disk": "streams from disk",
}


def plots(runs: Sequence[Run]) -> list[Plot]:
    """The plots of one run, or of several on the same axes; those with anything to show."""
    found = [
        _loss(runs),
        _preference(runs),
        _one(runs, "grad_norm", "gradient norm", log=True),
        _one(runs, "lr", "learning rate", from_zero=True),
        _one(runs, "step_s", "step time, s", from_zero=True),
        _one(runs, "tokens_per_second", "tokens per second", from_zero=True),
        _memory(
            runs,
            "device",
            "device memory",
            (("ts_vram_alloc_gb", "in use"), ("ts_vram_peak_gb", "most so far")),
            last="dashed",  # the two are often one line
        ),
        _memory(
            runs,
            "host",
            "host memory",
            (
                ("rss_gb", "process"),
                ("ts_pinned_gb", "pinned"),
                ("ts_host_state_gb", "optimizer"),
            ),
        ),
    ]
    return [plot for plot in found if plot is not None]


def blocks(runs: Sequence[Run]) -> tuple[list[tuple[str, list[tuple[float, int]]]], list[str]]:
    """(per run its name and (MiB, index of its place) of each block; the places in words)."""
    names = list(_PLACES)
    rows = []
    for run in runs:
        placements = run.of("placement")
        if not placements:
            continue
        found = [
            (block["bytes"] / 2**20, names.index(block["place"]))
            for block in placements[-1].get("blocks", ())
            if block.get("place") in names
        ]
        if found:
            rows.append((run.name, found))
    return rows, list(_PLACES.values())


def _loss(runs: Sequence[Run]) -> Plot | None:
    lines = []
    alone = len(runs) == 1
    for index, run in enumerate(runs):
        steps, values = run.series("loss")
        color = index
        if len(steps) >= _SMOOTH_FROM:
            lines.append(Line(steps, values, None, color, "faint"))
            values = smoothed(values, max(5, len(values) // 30))
            label = "training, smoothed" if alone else run.name
        else:
            label = "training" if alone else run.name
        if steps:
            lines.append(Line(steps, values, label, color))
        held, losses = run.series("loss", kind="eval")
        if held:
            name = "held out" if alone else f"{run.name}, held out"
            lines.append(Line(held, losses, name, 1 if alone else color, "dots"))
    title = "loss" if _preferences(runs) else "loss, nats per token"
    return Plot("loss", title, lines, marks=_sessions(runs)) if lines else None


def _preference(runs: Sequence[Run]) -> Plot | None:
    lines = []
    alone = len(runs) == 1
    for index, run in enumerate(runs):
        steps, values = run.series("reward_accuracy")
        if steps:
            if len(values) >= _SMOOTH_FROM:
                values = smoothed(values, max(5, len(values) // 30))
            lines.append(Line(steps, values, "training" if alone else run.name, index))
        held, accuracy = run.series("reward_accuracy", kind="eval")
        if held:
            name = "held out" if alone else f"{run.name}, held out"
            lines.append(Line(held, accuracy, name, 1 if alone else index, "dots"))
    if not lines:
        return None
    return Plot("accuracy", "share of pairs with the chosen answer ahead", lines, from_zero=True)


def _preferences(runs: Sequence[Run]) -> bool:
    return any(run.config.get("method") == "dpo" for run in runs)


def _one(
    runs: Sequence[Run], name: str, title: str, *, log: bool = False, from_zero: bool = False
) -> Plot | None:
    lines = []
    positive = True
    for index, run in enumerate(runs):
        steps, values = run.series(name)
        if steps:
            positive = positive and min(values) > 0
            lines.append(Line(steps, values, run.name if len(runs) > 1 else None, index))
    if not lines:
        return None
    level = None
    clip = runs[0].config.get("max_grad_norm")
    if name == "grad_norm" and len(runs) == 1 and isinstance(clip, (int, float)) and clip > 0:
        level = (float(clip), f"clipped to {clip:g}")
    return Plot(name, title, lines, log=log and positive, level=level, from_zero=from_zero)


def _memory(
    runs: Sequence[Run],
    key: str,
    title: str,
    parts: Sequence[tuple[str, str]],
    last: str = "line",
) -> Plot | None:
    """Memory over steps; of one run all `parts`, the last of them in the style `last`."""
    found = []
    for index, run in enumerate(runs):
        for number, (name, label) in enumerate(parts):
            if len(runs) > 1 and number:
                continue  # one quantity per run, so that runs can be told apart
            steps, values = run.series(name)
            if any(values):
                told = label if len(runs) == 1 else f"{run.name}, {label}"
                style = last if number == len(parts) - 1 else "line"
                found.append((steps, values, told, number if len(runs) == 1 else index, style))
    if not found:
        return None
    highest = max(max(values) for _, values, *_ in found) * 1e9
    unit, size = ("GiB", 2**30) if highest >= 2**30 else ("MiB", 2**20)
    lines = [
        Line(steps, [value * 1e9 / size for value in values], told, color, style)
        for steps, values, told, color, style in found
    ]
    return Plot(f"{key}-memory", f"{title}, {unit}", lines, from_zero=True)


def _sessions(runs: Sequence[Run]) -> list[float]:
    """Steps from which a run went on after a stop."""
    if len(runs) > 1:
        return []
    return [float(line["step"]) for line in runs[0].of("session")[1:] if line["step"] > 0]
