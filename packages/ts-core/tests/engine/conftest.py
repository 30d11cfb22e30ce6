"""Fixtures for tests of the engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ts_core.testing.paging import Paging


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


@pytest.fixture
def paging() -> Iterator[Callable[..., Paging]]:
    """Makes a `Paging` of a stack, which is closed after the test."""
    made: list[Paging] = []

    def make(*args: Any, **kwargs: Any) -> Paging:
        made.append(Paging(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()
