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
LOCK = "run.lock"
# What a run leaves before it trains, and what it writes then.
_EARLY = ("run.json", "history.jsonl", "reference.safetensors")
_LATER = (
    *("adapter", "model", "merged", "checkpoints"),
    *("results.json", "report.html", "loss_and_memory.png"),
)
_NAMED = 5  # files named in a message, at most


class RunFolder:
    """Paths and notes (run.json) of a run; changes nothing until told to.

    Args:
        config: the run's settings; its `output` is the folder.
        notes: of the first process, in the others: nothing is read, and nothing is written.

    Raises:
        DataError: run.json is damaged.
        OptionError: it is a file, or a folder of data; it holds a run with other settings, or
            files of another origin that the run would replace; names them.
    """

    def __init__(self, config: FinetuneConfig, notes: dict[str, Any] | None = None) -> None:
        self.path = Path(config.output)
        if self.path.exists() and not self.path.is_dir():
            raise OptionError(f"output={config.output!r} is a file. Name a folder.")
        if any(_is(Path(source).expanduser(), self.path) for source in config.data):
            raise OptionError(
                f"output={config.output!r} is a folder of data as well, where the run's own files "
                f"would be read as texts. Use another output."
            )
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
        else:
            self._refuse_others(file.is_file())
        self.notes["config"] = mine

    def _refuse_others(self, prepared: bool) -> None:
        """Refuse what a new run would replace, which no run from here has made.

        `prepared`: a run was here that did not come to train.
        """
        names = _LATER if prepared else (*_EARLY, *_LATER)
        found = [path for name in names if _holds(path := self.path / name)]
        if found:
            raise OptionError(
                f"{self.path} holds {_named(found)}, but no run to continue: a new run would "
                f"replace that. Use another output, or move it away."
            )

    def others(self) -> str | None:
        """A remark about what lies in the folder and is no run's, or None."""
        known = {LOCK, *_EARLY, *_LATER}
        found = [
            path
            for path in (sorted(self.path.iterdir()) if self.path.is_dir() else [])
            if path.name not in known and not path.name.startswith(".")
        ]
        if self.begun or not found:
            return None
        return f"{self.path} also holds {_named(found)}, which this run leaves as it is"

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


def is_run_folder(folder: Path) -> bool:
    """Whether a run is or was at work in a folder, so that its files are no data."""
    return (folder / LOCK).is_file()


def _is(path: Path, folder: Path) -> bool:
    return path.is_dir() and folder.is_dir() and path.samefile(folder)


def _holds(path: Path) -> bool:
    """Whether something is there; an empty folder is nothing."""
    return any(path.iterdir()) if path.is_dir() else path.exists()


def _named(paths: list[Path]) -> str:
    names = [f"{path.name}/" if path.is_dir() else path.name for path in paths]
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


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
