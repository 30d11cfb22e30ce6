"""How the threads of torch's CPU kernels wait for each other, set before torch is imported."""

from __future__ import annotations

import os
import sys

# Any of these in the environment is the user's own choice (OpenMP, GNU, LLVM and Intel).
_CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def wait_asleep() -> bool:
    """Let OpenMP threads sleep while they wait for each other, unless the user has chosen.

    By default they spin. When another program holds one of the cores, a thread spins for as long as
    the operating system keeps the thread that it waits for off its core: training a small model on
    a busy CPU takes many times longer then. The runtime reads its settings when torch is loaded, so
    this does nothing after that.

    Returns:
        Whether it was set.
    """
    if "torch" in sys.modules or any(name in os.environ for name in _CHOICES):
        return False
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    return True
