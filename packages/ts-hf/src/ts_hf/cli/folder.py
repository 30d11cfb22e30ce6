"""The folder of a run: who works there, with which settings, and what was kept."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from ts_core.errors import DataError, OptionError
from ts_hf.checkpoints.atomic import clean_leftovers
from ts_hf.cli.config import differing_keys
from ts_hf.cli.settings import FinetuneConfig

FORMAT = 1  # of run.json, history.jsonl and results.json (docs/finetune.md)


class RunFolder:
    """Paths and notes (run.json) of a run; changes nothing until told to.

    Args:
        config: the run's settings; its `output` is the folder.
        notes: of the first process, in the others: nothing is read, and nothing is written.

    Raises:
        DataError: run.json is damaged.
        OptionError: it is a file, or the folder holds a run with other settings; names them.
    """

    def __init__(self, config: FinetuneConfig, notes: dict[str, Any] | None = None) -> None:
        self.path = Path(config.output)
        if self.path.exists() and not self.path.is_dir():
            raise OptionError(f"output={config.output!r} is a file. Name a folder.")
        self.checkpoints = self.path / "checkpoints"
        self.history = self.path / "history.jsonl"
        self.results = self.path / "results.json"
        self.notes: dict[str, Any] = {"format": FORMAT} if notes is None else notes
        self._writes = notes is None
        if notes is not None:
            self.begun = _begun(notes)
            return
        mine = json.loads(json.dumps(dataclasses.asdict(config)))
        file = self.path / "run.json"
        earlier = _read(file) if file.is_file() else {}
        self.begun = _begun(earlier)
        if self.begun:
            self.notes = earlier
            defaults = json.loads(json.dumps(dataclasses.asdict(FinetuneConfig())))
            different = differing_keys({**defaults, **self.notes["config"]}, mine)
            if different:
                listed = ", ".join(f"{k}: {a!r} -> {b!r}" for k, (a, b) in different.items())
                raise OptionError(
                    f"{self.path} holds a run with other settings ({listed}). Use the same "
                    f"settings to continue it, or another output for a new run."
                )
        self.notes["config"] = mine

    def tidy(self) -> list[str]:
        """Tidy up after a process that was killed here; what was done, in words."""
        if not self.begun:
            self.history.unlink(missing_ok=True)  # of a run that never came to train
        told = clean_leftovers(self.path)
        if self.results.is_file() and not self.finished():
            self.results.unlink()
            told.append(
                f"{self.results} was damaged and is removed; it is written again from the last "
                f"checkpoint"
            )
        return told

    def finished(self) -> bool:
        """Whether results.json says that the run is done.

        One that is empty or cut off (a disk that was full, a power failure) says nothing: the run
        is finished again from its last checkpoint.
        """
        try:
            results = json.loads(self.results.read_bytes())
        except (FileNotFoundError, ValueError):
            return False
        return isinstance(results, dict) and "held_out_loss" in results

    def keep(self, **values: Any) -> None:
        """Add notes to run.json."""
        self.notes.update(values)
        if not self._writes:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        write_json(self.path / "run.json", self.notes)


def _begun(notes: dict[str, Any]) -> bool:
    """Whether a run came to train."""
    return "held_out_before" in notes


def _read(file: Path) -> dict[str, Any]:
    try:
        notes: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(notes["config"], dict):
            raise ValueError("its config is no mapping")
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} is damaged: {error!r}. Use another output.") from error
    if notes.get("format", FORMAT) != FORMAT:
        raise DataError(
            f"{file} has format {notes['format']!r}, this version writes {FORMAT}. Continue the "
            f"run with the version that began it, or use another output."
        )
    return notes


def write_json(file: Path, content: Any) -> None:
    """Write `content` so that `file` is always a whole one."""
    temporary = file.with_name(f".{file.name}.partial")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(json.dumps(content, indent=2) + "\n")
        stream.flush()
        os.fsync(stream.fileno())  # else a power failure may leave the name with nothing in it
    os.replace(temporary, file)
