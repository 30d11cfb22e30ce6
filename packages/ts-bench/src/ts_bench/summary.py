"""Records to figures: medians over rounds, and ratios taken within a round."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from ts_bench import records
from ts_bench.records import Measurement, Record

OURS = "trainstream"
SERIES = 10  # steps whose median shows how much medians differ
PUBLISHED = "trainstream-0.4.1"


@dataclass(frozen=True)
class Row:
    """One engine on one scenario, over all rounds.

    Attributes:
        scenario, engine, variant: which. The variant is the one that ran at last.
        status: "ok" if any round succeeded, else that of its last record.
        note: why it failed, or which variants failed before; empty if none did.
        step_ms: median over rounds of the round's median step.
        step_ms_range: smallest and largest median of ten steps in a row, over all rounds.
        ratio: median over rounds of this engine's step time over the baseline's in the same
            round (above 1: slower than the baseline); None where a round lacks either.
        peak_allocated_gb, peak_reserved_gb, host_gb: the most over all rounds, 1e9 bytes;
            host_gb is resident memory after the last step.
        first_loss, last_loss: of the first round, the last one after `loss_steps`.
        loss_steps: steps that every engine's first round of this scenario has a loss of, since
            warm-ups differ in length.
        rounds: rounds that succeeded.
        queued_ms: median of what the host took to queue a step and return.
        kernel_ms, idle_ms: the GPU runs a kernel, or nothing, per step; see `ts_bench.activity`.
        h2d_gb: 1e9 bytes copied to the device per step.
        link_share: of the measured rate of the link to the device.
        predicted_gb: peak that trainstream expects once the first step has been measured, or by
            its plan where nothing was to be measured, 1e9 bytes.
    """

    scenario: str
    engine: str
    variant: str
    status: str
    note: str
    step_ms: float | None = None
    step_ms_range: tuple[float, float] | None = None
    ratio: float | None = None
    peak_allocated_gb: float | None = None
    peak_reserved_gb: float | None = None
    host_gb: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    loss_steps: int | None = None
    rounds: int = 0
    queued_ms: float | None = None
    kernel_ms: float | None = None
    idle_ms: float | None = None
    h2d_gb: float | None = None
    link_share: float | None = None
    predicted_gb: float | None = None


def summarize(found: Sequence[Record], baseline: str | None = None) -> list[Row]:
    """One row per scenario and engine, in order of appearance.

    Args:
        found: records of one or more runs.
        baseline: the engine that ratios are relative to; None: of trainstream's forms the one that
            succeeded in most rounds, else the first engine that did.
    """
    rows = []
    for scenario in dict.fromkeys(record.scenario["name"] for record in found):
        here = [record for record in found if record.scenario["name"] == scenario]
        base = baseline or _baseline(here)
        base_ms = {_round(r): _median_ms(r) for r in here if r.engine == base and r.measurement}
        groups = [
            some
            for engine in dict.fromkeys(record.engine for record in here)
            for some in _by_variant([record for record in here if record.engine == engine])
        ]
        firsts = [first for some in groups if (first := _first(some)) is not None]
        counts = [len(first.losses) for first in firsts]
        rows += [_row(some, base_ms, min(counts, default=0)) for some in groups]
    return rows


def _first(found: Sequence[Record]) -> Measurement | None:
    """Of the first round that succeeded."""
    return next((r.measurement for r in found if r.measurement is not None), None)


def is_ours(engine: str) -> bool:
    """Whether an engine (with its options) is a form of this trainstream."""
    return engine.startswith(OURS) and engine != PUBLISHED


def _baseline(found: Sequence[Record]) -> str | None:
    good = Counter(record.engine for record in found if record.status == records.OK)
    ours = [engine for engine in good if is_ours(engine)]
    return max(ours, key=good.__getitem__) if ours else next(iter(good), None)


def _by_variant(found: list[Record]) -> list[list[Record]]:
    """One list, or one for each variant where several succeeded: then each was asked for."""
    good = list(dict.fromkeys(record.variant for record in found if record.status == records.OK))
    if len(good) < 2:
        return [found]
    lists: dict[str, list[Record]] = {variant: [] for variant in good}
    for record in found:
        lists.setdefault(record.variant, []).append(record)
    return list(lists.values())


def _row(found: list[Record], base_ms: dict[tuple[str, int], float], loss_steps: int) -> Row:
    last = found[-1]
    good = [record for record in found if record.measurement is not None]
    name, engine = last.scenario["name"], last.engine
    # A variant that ran out of memory before another succeeded is worth telling; others are the
    # status itself.
    earlier = dict.fromkeys(
        f"{record.variant}: {record.status}" for record in found if record.status != records.OK
    )
    if not good:
        note = "; ".join([*list(earlier)[:-1], last.reason])
        return Row(name, engine, last.variant, last.status, note)
    ms = [_median_ms(record) for record in good]
    ratios = [_median_ms(r) / base_ms[_round(r)] for r in good if _round(r) in base_ms]
    first = _first(good)
    assert first is not None
    figures = [record.measurement for record in good if record.measurement is not None]
    return Row(
        scenario=name,
        engine=engine,
        variant=good[-1].variant,
        status=records.OK,
        note="; ".join([*earlier, *_unsettled(figures)]),
        step_ms=median(ms),
        step_ms_range=_range([figure.step_s for figure in figures]),
        ratio=median(ratios) if ratios else None,
        peak_allocated_gb=_most([figure.peak_allocated_bytes for figure in figures]),
        peak_reserved_gb=_most([figure.peak_reserved_bytes for figure in figures]),
        host_gb=_most([figure.host_rss_bytes for figure in figures]),
        first_loss=first.losses[0],
        last_loss=first.losses[loss_steps - 1],
        loss_steps=loss_steps,
        rounds=len(good),
        **_activity(figures),
    )


def _unsettled(figures: Sequence[Measurement]) -> list[str]:
    """Whether an engine was still changing how it runs when its steps were timed."""
    steps = [figure.warmup_steps for figure in figures if figure.settled is False]
    return [f"not settled after {max(steps)} steps"] if steps else []


def _activity(figures: Sequence[Measurement]) -> dict[str, float]:
    """What the last round that has it tells of the host, the GPU and the link."""
    found: dict[str, float] = {}
    for figure in figures:
        step_s = median(figure.step_s)
        if figure.host_s:
            found["queued_ms"] = 1000 * median(figure.host_s)
        if figure.activity and "kernel_s" in figure.activity:
            found["kernel_ms"] = 1000 * figure.activity["kernel_s"]
            found["idle_ms"] = 1000 * figure.activity["idle_s"]
        if figure.transferred and "h2d" in figure.transferred:
            found["h2d_gb"] = figure.transferred["h2d"] / 1e9
            if figure.link_gb_s:
                found["link_share"] = found["h2d_gb"] / step_s / figure.link_gb_s["h2d"]
        plan = figure.details.get("plan")
        predicted = plan.get("predicted") if isinstance(plan, dict) else None
        if isinstance(predicted, dict) and figure.peak_allocated_bytes is not None:
            assert isinstance(plan, dict)
            found["predicted_gb"] = (plan.get("expected") or predicted["total"]) / 1e9
    return found


def _round(record: Record) -> tuple[str, int]:
    return record.run_id, record.repeat


def _median_ms(record: Record) -> float:
    if record.measurement is None:
        raise ValueError(f"the record of {record.engine} has no measurement ({record.status})")
    return 1000 * median(record.measurement.step_s)


def _range(rounds: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Smallest and largest median in ms of a series, where each round has one or more."""
    medians = []
    for step_s in rounds:
        count = max(1, len(step_s) // SERIES)
        edges = [len(step_s) * k // count for k in range(count + 1)]
        medians += [median(step_s[a:b]) for a, b in itertools.pairwise(edges)]
    return 1000 * min(medians), 1000 * max(medians)


def _most(sizes: Sequence[int | None]) -> float | None:
    known = [size for size in sizes if size is not None]
    return max(known) / 1e9 if known else None
