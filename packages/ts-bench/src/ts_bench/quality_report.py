"""Rows of `ts-bench quality` as a table, and the file they are kept in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean, stdev

from ts_bench.quality import Row
from ts_bench.quality_cases import BASELINE
from ts_core.errors import DataError

HEADINGS = ("weights", "bytes/weight", "weight error", "loaded", "vs bf16", "after LoRA", "vs bf16")


def read_rows(file: Path) -> list[Row]:
    """The rows of a file of JSON lines; none if it does not exist.

    Raises:
        DataError: a line that is no row.
    """
    if not file.exists():
        return []
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            found.append(Row(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise DataError(f"{file}, line {number}: not a row of `ts-bench quality`.") from error
    return found


def append_row(file: Path, row: Row) -> None:
    """Add one row to a file of JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(asdict(row)) + "\n")


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Cells under `HEADINGS`, one line for each case.

    A case's figure after LoRA is the mean over the seeds that were run, with the standard
    deviation; its ratio to bf16 is taken seed by seed.
    """
    loaded = {row.case: row.perplexity for row in rows if row.seed is None}
    trained: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.seed is not None:
            trained.setdefault(row.case, {})[row.seed] = row.perplexity
    lines = []
    for case in dict.fromkeys(row.case for row in rows):
        first = next(row for row in rows if row.case == case)
        error = "" if not first.weight_error else f"{first.weight_error:.2%}"
        lines.append(
            [
                case,
                f"{first.bytes_per_weight:.3f}",
                error,
                f"{loaded[case]:.4f}" if case in loaded else "",
                _change([loaded[case] / loaded[BASELINE]])
                if case in loaded and BASELINE in loaded
                else "",
                _spread(list(trained.get(case, {}).values())),
                _change(_ratios(trained.get(case, {}), trained.get(BASELINE, {}))),
            ]
        )
    return lines


def markdown(rows: Sequence[Row]) -> str:
    """The table in Markdown."""
    lines = [HEADINGS, ("---", *("---:" for _ in HEADINGS[1:])), *table(rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _ratios(one: dict[int, float], base: dict[int, float]) -> list[float]:
    return [value / base[seed] for seed, value in one.items() if seed in base]


def _change(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    text = f"{mean(ratios) - 1:+.2%}"
    return f"{text} ± {stdev(ratios):.2%}" if len(ratios) > 1 else text


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    text = f"{mean(values):.4f}"
    return f"{text} ± {stdev(values):.4f}" if len(values) > 1 else text
