"""A run folder as plain data: also of a run that still goes on, or was killed.

The format is documented in docs/finetune.md ("The run folder"). Nothing here imports the package
that writes it.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

from ts_core.errors import DataError

FORMAT = 1
FINISHED, RUNNING, STOPPED = "finished", "running", "stopped"
_CLOCK_SLACK_S = 2.0  # process start times are rounded differently from boot to boot


@dataclass(frozen=True)
class Run:
    """One fine-tune as its folder tells it.

    Attributes:
        path: the folder.
        name: what to call it beside others.
        notes: run.json: config, model, rows, steps.
        lines: history.jsonl, in order.
        results: results.json of a finished run, or {}.
        unreadable: lines that are no JSON objects (the last one of a killed run may be half
            written).
    """

    path: Path
    name: str
    notes: dict[str, Any]
    lines: list[dict[str, Any]]
    results: dict[str, Any] = field(default_factory=dict)
    unreadable: int = 0

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The lines of one kind."""
        return [line for line in self.lines if line.get("kind") == kind]

    def series(self, name: str, kind: str = "step") -> tuple[list[float], list[float]]:
        """(steps, values) of the lines of `kind` in which `name` is a number."""
        found = [
            (float(line["step"]), float(line[name]))
            for line in self.of(kind)
            if _is_number(line.get(name)) and _is_number(line.get("step"))
        ]
        return [step for step, _ in found], [value for _, value in found]

    @property
    def config(self) -> dict[str, Any]:
        """The settings."""
        found = self.notes.get("config")
        return found if isinstance(found, dict) else {}

    @property
    def steps_done(self) -> int:
        """Optimizer steps done."""
        return int(max((line["step"] for line in self.of("step")), default=0))

    @property
    def steps_planned(self) -> int | None:
        """Optimizer steps that the run is to take, where it has said so."""
        planned = self.notes.get("steps", self.config.get("steps"))
        return planned if isinstance(planned, int) else None

    @property
    def state(self) -> str:
        """FINISHED, RUNNING or STOPPED."""
        if self.results:
            return FINISHED
        return RUNNING if self._alive() else STOPPED

    def status(self) -> str:
        """The state in words."""
        done, planned = self.steps_done, self.steps_planned
        progress = f"{done} steps" if planned is None else f"{done} of {planned} steps"
        if self.state == FINISHED:
            return f"finished: {progress}"
        if self.state == RUNNING:
            return f"running: {progress}, last line {self._when()}"
        last: dict[str, Any] = next(
            (x for x in reversed(self.lines) if x["kind"] in ("session", "end")), {}
        )
        if last.get("status") == "interrupted":
            return f"interrupted after {progress}; the same command goes on from there"
        if last.get("status") == "failed":
            return f"failed after {progress}: {last.get('reason')}"
        return f"stopped without a word after {progress} (killed?), last line {self._when()}"

    def _when(self) -> str:
        times = [line["time"] for line in self.lines if _is_number(line.get("time"))]
        if not times:
            return "unknown"
        moment = datetime.fromtimestamp(times[-1], tz=timezone.utc)
        return moment.strftime("%Y-%m-%d %H:%M:%S UTC")

    def _alive(self) -> bool:
        """Whether the process of the last session still exists, on this machine."""
        sessions = self.of("session")
        if not sessions or sessions[-1].get("host") != socket.gethostname():
            return False
        try:
            process = psutil.Process(int(sessions[-1]["pid"]))
            started = float(sessions[-1]["process_started"])
            return bool(abs(process.create_time() - started) < _CLOCK_SLACK_S)
        except (psutil.Error, KeyError, TypeError, ValueError):
            return False


def read_run(path: Path, name: str | None = None) -> Run:
    """Read a run folder.

    Raises:
        DataError: it is no run folder, or of another format.
    """
    path = Path(path)
    if not path.is_dir():
        raise DataError(f"there is no folder {str(path)!r}. Give the output folder of a fine-tune.")
    if not (path / "run.json").is_file():
        raise DataError(
            f"{path} is no run: it has no run.json. Give the output folder of a fine-tune "
            f"(a run writes the file once its model is loaded)."
        )
    notes = _json(path / "run.json")
    if notes.get("format") != FORMAT:
        raise DataError(
            f"{path / 'run.json'} has format {notes.get('format')!r}; this reads {FORMAT}. Use the "
            f"version of ts-bench that belongs to the ts-hf that wrote it."
        )
    results_file = path / "results.json"
    results = {}
    if results_file.is_file():
        try:
            results = _json(results_file)
        except DataError as error:
            raise DataError(
                f"{error} Run the same `trainstream finetune` command again: it writes the file "
                f"again from the last checkpoint."
            ) from error
    lines, unreadable = _lines(path / "history.jsonl")
    return Run(path, name or path.name, notes, lines, results, unreadable)


def read_runs(paths: list[Path]) -> list[Run]:
    """Read several; names are as short as they can be and differ.

    Raises:
        DataError: as `read_run`; the same folder twice.
    """
    resolved = [Path(path).resolve() for path in paths]
    if len(set(resolved)) < len(resolved):
        raise DataError("the same run folder is given twice; give each once.")
    depth = 1
    while True:
        names = ["/".join(path.parts[-depth:]) for path in resolved]
        if len(set(names)) == len(names) or depth >= max(len(p.parts) for p in resolved):
            break
        depth += 1
    return [read_run(path, name) for path, name in zip(resolved, names, strict=True)]


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise DataError(f"{file} holds a {type(content).__name__}, expected a JSON object.")
    return content


def _lines(file: Path) -> tuple[list[dict[str, Any]], int]:
    if not file.is_file():
        return [], 0
    found, unreadable = [], 0
    for text in file.read_text(encoding="utf-8", errors="replace").split("\n"):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except ValueError:
            unreadable += 1
            continue
        if isinstance(line, dict) and _is_number(line.get("step")) and "kind" in line:
            found.append(line)
        else:
            unreadable += 1
    return found, unreadable


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
