"""The arena on a real GPU: page-locked memory and copies from and to it."""

from __future__ import annotations

import gc
import subprocess
import time
from collections.abc import Callable

import pytest
import torch

from ts_core import _native
from ts_core.memory.arena import PinnedArena

pytestmark = pytest.mark.gpu
MIB, GIB = 1 << 20, 1 << 30
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(autouse=True)
def _cuda_in_use() -> None:
    torch.cuda.init()


def test_torch_knows_the_memory_as_pinned() -> None:
    arena = PinnedArena(slab=16 * MIB)
    small, large = arena.empty((3, 5), torch.bfloat16), arena.empty(40 * MIB + 1)
    assert small.is_pinned() and small[1].is_pinned() and large.is_pinned()
    assert large[-1:].is_pinned()
    stats = arena.stats()
    assert stats["arena_fallbacks"] == 0 and stats["arena_refusal"] == ""
    assert stats["arena_pinned"] == stats["arena_bytes"]
    assert not torch.empty(10).is_pinned()


def test_memory_mapped_before_cuda_was_used_becomes_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = PinnedArena(slab=16 * MIB)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: False)
        early = arena.empty(MIB, torch.float32)
        early.fill_(3)
        assert not early.is_pinned()
    late = arena.empty(1000)
    assert early.is_pinned() and late.is_pinned() and bool((early == 3).all())


def test_non_blocking_copies_are_right_in_both_directions() -> None:
    arena = PinnedArena(slab=64 * MIB)
    stream = torch.cuda.Stream()
    count = 16 * MIB + 7
    source_h = arena.empty(count, torch.int32)
    back_h = arena.empty(count, torch.int32)
    target_d = torch.zeros(count, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    for round_index in range(5):
        source_h.copy_(torch.arange(count, dtype=torch.int32) * (round_index + 1))
        back_h.zero_()
        with torch.cuda.stream(stream):
            target_d.copy_(source_h, non_blocking=True)
            target_d.add_(1)
            back_h.copy_(target_d, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        _native.wait_event(event.cuda_event)
        assert torch.equal(back_h, source_h + 1)


def test_copies_do_not_wait_for_the_host() -> None:
    """A copy from page-locked memory is queued behind slow work without blocking the caller."""
    arena = PinnedArena(slab=64 * MIB)
    source_h = arena.empty(32 * MIB)
    source_h.fill_(7)
    target_d = torch.zeros(32 * MIB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(int(0.5 * 1.7e9))
    target_d.copy_(source_h, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    assert not event.query()  # the call returned while the sleep before the copy still ran
    _native.wait_event(event.cuda_event)
    assert bool((target_d == 7).all())


def test_freed_and_trimmed_memory_can_be_taken_again() -> None:
    arena = PinnedArena(slab=8 * MIB)
    for round_index in range(3):
        tensors = [arena.empty(4 * MIB) for _ in range(5)]
        assert all(t.is_pinned() for t in tensors)
        device = [t.fill_(round_index).cuda(non_blocking=True) for t in tensors]
        torch.cuda.synchronize()
        assert all(bool((t == round_index).all()) for t in device)
        del tensors
        gc.collect()
        assert arena.trim() > 0 and arena.stats()["arena_bytes"] == 0


def test_page_locking_a_gibibyte() -> None:
    """Prints what a GiB costs, beside torch's own pinned allocation; no time is asserted."""
    arena = PinnedArena()
    start = time.perf_counter()
    assert arena.reserve(GIB) == GIB
    ours = time.perf_counter() - start
    assert arena.stats()["arena_pinned"] == GIB
    start = time.perf_counter()
    theirs = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    seconds = time.perf_counter() - start
    print(f"1 GiB page-locked in {ours:.3f} s; torch's pin_memory took {seconds:.3f} s")
    del theirs


def test_a_process_ends_cleanly_with_page_locked_tensors(run_python: Run) -> None:
    code = """
import torch
from ts_core.memory.arena import default_arena, reserve_pinned
torch.cuda.init()
reserve_pinned(1 << 20)
kept = default_arena().empty(1000, torch.float32)
assert kept.is_pinned()
on_device = kept.cuda(non_blocking=True)
"""
    assert "rror" not in run_python(code).stderr
