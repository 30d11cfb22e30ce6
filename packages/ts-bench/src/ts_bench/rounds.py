"""Run engines side by side: each in a fresh process, in rotating order, nothing dropped."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ts_bench import environment, records
from ts_bench.processes import Starter
from ts_bench.records import Measurement, Record
from ts_bench.scenarios import Scenario
from ts_core.errors import OptionError, RegistryError

if TYPE_CHECKING:
    from ts_bench.engines import Engine

LOG_TAIL_LINES = 40


@dataclass(frozen=True)
class Settings:
    """How to run.

    Attributes:
        device: "cuda" or "cpu".
        warmup, steps: steps before timing, and timed.
        settling: steps before timing at most, for engines that tell when they have settled.
        repeats: rounds; each round runs every engine once, starting one further on.
        variant: only this variant of each engine that has it; None tries them in order.
        threads: torch's CPU threads in each process; None leaves torch's choice.
        run_limit_s: seconds one process may take.
        time_limit_s: seconds for everything; what no longer fits is recorded as not run.
        profiled: steps that are profiled on a GPU after the timed ones.
        traces: folder for traces of these steps (an engine's last round counts), or None.
        link: whether each process measures the link between host and device.
        preload: fork the processes from one that has done the common imports.
    """

    device: str
    warmup: int = 3
    steps: int = 8
    repeats: int = 1
    variant: str | None = None
    threads: int | None = None
    run_limit_s: float = 600.0
    time_limit_s: float | None = None
    profiled: int = 0
    traces: Path | None = None
    link: bool = False
    preload: bool = False
    settling: int = 0

    def __post_init__(self) -> None:
        for field in ("warmup", "steps", "repeats"):
            if getattr(self, field) < 1:
                raise OptionError(f"{field}: {getattr(self, field)} is not accepted; use >= 1.")
        if self.traces is not None and not (self.profiled and self.device == "cuda"):
            raise OptionError(
                f"traces: are of profiled steps on a GPU; here {self.profiled} steps are profiled "
                f"on {self.device}. Use --profiled 2 on a GPU, or leave --traces out."
            )


@dataclass(frozen=True)
class Entry:
    """An engine, and scenarios of one model and cap which it runs in one process, in order.

    Attributes:
        engine: its name, with options if it has any: `name[option=value]`.
        scenarios: the first is what the engine is prepared for.
        variant: only this one; None tries them in order.
    """

    engine: str
    scenarios: tuple[Scenario, ...]
    variant: str | None = None


def compare(
    scenarios: Sequence[Scenario],
    engines: Sequence[str],
    settings: Settings,
    *,
    on_record: Callable[[Record], None],
    command: str = "",
) -> list[Record]:
    """Run every engine on every scenario.

    Args:
        scenarios: what to run, in order.
        engines: names of engines; see `ts_core.registry.bench_engines`.
        settings: how.
        on_record: called with each record as soon as it exists.
        command: the command line to note in the records.

    Returns:
        All records: for each scenario, round and engine at least one, and one more for each
        variant that ran out of memory before.
    """
    run = _Run(settings, command, on_record)
    for scenario in scenarios:
        for repeat in range(settings.repeats):
            first = repeat % len(engines)
            order = [*engines[first:], *engines[:first]]
            for position, name in enumerate(order):
                run.entry(Entry(name, (scenario,), settings.variant), repeat, position)
    return run.records


def run_entries(
    rounds: Sequence[Sequence[Entry]],
    settings: Settings,
    *,
    on_record: Callable[[Record], None],
    command: str = "",
) -> list[Record]:
    """Run lists of entries, one list per round; `settings.repeats` and `.variant` count nothing.

    Returns:
        All records, as from `compare`.
    """
    run = _Run(settings, command, on_record)
    for repeat, entries in enumerate(rounds):
        for position, entry in enumerate(entries):
            run.entry(entry, repeat, position)
    return run.records


@dataclass(frozen=True)
class _Outcome:
    variant: str
    description: str
    date: str
    status: str
    reason: str
    measurement: Measurement | None = None
    environment: dict[str, Any] | None = None


class _Run:
    def __init__(
        self, settings: Settings, command: str, on_record: Callable[[Record], None]
    ) -> None:
        self.settings = settings
        self.command = command
        self.on_record = on_record
        self.run_id = uuid.uuid4().hex[:12]
        self.records: list[Record] = []
        self.starter = Starter(settings.preload, cuda=settings.device == "cuda")
        limit = settings.time_limit_s
        self.deadline = None if limit is None else time.monotonic() + limit
        # What a record says when no process got so far as to tell.
        self.environment = {
            "versions": environment.versions(),
            "machine": environment.machine(),
            "device": {"type": settings.device},
        }

    def entry(self, entry: Entry, repeat: int, position: int) -> None:
        """Run an entry and keep its records: its engine's variants in order, each on what the one
        before had no memory for."""
        from ts_bench.engines import get_engine

        def note(outcome: _Outcome, scenario: Scenario) -> None:
            self.note(outcome, scenario, entry.engine, repeat, position)

        try:
            engine = get_engine(entry.engine)
            missing = engine.available()
        except (RegistryError, OptionError) as error:
            for scenario in entry.scenarios:
                note(_Outcome("", "", _now(), records.CRASHED, str(error)), scenario)
            return
        if missing is not None:
            for scenario in entry.scenarios:
                absent = _Outcome("", engine.description, _now(), records.NOT_INSTALLED, missing)
                note(absent, scenario)
            return
        variants = list(engine.variants)
        if entry.variant in variants:
            variants = [entry.variant]
        left = entry.scenarios
        for variant in variants:
            outcomes = self._process(entry.engine, engine, variant, left)
            for scenario, outcome in zip(left, outcomes, strict=False):
                note(outcome, scenario)
            ran = [outcome.status for outcome in outcomes]
            if records.OUT_OF_MEMORY not in ran:
                return
            left = left[ran.index(records.OUT_OF_MEMORY) :]
        for scenario in left[1:]:
            reason = f"its process had ended with {left[0].name}"
            note(_Outcome(variant, engine.description, _now(), records.NOT_RUN, reason), scenario)

    def note(
        self, outcome: _Outcome, scenario: Scenario, name: str, repeat: int, position: int
    ) -> None:
        """Keep the record of an outcome."""
        record = Record(
            run_id=self.run_id,
            date=outcome.date,
            command=self.command,
            scenario=scenario.to_dict(),
            engine=name,
            description=outcome.description,
            variant=outcome.variant,
            repeat=repeat,
            position=position,
            status=outcome.status,
            reason=outcome.reason,
            settings={
                "device": self.settings.device,
                "warmup": self.settings.warmup,
                "settling": self.settings.settling,
                "steps": self.settings.steps,
                "threads": self.settings.threads,
            },
            environment=outcome.environment or self.environment,
            measurement=outcome.measurement,
        )
        self.records.append(record)
        self.on_record(record)

    def _process(
        self, spec: str, engine: Engine, variant: str, scenarios: Sequence[Scenario]
    ) -> list[_Outcome]:
        """One for each scenario, but none after one that ran out of memory."""
        date = _now()
        limit_s = self.settings.run_limit_s
        if self.deadline is not None:
            limit_s = min(limit_s, self.deadline - time.monotonic())
        if limit_s <= 0:
            reason = f"the time limit of {self.settings.time_limit_s:.0f} s was used up"
            none = _Outcome(variant, engine.description, date, records.NOT_RUN, reason)
            return [none] * len(scenarios)
        job = {
            "engine": spec,
            "variant": variant,
            "scenario": scenarios[0].to_dict(),
            "also": [scenario.to_dict() for scenario in scenarios[1:]],
            "device": self.settings.device,
            "warmup": self.settings.warmup,
            "steps": self.settings.steps,
            "threads": self.settings.threads,
            "profiled": self.settings.profiled,
            "settling": self.settings.settling,
            "trace": _trace(self.settings.traces, f"{spec}-{variant}"),
            "link": self.settings.link,
            "starter": os.getpid(),
        }
        own = getattr(engine, "own_interpreter", False)
        with tempfile.TemporaryDirectory(prefix="ts-bench-") as folder:
            status, reason, result = _run_job(job, Path(folder), limit_s, self.starter, own)
        told = [] if result is None else [result, *result["also"]]
        found = [
            _Outcome(
                variant,
                engine.description,
                date,
                one["status"],
                one["reason"],
                None if one["measurement"] is None else Measurement(**one["measurement"]),
                result["environment"] if result is not None else None,
            )
            for one in told
        ]
        if status != records.OK:  # the process did not end well: that is how the next one ended
            found.append(_Outcome(variant, engine.description, date, status, reason))
        if any(outcome.status == records.OUT_OF_MEMORY for outcome in found):
            return found[: len(scenarios)]
        last = scenarios[min(len(found), len(scenarios)) - 1].name
        while len(found) < len(scenarios):
            reason = f"its process had ended with {last}"
            found.append(_Outcome(variant, engine.description, date, records.NOT_RUN, reason))
        return found[: len(scenarios)]


def _run_job(
    job: dict[str, Any], folder: Path, limit_s: float, starter: Starter, own_interpreter: bool
) -> tuple[str, str, dict[str, Any] | None]:
    """Run a worker.

    Returns:
        (status, reason, result): status is "ok" for a process that ended by itself with a result;
        result is what it left, also when it did not end well, or None.
    """
    job_path, result_path, log_path = (folder / name for name in ("job", "result", "log"))
    job_path.write_text(json.dumps(job), encoding="utf-8")
    log_path.touch()
    code = starter.run(job_path, result_path, log_path, limit_s, own_interpreter=own_interpreter)
    result: dict[str, Any] | None = None
    if result_path.exists():
        result = json.loads(result_path.read_text(encoding="utf-8"))
    crashed = result is not None and records.CRASHED in [
        one["status"] for one in (result, *result["also"])
    ]
    if code != 0 or result is None or crashed:
        tail = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        print(f"--- output of {job['engine']} ({job['variant']}), its end", file=sys.stderr)
        print(*tail[-LOG_TAIL_LINES:], sep="\n", file=sys.stderr, flush=True)
    if code is None:
        return records.TIMED_OUT, f"still running after {limit_s:.0f} s", result
    if code < 0:
        signal_name = signal.Signals(-code).name
        hint = " (the system kills like this when RAM runs out)" if -code == 9 else ""
        return records.CRASHED, f"killed by {signal_name}{hint}", result
    if code or result is None:
        return records.CRASHED, f"exit status {code} without a result", result
    return records.OK, "", result


def _trace(folder: Path | None, name: str) -> str | None:
    if folder is None:
        return None
    return str(folder.resolve() / re.sub(r"[^\w.-]+", "-", name).strip("-"))


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
