"""Fixtures for tests of where weights are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from ts_core.device import HostDevice
from ts_core.memory.arena import PinnedArena
from ts_core.store.staging import Stager
from ts_core.transfer import CopyEngine


@pytest.fixture
def copies() -> CopyEngine:
    """Copies of the host device."""
    return CopyEngine(HostDevice())


@pytest.fixture
def new_stager(copies: CopyEngine) -> Iterator[Callable[..., Stager]]:
    """Makes stagers of small parts, closed at the end of the test."""
    made: list[Stager] = []

    def make(**options: object) -> Stager:
        settings = {"part_bytes": 1024, "slot_count": 3, "direct": False, **options}
        made.append(Stager(copies, PinnedArena(slab=1 << 16), **settings))
        return made[-1]

    yield make
    for stager in made:
        stager.close()


@pytest.fixture
def numbers() -> Callable[[int, int], torch.Tensor]:
    """Random bytes: `numbers(seed, count)`."""

    def make(seed: int, count: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)

    return make
