"""Fixtures for tests of ts-core that need a process of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

FAKE_DRIVER_SOURCE = Path(__file__).with_name("fake_cuda_driver.c")


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made-up CUDA driver library (see fake_cuda_driver.c)."""
    library = tmp_path_factory.mktemp("driver") / "libfakecuda.so"
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("needs a C compiler for the made-up driver")
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", str(FAKE_DRIVER_SOURCE), "-o", str(library)],
        check=True,
    )
    return library


@pytest.fixture
def cpu_of_threads(
    started_threads: Callable[[], list[threading.Thread]],
) -> Callable[[], float]:
    """Seconds of CPU time used by the calling thread's test so far.

    Counted are the main thread and those started since; not what earlier tests left behind.
    """
    if not hasattr(time, "pthread_getcpuclockid"):
        pytest.skip("needs the CPU time of single threads")

    def seconds() -> float:
        threads = [threading.main_thread(), *started_threads()]
        clocks = [time.pthread_getcpuclockid(thread.ident) for thread in threads if thread.ident]
        return sum(map(time.clock_gettime, clocks))

    return seconds


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs Python code in a new process: `run_python(code, NAME=value, ...)`.

    A keyword sets an environment variable, None unsets it. Fails the test when the status is not
    `status` (0).
    """

    def run(
        code: str, *arguments: str, status: int | None = 0, **environment: str | None
    ) -> subprocess.CompletedProcess[str]:
        env = dict(os.environ)
        for name, value in environment.items():
            if value is None:
                env.pop(name, None)
            else:
                env[name] = value
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if status is not None:
            assert done.returncode == status, f"{done.stdout}\n{done.stderr}"
        return done

    return run
