"""What a run recorded, step by step: one JSON line each, so that a killed run keeps its past."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class History:
    """The lines of `file`.

    Args:
        file: JSON lines; made on the first `add`.
        upto_step: on resume, the checkpoint's step: later lines are dropped, since those steps
            will be done again.
    """

    def __init__(self, file: Path, upto_step: int = 0) -> None:
        self.file = file
        self.lines: list[dict[str, Any]] = []
        if file.is_file():
            for text in file.read_text(encoding="utf-8").splitlines():
                try:
                    line = json.loads(text)
                except ValueError:  # the last line of a killed run, half written
                    continue
                if line.get("step", 0) <= upto_step:
                    self.lines.append(line)
            content = "".join(json.dumps(line) + "\n" for line in self.lines)
            file.write_text(content, encoding="utf-8")

    def add(self, **values: Any) -> None:
        """Append a line."""
        self.lines.append(values)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(values) + "\n")

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """(steps, values) of the lines that have `name`."""
        found = [(line["step"], line[name]) for line in self.lines if line.get(name) is not None]
        return [step for step, _ in found], [value for _, value in found]
