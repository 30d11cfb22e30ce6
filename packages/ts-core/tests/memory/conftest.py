"""A made-up GPU for the arena: a driver that only page-locks."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ts_core import _native


class FakeCuda:
    """The made-up driver's counters, and whether torch says that CUDA is in use."""

    def __init__(self, library: Path) -> None:
        self.driver = ctypes.CDLL(str(library))
        self.driver.fake_registered_bytes.restype = ctypes.c_size_t
        self.driver.fake_is_registered.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.driver.fake_reset()
        self.in_use = True

    @property
    def registrations(self) -> int:
        return int(self.driver.fake_registrations())

    @property
    def unregistrations(self) -> int:
        return int(self.driver.fake_unregistrations())

    @property
    def locked_bytes(self) -> int:
        return int(self.driver.fake_registered_bytes())

    def locked(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory is page-locked."""
        size = tensor.numel() * tensor.itemsize
        return bool(self.driver.fake_is_registered(tensor.data_ptr(), size))


@pytest.fixture
def cuda(fake_driver: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """The made-up GPU, in use; everything page-locked must be given back by the test's end."""
    host = _native.load()
    gc.collect()
    host.use_driver_library(str(fake_driver))
    fake = FakeCuda(fake_driver)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: fake.in_use)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    yield fake
    gc.collect()
    left, depth = fake.locked_bytes, fake.driver.fake_context_depth()
    host.use_driver_library("")
    assert (left, depth) == (0, 0)
