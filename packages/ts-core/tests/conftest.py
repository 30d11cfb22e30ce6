"""Fixtures for tests of ts-core that need a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ts_core import _build

FAKE_DRIVER_SOURCE = Path(__file__).with_name("fake_cuda_driver.c")


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A made-up CUDA driver library (see fake_cuda_driver.c)."""
    library = tmp_path_factory.mktemp("driver") / "libfakecuda.so"
    compiler = _build.find_toolchain().compiler
    subprocess.run(
        [*compiler, "-x", "c", "-shared", "-fPIC", "-O1", str(FAKE_DRIVER_SOURCE), "-o", library],
        check=True,
    )
    return library


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
            [sys.executable, "-W", "error", "-c", code, *arguments],
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
