"""The root conftest.py: what a failed test leaves to those that follow."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Two GPUs, as far as memory limits are concerned.
FILE = """
import weakref

import pytest
import torch

shares = {0: 1.0, 1: 1.0}
emptied = []
made = []

def write(share, number):
    shares[number] = share

torch.cuda.is_initialized = lambda: True
torch.cuda.device_count = lambda: 2
torch.cuda.manual_seed_all = lambda seed: None
torch.cuda.get_per_process_memory_fraction = shares.__getitem__
torch.cuda.set_per_process_memory_fraction = write
torch.cuda.synchronize = lambda: None
torch.cuda.empty_cache = lambda: emptied.append(1)

class Session:
    def __init__(self):
        self.itself = self
        made.append(weakref.ref(self))

def deeper(session):
    raise MemoryError("none left")

@pytest.fixture
def given():
    session = Session()
    yield session
    assert session.itself is session

def test_fails(given):
    write(0.25, 1)
    session = Session()
    try:
        deeper(Session())
    except MemoryError as error:
        raise RuntimeError("as said") from error

def test_passes():
    assert shares == {0: 1.0, 1: 1.0}
    assert [n for n, session in enumerate(made) if session() is not None] == [] and emptied
    write(0.5, 0)

def test_passes_too():
    assert shares == {0: 1.0, 1: 1.0}

@pytest.mark.xfail(strict=True)
def test_passes_against_expectation():
    assert True
"""


@pytest.mark.parametrize("loop", ["pytest's", "gpu_tests'"])
def test_a_failed_test_leaves_neither_limits_nor_objects(loop: str, tmp_path: Path) -> None:
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "test_some.py").write_text(FILE)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", str(tmp_path), str(tmp_path / "test_some.py")]
    env = {**os.environ, "TS_CHECK_LEFTOVERS": "0"}
    if loop != "pytest's":
        (tmp_path / "next").write_text("0")
        command += ["-p", "gpu_tests"]
        path = [str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(path)
        env["GPU_TESTS_NEXT"] = str(tmp_path / "next")
        env["GPU_TESTS_LINES"] = str(tmp_path / "lines.jsonl")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert "2 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert "RuntimeError: as said" in done.stdout and "MemoryError: none left" in done.stdout
