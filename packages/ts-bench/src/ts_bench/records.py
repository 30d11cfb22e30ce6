"""What one run leaves behind: a record, one JSON line each."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ts_core.errors import DataError

SCHEMA = 1

OK = "ok"
NOT_INSTALLED = "not installed"
UNSUPPORTED = "unsupported"
OUT_OF_MEMORY = "out of memory"
CRASHED = "crashed"
TIMED_OUT = "timed out"
NOT_RUN = "not run"
STATUSES = (OK, NOT_INSTALLED, UNSUPPORTED, OUT_OF_MEMORY, CRASHED, TIMED_OUT, NOT_RUN)


@dataclass(frozen=True)
class Measurement:
    """The figures of a run that succeeded.

    Attributes:
        step_s: seconds of each timed step, device work included.
        losses: loss of every step, warm-up first.
        prepare_s: seconds to build the model, the adapters and the optimizer.
        warmup_s: seconds of all warm-up steps together.
        peak_allocated_bytes, peak_reserved_bytes: device memory of tensors, and of what the
            caching allocator held, at most, over all steps; None without a CUDA device.
        prepare_peak_bytes: device memory of tensors at most while preparing, likewise.
        host_rss_bytes: resident memory of the process after the last step.
        host_peak_rss_bytes: the most it ever was; None where the system does not tell.
        details: what the engine says about its set-up.
        host_s: seconds of each timed step until the host had queued it all and returned.
        activity: what the GPU did in a step, from a few profiled steps after the timed ones; see
            `ts_bench.activity`. None without a CUDA device, or when it was not asked for.
        transferred: bytes copied between host and device per timed step, by direction ("h2d",
            "d2h"), where the engine counts them.
        link_gb_s: page-locked copies of this process alone, by direction, in 1e9 bytes per second.
        warmup_steps: how many the warm-up took; 0 in older records.
        settled: whether the engine had settled after them; None where it does not tell.
    """

    step_s: list[float]
    losses: list[float]
    prepare_s: float
    warmup_s: float
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    prepare_peak_bytes: int | None
    host_rss_bytes: int
    host_peak_rss_bytes: int | None
    details: dict[str, Any] = field(default_factory=dict)
    host_s: list[float] = field(default_factory=list)
    activity: dict[str, Any] | None = None
    transferred: dict[str, float] | None = None
    link_gb_s: dict[str, float] | None = None
    warmup_steps: int = 0
    settled: bool | None = None


@dataclass(frozen=True)
class Record:
    """One engine on one scenario, once, in a process of its own, whatever came of it.

    Attributes:
        run_id: shared by all records of one `compare` call.
        date: UTC, ISO 8601, when the process was started.
        command: the command line of that call.
        scenario: `Scenario.to_dict()`.
        engine, description, variant: what ran.
        repeat, position: which round, and which place in the round's order (from 0).
        status: one of `STATUSES`.
        reason: for every status but "ok", what happened.
        settings: warm-up and timed steps asked for, device, cap.
        environment: versions and machine.
        measurement: None unless the status is "ok".
    """

    run_id: str
    date: str
    command: str
    scenario: dict[str, Any]
    engine: str
    description: str
    variant: str
    repeat: int
    position: int
    status: str
    reason: str
    settings: dict[str, Any]
    environment: dict[str, Any]
    measurement: Measurement | None
    schema: int = SCHEMA

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @staticmethod
    def from_json(line: str) -> Record:
        """The inverse of `to_json`.

        Raises:
            DataError: the line is not a record of this version.
        """
        try:
            data = json.loads(line)
            if data["schema"] != SCHEMA:
                raise DataError(f"a record of schema {data['schema']}, this reads {SCHEMA}")
            if data["measurement"] is not None:
                data["measurement"] = Measurement(**data["measurement"])
            return Record(**data)
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise DataError(f"not a benchmark record ({error}): {line[:80]!r}") from error


def append(path: Path, record: Record) -> None:
    """Add a record to a file of JSON lines, made if it does not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(record.to_json() + "\n")


def read(paths: Iterable[Path]) -> list[Record]:
    """All records of files of JSON lines.

    Raises:
        DataError: a file cannot be read, or a line is no record.
    """
    records = []
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    records.append(Record.from_json(line))
                except DataError as error:
                    raise DataError(f"{path}, line {number}: {error}") from error
    return records
