"""Run commands under one deadline, alone or side by side, and keep what they print."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
KEPT_CHARS = 20_000


class Runner:
    """Runs commands from the root of the checkout, all output in one log.

    Args:
        out: folder of log.txt and results.jsonl.
        env: environment of every command.
        deadline: of `time.monotonic()`; nothing runs longer.
    """

    def __init__(self, out: Path, env: dict[str, str], deadline: float) -> None:
        self.log = out / "log.txt"
        self.results = out / "results.jsonl"
        self.env = env
        self.deadline = deadline
        self._lock = threading.Lock()

    def left_s(self, limit_s: float) -> float:
        """Seconds that a command may take of those asked for."""
        return min(limit_s, self.deadline - time.monotonic())

    def run(
        self, command: Sequence[str], limit_s: float, env: dict[str, str] | None = None
    ) -> tuple[str, str]:
        """Returns (status, output): status is "ok", "failed (exit N)", "timed out (N s)", or "no
        time left"; safe to call from several threads."""
        limit_s = self.left_s(limit_s)
        if limit_s <= 1:
            return "no time left", ""
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                list(command),
                cwd=ROOT,
                env={**self.env, **(env or {})},
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                code = process.wait(limit_s)
                status = "ok" if code == 0 else f"failed (exit {code})"
            except subprocess.TimeoutExpired:
                status = f"timed out ({limit_s:.0f} s)"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            output.seek(0)
            text = output.read().decode(errors="replace")
        with self._lock, self.log.open("a", encoding="utf-8") as log:
            log.write(f"\n$ {shlex.join(command)}\n{text}\n[{status}]\n")
        return status, text

    def keep(self, line: dict[str, Any]) -> None:
        """Add a line to results.jsonl."""
        with self._lock, self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def script(
        self, stage: str, command: Sequence[str], limit_s: float, env: dict[str, str] | None = None
    ) -> tuple[str, str]:
        """`run`, and a line in results.jsonl with what it printed, however it ended."""
        begun, date = time.monotonic(), datetime.now(timezone.utc).isoformat(timespec="seconds")
        status, output = self.run(command, limit_s, env)
        shown = ["python", *command[1:]] if command[0] == sys.executable else command
        self.keep(
            {
                "kind": "script",
                "stage": stage,
                "command": shlex.join(shown),
                "date": date,
                "status": status,
                "seconds": round(time.monotonic() - begun, 1),
                "output": output[-KEPT_CHARS:],
            }
        )
        return status, output


def tail(output: str, lines: int = 25, width: int = 150) -> str:
    """The end of an output, long lines cut."""
    return "\n".join(line[:width] for line in output.rstrip().splitlines()[-lines:])
