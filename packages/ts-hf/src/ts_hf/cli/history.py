"""What a run recorded: one JSON line per happening, so that a killed run keeps its past.

The format is part of the interface (docs/finetune.md, "The run folder"): `trainstream report` and
anyone's own scripts read it, also while the run goes on. Each line has `kind`, `step` (optimizer
steps done) and `time` (seconds since 1970); the kinds and their other keys:

- session: a process began or went on; pid, process_started, host, cpus, ram_gb, gpu, versions.
- step: loss, grad_norm, lr, step_s, tokens, tokens_per_second, rss_gb, and the Trainer's ts_*.
- eval: held-out loss, seconds; for DPO also reward_accuracy and reward_margin.
- placement: where each block of the model lives (`ts_hf.cli.placement`).
- event: text, a decision in plain words.
- sample: when ("before" or "after"), prompt, text.
- checkpoint: path.
- end: status ("finished", "interrupted" or "failed"), reason.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Work that is done again when a run goes on from an earlier checkpoint.
_REPEATED = ("step", "eval", "sample", "checkpoint")


class History:
    """The lines of `file`.

    Args:
        file: JSON lines; made on the first `add`. None keeps them in memory only.
        upto_step: on resume, the checkpoint's step: what was done after it is dropped, since it
            will be done again.
    """

    def __init__(self, file: Path | None, upto_step: int = 0) -> None:
        self.file = file
        self.lines: list[dict[str, Any]] = []
        if file is not None and file.is_file():
            for line in read_lines(file):
                if line["step"] <= upto_step or line.get("kind") not in _REPEATED:
                    self.lines.append(line)
            content = "".join(json.dumps(line) + "\n" for line in self.lines)
            temporary = file.with_name(f".{file.name}.partial")
            temporary.write_text(content, encoding="utf-8")
            os.replace(temporary, file)

    def add(self, kind: str, step: int, **values: Any) -> None:
        """Append a line."""
        line = {"kind": kind, "step": step, "time": round(time.time(), 3), **values}
        self.lines.append(line)
        if self.file is None:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The lines of one kind."""
        return [line for line in self.lines if line.get("kind") == kind]

    def series(self, name: str, kind: str = "step") -> tuple[list[float], list[float]]:
        """(steps, values) of the lines of `kind` that have `name`."""
        found = [(line["step"], line[name]) for line in self.of(kind) if line.get(name) is not None]
        return [step for step, _ in found], [value for _, value in found]


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of a history, without what is none: a killed run's last one is half written."""
    for text in file.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            yield line
