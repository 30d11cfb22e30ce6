"""Page-locking, against a made-up driver (fake_cuda_driver.c)."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from ts_core import _native
from ts_core.memory import arena as arena_module
from ts_core.memory.arena import PinnedArena
from ts_core.memory.ram import page_lock_limit_bytes

MIB = 1 << 20


def test_blocks_lie_in_page_locked_slabs(cuda: Any) -> None:
    arena = PinnedArena(slab=8 * MIB)
    tensors = [arena.empty(1000 * (k + 1), torch.float32, tag="t") for k in range(20)]
    assert all(map(cuda.locked, tensors))
    assert cuda.registrations == 1 and cuda.locked_bytes == 8 * MIB
    big = arena.empty(20 * MIB + 1)
    assert cuda.locked(big) and cuda.locked_bytes == 28 * MIB + 4096
    stats = arena.stats()
    assert stats["arena_pinned"] == stats["arena_bytes"] == 28 * MIB + 4096
    assert stats["arena_fallbacks"] == 0 and stats["arena_refusal"] == ""
    del big
    gc.collect()
    again = arena.empty(20 * MIB)  # its slab was kept, page-locked, and is used again
    assert cuda.locked(again) and arena.stats()["host_alloc_calls"] == stats["host_alloc_calls"]
    del again
    gc.collect()
    assert arena.trim() == 20 * MIB + 4096 and cuda.unregistrations == 1


def test_a_refusal_falls_back_to_plain_memory_and_says_why(
    cuda: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_PIN_LIMIT", str(8 * MIB))
    arena = PinnedArena(slab=4 * MIB)
    kept = [arena.empty(3 * MIB) for _ in range(3)]
    assert [cuda.locked(t) for t in kept] == [True, True, False]
    kept[2].fill_(1)
    stats = arena.stats()
    assert stats["arena_fallbacks"] == 1 and stats["arena_pinned"] == 6 * MIB
    assert "page-locking" in arena.refusal
    assert "CUDA_ERROR_OUT_OF_MEMORY (out of memory)" in arena.refusal
    assert stats["arena_refusal"] == arena.refusal
    limit = page_lock_limit_bytes()
    assert limit in (None, -1) or f"ulimit -l is {limit >> 10} KiB" in arena.refusal
    small = arena.empty(100 * 1024)  # a slab of 4 MiB is refused, the bytes alone are not
    assert cuda.locked(small) and arena.stats()["arena_pinned"] == 6 * MIB + 100 * 1024
    calls = cuda.registrations
    plain = [arena.empty(2 * MIB + 5), arena.empty(5 * MIB), arena.empty(3 * MIB)]
    assert cuda.registrations == calls + 1  # fewer bytes than ever refused are tried, once
    assert not any(map(cuda.locked, plain)) and arena.stats()["arena_fallbacks"] == 4
    del kept[0]
    gc.collect()
    assert cuda.locked(arena.empty(3 * MIB))
    del kept[0], plain
    gc.collect()
    assert arena.trim() == 6 * MIB and arena.refusal == ""
    assert cuda.locked(arena.empty(4 * MIB))
    assert cuda.locked(kept[0])  # what was plain is page-locked now that there is room


def test_a_reservation_that_is_refused_is_plain(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_CUDA_PIN_LIMIT", "4096")
    arena = PinnedArena(slab=MIB)
    assert arena.reserve(2 * MIB) == 2 * MIB
    stats = arena.stats()
    assert (stats["arena_pinned"], stats["arena_bytes"]) == (0, 2 * MIB) and stats["arena_refusal"]
    tensor = arena.empty(MIB)
    assert not cuda.locked(tensor) and arena.stats()["arena_bytes"] == 2 * MIB


def test_the_cap_bounds_what_is_page_locked(cuda: Any) -> None:
    arena = PinnedArena(slab=MIB, cap=3 * MIB)
    tensors = [arena.empty(MIB) for _ in range(5)]
    assert [cuda.locked(t) for t in tensors] == [True] * 3 + [False] * 2
    assert cuda.registrations == 3  # beyond the cap the driver is not even asked
    assert arena.stats()["arena_fallbacks"] == 2
    assert "exceed the cap of 3145728 bytes" in arena.refusal
    arena.configure(cap=8 * MIB)
    assert arena.refusal == "" and cuda.locked(arena.empty(MIB))
    # What was plain because of the cap is page-locked now, under the live tensors.
    assert all(map(cuda.locked, tensors))


def test_memory_mapped_before_cuda_is_used_is_page_locked_later(cuda: Any) -> None:
    cuda.in_use = False
    arena = PinnedArena(slab=4 * MIB)
    early, large = arena.empty(1000, torch.float32), arena.empty(4 * MIB)
    early.fill_(3)
    large.fill_(4)
    assert cuda.registrations == 0 and arena.stats()["arena_pinned"] == 0
    cuda.in_use = True
    late = arena.empty(1000, torch.float32)
    assert cuda.locked(early) and cuda.locked(late) and cuda.locked(large)
    assert arena.stats()["arena_bytes"] == arena.stats()["arena_pinned"] == 8 * MIB
    assert bool((early == 3).all()) and bool((large == 4).all())
    del large
    gc.collect()
    assert cuda.locked_bytes == 4 * MIB  # unlocked before it was unmapped


def test_nothing_is_page_locked_where_growth_is_forbidden(cuda: Any) -> None:
    arena = PinnedArena(slab=MIB)
    first = arena.empty(1000, grow=False)
    assert not cuda.locked(first) and cuda.registrations == 0
    assert arena.stats()["arena_fallbacks"] == 1
    arena.reserve(2 * MIB)
    calls = cuda.registrations
    second = arena.empty(1000, grow=False)
    assert cuda.locked(second) and arena.stats()["arena_fallbacks"] == 1
    third = arena.empty(3 * MIB, grow=False)
    assert not cuda.locked(third) and cuda.registrations == calls


def test_slabs_are_not_larger_than_ram_allows(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "ram_available_bytes", lambda: 1 << 30)
    arena = PinnedArena(slab=512 * MIB)
    assert cuda.locked(arena.empty(10_000))
    assert arena.stats()["arena_bytes"] == 12288


def test_no_driver_is_a_recorded_fallback(cuda: Any) -> None:
    _native.load().use_driver_library("/nowhere/libcuda.so.1")
    arena = PinnedArena(slab=MIB)
    arena.empty(100).fill_(1)
    assert arena.stats()["arena_fallbacks"] == 1 and "no CUDA driver" in arena.refusal
