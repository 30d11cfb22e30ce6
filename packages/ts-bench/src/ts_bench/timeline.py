"""What a GPU did when, as a picture, from the traces that `ts-bench suite --traces` writes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ts_bench.activity import COPY, KERNEL, Span
from ts_bench.plot import OURS_COLOR, RIVAL_COLOR, save
from ts_core.errors import OptionError

COMPUTE, UPDATES = "computation", "updates by the device"
UP, DOWN = "copies to the device", "copies to the host"
COLORS = {COMPUTE: OURS_COLOR, UPDATES: "#d9a441", UP: "#8195a0", DOWN: RIVAL_COLOR}
_UPDATE_KERNEL = "adamw_kernel"
_BINS = 240


def read_trace(path: Path) -> dict[str, list[Span]]:
    """Spans of a trace by lane, in seconds from the first of them.

    Args:
        path: a trace of torch's profiler, as JSON, gzipped or not.

    Raises:
        OptionError: another file, or a trace without a GPU's work.
    """
    lanes: dict[str, list[Span]] = {lane: [] for lane in COLORS}
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        for event in json.loads(text)["traceEvents"]:
            lane = _lane(event)
            if lane is not None:
                start = event["ts"] / 1e6
                kind = COPY if lane in (UP, DOWN) else KERNEL
                lanes[lane].append(Span(kind, event["name"], start, start + event["dur"] / 1e6))
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(
            f"{path} is no trace of torch's profiler ({error}). `ts-bench suite --traces FOLDER` "
            f"writes them."
        ) from error
    begun = min((span.start for spans in lanes.values() for span in spans), default=None)
    if begun is None:
        raise OptionError(f"{path} has no work of a GPU in it; it was recorded without one.")
    return {
        lane: [Span(s.kind, s.name, s.start - begun, s.end - begun) for s in spans]
        for lane, spans in lanes.items()
    }


def _lane(event: dict[str, Any]) -> str | None:
    kind, name = event.get("cat"), event.get("name", "")
    if kind == "kernel":
        return UPDATES if _UPDATE_KERNEL in name else COMPUTE
    if kind == "gpu_memcpy":
        return UP if "HtoD" in name else DOWN if "DtoH" in name else None
    return None


def busy(spans: Sequence[Span], seconds: float, bins: int) -> list[float]:
    """The share of each of `bins` equal parts of `seconds` in which a span of the lane runs."""
    width = seconds / bins
    found = [0.0] * bins
    reached = 0.0  # overlapping spans count once
    for span in sorted(spans, key=lambda span: span.start):
        start, end = max(span.start, reached), min(span.end, seconds)
        reached = max(reached, end)
        while start < end:
            index = min(int(start / width), bins - 1)
            edge = end if index == bins - 1 else min(end, (index + 1) * width)
            if edge <= start:  # rounding put the edge behind us
                edge = min(end, start + width)
            found[index] += (edge - start) / width
            start = edge
    return [min(share, 1.0) for share in found]


def plot_timelines(traces: Sequence[tuple[str, dict[str, list[Span]]]], path: Path) -> None:
    """Draw traces below each other, on one axis of time.

    Args:
        traces: (title, lanes of `read_trace`) each.
        path: the file to write; its ending chooses the format.
    """
    from matplotlib.figure import Figure

    seconds = max(span.end for _, lanes in traces for spans in lanes.values() for span in spans)
    figure = Figure(figsize=(9.0, 1.9 * len(traces) + 0.5), layout="constrained")
    rows = figure.subplots(len(traces), 1, sharex=True, squeeze=False)[:, 0]
    edges = [1000 * seconds * k / _BINS for k in range(_BINS + 1)]
    for axes, (title, lanes) in zip(rows, traces, strict=True):
        used = [lane for lane in COLORS if lanes[lane]]
        for place, lane in enumerate(used):
            share = busy(lanes[lane], seconds, _BINS)
            base = len(used) - 1 - place
            axes.stairs(
                [base + 0.85 * s for s in share],
                edges,
                baseline=base,
                fill=True,
                color=COLORS[lane],
            )
        middles = [len(used) - 1 - place + 0.42 for place in range(len(used))]
        axes.set_yticks(middles, used, fontsize=7)
        axes.set_ylim(0, len(used))
        axes.set_title(title, loc="left", fontsize=8, fontweight="bold")
        axes.tick_params(axis="x", labelsize=7)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right"]].set_visible(False)
    rows[-1].set_xlabel("ms; height: share of the time in which the lane is busy", fontsize=7)
    save(figure, path)
