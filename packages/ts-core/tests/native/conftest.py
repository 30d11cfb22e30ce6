"""Fixtures for tests of the native core."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ts_core import _native

LEVELS = _native.available_simd_levels()


@pytest.fixture(params=LEVELS)
def each_level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once for every SIMD level of this machine."""
    before = _native.simd_level()
    _native.set_simd_level(request.param)
    yield request.param
    _native.set_simd_level(before)


@pytest.fixture
def simd_levels() -> Iterator[list[str]]:
    """All SIMD levels of this machine; the level in use is put back afterwards."""
    before = _native.simd_level()
    yield LEVELS
    _native.set_simd_level(before)


@pytest.fixture
def many_cores() -> Iterator[None]:
    """Lets the pool use eight threads, whatever this machine has."""
    host = _native.load()
    host.override_usable_cores(8)
    yield
    host.override_usable_cores(0)
