"""Runs the real kernel source without a GPU: `interpreted_kernels.py` in its own process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_kernels_under_the_triton_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "2"}
    environment.pop("PYTEST_ADDOPTS", None)
    options = ["-q", "-x", "-p", "no:cacheprovider", "--import-mode=importlib", "-W", "error"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(HERE / "interpreted_kernels.py"), *options],
        capture_output=True,
        text=True,
        env=environment,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed.group(1)) >= 40, done.stdout
    assert "skipped" not in done.stdout
