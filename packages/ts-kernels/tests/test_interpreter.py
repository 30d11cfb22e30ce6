"""Runs interpreter_*cases.py where Triton interprets its kernels on the CPU."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed on this machine"
)
@pytest.mark.parametrize(
    "file, at_least", [("interpreter_cases.py", 60), ("interpreter_fused_cases.py", 60)]
)
def test_kernels_under_the_interpreter(file, at_least):
    cases = str(Path(__file__).with_name(file))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", cases],
        capture_output=True,
        text=True,
        timeout=500,
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        cwd=Path(__file__).parents[1],
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-8000:]
    passed = re.search(r"(\d+) passed", output)
    assert passed and int(passed.group(1)) >= at_least, output[-2000:]
    assert "skipped" not in output, output[-2000:]
