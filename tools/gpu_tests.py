"""Tests marked `gpu`, run by several processes that share one list, each result kept as it comes.

A pytest plugin (`-p gpu_tests`, with this folder on PYTHONPATH). Every process collects the same
tests, and takes the next one that none has taken, so no process waits while another has many left.

Environment:

    GPU_TESTS_NEXT   a file with the number of the next test, shared by the processes
    GPU_TESTS_LINES  a file of JSON lines that every process appends to: one when a test starts
                     (`"kind": "test-start"`), one when it has ended (`"kind": "test"`); with the
                     process that ran it, as messages about memory name others

Once a test leaves CUDA unusable (an illegal access breaks the whole process), the process ends with
status BROKEN, so that whoever started it can start another for the tests that are left.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest

BROKEN = 87
TEXT_LIMIT = 2500


def take(counter: Path) -> int:
    """The next number, from 0, that no process has been given."""
    with counter.open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        number = int(file.read() or "0")
        file.seek(0)
        file.write(str(number + 1))
        file.truncate()
    return number


def append(path: Path, line: dict[str, Any]) -> None:
    """Add a JSON line; in one write, so that lines of several processes do not mix."""
    data = (json.dumps(line) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(descriptor, data)
    finally:
        os.close(descriptor)


def cuda_is_broken() -> bool:
    """Whether this process can use its CUDA device no more."""
    import torch

    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


class _Lines:
    """Keeps what became of each test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failed = False
        self.found: dict[str, dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        line = self.found.setdefault(
            report.nodeid,
            {
                "kind": "test",
                "id": report.nodeid,
                "outcome": "passed",
                "seconds": 0.0,
                "text": "",
                "process": os.getpid(),
            },
        )
        line["seconds"] = round(line["seconds"] + report.duration, 2)
        if report.failed:
            line["outcome"] = "failed" if report.when == "call" else "error"
            line["text"] = str(report.longrepr)[-TEXT_LIMIT:]
            self.failed = True
        elif report.skipped:
            line["outcome"] = "skipped"
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            line["text"] = str(reason)[:200]
        if report.when == "teardown":
            append(self.path, self.found.pop(report.nodeid))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Lines(Path(os.environ["GPU_TESTS_LINES"])), "gpu-tests-lines")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be collected is an error of its own."""
    if report.failed:
        text = str(report.longrepr)[-TEXT_LIMIT:]
        line = {"kind": "test", "id": report.nodeid, "outcome": "error", "seconds": 0.0}
        append(Path(os.environ["GPU_TESTS_LINES"]), {**line, "text": text})


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Instead of pytest's own loop over all items."""
    counter, lines = (Path(os.environ[name]) for name in ("GPU_TESTS_NEXT", "GPU_TESTS_LINES"))
    kept: Any = session.config.pluginmanager.get_plugin("gpu-tests-lines")
    items = session.items
    number = take(counter)
    while number < len(items):
        item = items[number]
        append(lines, {"kind": "test-start", "id": item.nodeid, "process": os.getpid()})
        kept.failed = False
        # Fixtures are torn down after each test: which comes next is not known yet.
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        if kept.failed and cuda_is_broken():
            os._exit(BROKEN)
        if session.shouldfail or session.shouldstop:
            break
        number = take(counter)
    return True
