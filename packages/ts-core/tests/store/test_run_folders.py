"""Folders of a process: removed by it, or after it is gone; never another's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ts_core.store import run_folders
from ts_core.store.disk import DiskFolder
from ts_core.store.run_folders import LOCK_NAME, make_locked_folder, remove_stale_folders

MAKE = """
import sys, time, torch
from ts_core.store.disk import DiskFolder
folder = DiskFolder(sys.argv[1])
folder.write("block-0000.bin", [torch.ones(5000, dtype=torch.uint8)], 5000)
print(folder.path, flush=True)
"""


def test_removed_at_exit_and_after_a_kill(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    made = Path(run_python(MAKE, str(tmp_path)).stdout.strip())
    assert made.parent == tmp_path and not made.exists()

    killed = subprocess.Popen(
        [sys.executable, "-c", MAKE + "time.sleep(60)", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert killed.stdout is not None
    left = Path(killed.stdout.readline().strip())
    folder = DiskFolder(tmp_path)  # its maker lives: it stays
    assert folder.removed == [] and (left / "block-0000.bin").stat().st_size == 5000
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    other = DiskFolder(tmp_path)
    assert other.removed == [left] and not left.exists()
    assert folder.path.exists()
    folder.close()
    other.close()
    assert list(tmp_path.iterdir()) == []


def test_a_zombie_is_gone_and_a_number_given_again_is_another_process(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", MAKE + "import os; os._exit(0)", str(tmp_path)])
    while not run_folders._start_of(child.pid) == "":
        os.sched_yield()
    # It has not been waited for. Its other threads may hold the lock a moment longer.
    end = time.monotonic() + 20
    while not (removed := remove_stale_folders(tmp_path)) and time.monotonic() < end:
        time.sleep(0.01)
    assert len(removed) == 1
    child.wait()
    path, lock = make_locked_folder(tmp_path)
    os.close(lock)
    maker = json.loads((path / LOCK_NAME).read_text())
    assert remove_stale_folders(tmp_path) == []
    maker["started"] += "1"
    (path / LOCK_NAME).write_text(json.dumps(maker))
    assert remove_stale_folders(tmp_path) == [path]


@pytest.mark.parametrize(
    ("change", "stale"),
    [
        ({"host": "elsewhere"}, False),
        ({"pid": 1 << 30}, True),
        ({"boot": "before", "pid": 1 << 30}, True),
        ({"namespace": "pid:[1]", "pid": 1 << 30}, True),
    ],
)
def test_who_may_be_judged(tmp_path: Path, change: dict[str, object], stale: bool) -> None:
    path, lock = make_locked_folder(tmp_path)
    maker = json.loads((path / LOCK_NAME).read_text())
    (path / LOCK_NAME).write_text(json.dumps({**maker, **change}))
    assert remove_stale_folders(tmp_path) == []  # the lock is held
    os.close(lock)
    assert remove_stale_folders(tmp_path) == ([path] if stale else [])


def test_what_is_no_folder_of_ours_stays(tmp_path: Path) -> None:
    for name, text in [("a", None), ("b", ""), ("c", "{}"), ("d", '{"pid": "x"}')]:
        place = tmp_path / f"trainstream-run-{name}"
        place.mkdir()
        if text is not None:
            (place / LOCK_NAME).write_text(text)
    (tmp_path / "trainstream-run-file").write_text("mine")
    assert remove_stale_folders(tmp_path) == [] and len(list(tmp_path.iterdir())) == 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork()")
def test_a_forked_child_leaves_the_parents_folder_alone(
    tmp_path: Path, run_python: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    code = MAKE + (
        "import os, warnings; warnings.simplefilter('ignore'); pid = os.fork()\n"
        "if pid == 0: sys.exit(0)\n"
        "os.waitpid(pid, 0); print(folder.path.exists())\n"
    )
    assert run_python(code, str(tmp_path)).stdout.split()[-1] == "True"
    assert list(tmp_path.iterdir()) == []
