"""Run engines side by side: each in a fresh process, in rotating order, nothing dropped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ts_bench import environment, records
from ts_bench.records import Measurement, Record
from ts_bench.scenarios import Scenario
from ts_core.errors import OptionError, RegistryError

LOG_TAIL_LINES = 40


@dataclass(frozen=True)
class Settings:
    """How to run.

    Attributes:
        device: "cuda" or "cpu".
        warmup, steps: steps before timing, and timed.
        repeats: rounds; each round runs every engine once, starting one further on.
        variant: only this variant of each engine that has it; None tries them in order.
        threads: torch's CPU threads in each process; None leaves torch's choice.
        run_limit_s: seconds one process may take.
        time_limit_s: seconds for everything; what no longer fits is recorded as not run.
    """

    device: str
    warmup: int = 3
    steps: int = 8
    repeats: int = 1
    variant: str | None = None
    threads: int | None = None
    run_limit_s: float = 600.0
    time_limit_s: float | None = None

    def __post_init__(self) -> None:
        for field in ("warmup", "steps", "repeats"):
            if getattr(self, field) < 1:
                raise OptionError(f"{field}: {getattr(self, field)} is not accepted; use >= 1.")


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
                for outcome in run.engine(name, scenario):
                    run.note(outcome, scenario, name, repeat, position)
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
        limit = settings.time_limit_s
        self.deadline = None if limit is None else time.monotonic() + limit
        # What a record says when no process got so far as to tell.
        self.environment = {
            "versions": environment.versions(),
            "machine": environment.machine(),
            "device": {"type": settings.device},
        }

    def engine(self, name: str, scenario: Scenario) -> Iterator[_Outcome]:
        """Run one engine: its variants in order, until one does not run out of memory."""
        from ts_core.registry import bench_engines

        try:
            engine = bench_engines.get(name)
            missing = engine.available()
        except RegistryError as error:
            yield _Outcome("", "", _now(), records.CRASHED, str(error))
            return
        if missing is not None:
            yield _Outcome("", engine.description, _now(), records.NOT_INSTALLED, missing)
            return
        variants = list(engine.variants)
        if self.settings.variant in variants:
            variants = [self.settings.variant]
        for variant in variants:
            outcome = self._process(name, engine.description, variant, scenario)
            yield outcome
            if outcome.status != records.OUT_OF_MEMORY:
                return

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
                "steps": self.settings.steps,
                "threads": self.settings.threads,
            },
            environment=outcome.environment or self.environment,
            measurement=outcome.measurement,
        )
        self.records.append(record)
        self.on_record(record)

    def _process(self, name: str, description: str, variant: str, scenario: Scenario) -> _Outcome:
        date = _now()
        limit_s = self.settings.run_limit_s
        if self.deadline is not None:
            limit_s = min(limit_s, self.deadline - time.monotonic())
        if limit_s <= 0:
            reason = f"the time limit of {self.settings.time_limit_s:.0f} s was used up"
            return _Outcome(variant, description, date, records.NOT_RUN, reason)
        job = {
            "engine": name,
            "variant": variant,
            "scenario": scenario.to_dict(),
            "device": self.settings.device,
            "warmup": self.settings.warmup,
            "steps": self.settings.steps,
            "threads": self.settings.threads,
        }
        with tempfile.TemporaryDirectory(prefix="ts-bench-") as folder:
            status, reason, result = _run_job(job, Path(folder), limit_s)
        if result is None:
            return _Outcome(variant, description, date, status, reason)
        measured = result["measurement"]
        return _Outcome(
            variant,
            description,
            date,
            result["status"],
            result["reason"],
            None if measured is None else Measurement(**measured),
            result["environment"],
        )


def _run_job(
    job: dict[str, Any], folder: Path, limit_s: float
) -> tuple[str, str, dict[str, Any] | None]:
    """Run a worker; returns (status, reason, result), result being None if it left none."""
    job_path, result_path, log_path = (folder / name for name in ("job", "result", "log"))
    job_path.write_text(json.dumps(job), encoding="utf-8")
    command = [sys.executable, "-m", "ts_bench.worker", str(job_path), str(result_path)]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=os.name == "posix",
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    result: dict[str, Any] | None = None
    if code == 0 and result_path.exists():
        result = json.loads(result_path.read_text(encoding="utf-8"))
    if result is None or result["status"] == records.CRASHED:
        tail = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        print(f"--- output of {job['engine']} ({job['variant']}), its end", file=sys.stderr)
        print(*tail[-LOG_TAIL_LINES:], sep="\n", file=sys.stderr, flush=True)
    if code is None:
        return records.TIMED_OUT, f"still running after {limit_s:.0f} s", None
    if code < 0:
        signal_name = signal.Signals(-code).name
        hint = " (the system kills like this when RAM runs out)" if -code == 9 else ""
        return records.CRASHED, f"killed by {signal_name}{hint}", None
    return records.CRASHED, f"exit status {code} without a result", result


def _end(process: subprocess.Popen[bytes]) -> None:
    """Make sure that a worker and what it started are gone, whatever interrupted the wait."""
    if process.poll() is not None:
        return
    if os.name == "posix":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
