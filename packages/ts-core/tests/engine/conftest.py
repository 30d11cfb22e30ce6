"""Fixtures for tests of the engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture
def no_host_waits() -> Iterator[Callable[[], None]]:
    """Call it, and operations that make the host wait for the GPU raise until the test ends."""

    def begin() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")

    yield begin
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")
