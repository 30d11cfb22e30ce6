"""The host arena without a GPU: exact blocks, lifetimes, statistics, growth."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import subprocess
import threading
from collections.abc import Callable

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ts_core.errors import OptionError, OutOfBudgetError
from ts_core.memory.arena import PinnedArena, default_arena, parse_size

KIB, MIB = 1 << 10, 1 << 20
PAGE = mmap.PAGESIZE
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.uint8,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
    ],
)
def test_a_tensor_of_any_dtype_owns_exactly_its_bytes(dtype: torch.dtype) -> None:
    arena = PinnedArena(slab=MIB)
    tensor = arena.empty((3, 5, 7), dtype, tag="x")
    nbytes = 105 * dtype.itemsize
    assert tensor.shape == (3, 5, 7) and tensor.dtype == dtype and tensor.device.type == "cpu"
    assert tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
    assert tensor.untyped_storage().nbytes() == nbytes
    assert arena.stats()["x"] == nbytes
    assert arena.stats()["arena_used"] == -(-nbytes // 64) * 64
    values = torch.arange(105).reshape(3, 5, 7).to(torch.uint8).to(dtype)
    tensor.copy_(values)
    assert torch.equal(tensor.view(torch.uint8), values.view(torch.uint8))


def test_the_block_lives_as_long_as_any_view() -> None:
    arena = PinnedArena(slab=MIB)
    tensor = arena.empty(1000, torch.float32, tag="weights")
    parameter = torch.nn.Parameter(tensor.view(10, 100)[3:5].t())
    alias = parameter.detach()[1]
    del tensor
    gc.collect()
    assert arena.stats()["weights"] == 4000
    del parameter
    gc.collect()
    assert arena.stats()["weights"] == 4000
    del alias
    gc.collect()
    assert "weights" not in arena.stats() and arena.stats()["arena_used"] == 0


def test_tensors_outlive_their_arena() -> None:
    arena = PinnedArena(slab=MIB)
    tensor = arena.empty(100, torch.float32)
    del arena
    gc.collect()
    tensor.fill_(3)
    assert tensor.sum() == 300


def test_sizes_of_nothing_and_of_less() -> None:
    arena = PinnedArena(slab=MIB)
    assert arena.empty((0, 4), torch.float32).shape == (0, 4)
    assert arena.empty((), torch.float32).shape == ()
    assert arena.stats()["arena_slabs"] == 0 or arena.stats()["arena_used"] == 0
    with pytest.raises(ValueError, match=r"shape=\(4, -1\)"):
        arena.empty((4, -1), torch.float32)
    for tag in ("arena_mine", "host_alloc_calls"):
        with pytest.raises(ValueError, match="are taken"):
            arena.empty(4, tag=tag)


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("take"), st.integers(1, 300 * KIB)),
            st.tuples(st.just("free"), st.integers(0, 40)),
        ),
        max_size=60,
    )
)
def test_blocks_never_overlap_and_free_space_grows_together_again(
    steps: list[tuple[str, int]],
) -> None:
    arena = PinnedArena(slab=MIB)
    live: list[tuple[torch.Tensor, int]] = []

    def check(live: list[tuple[torch.Tensor, int]]) -> None:
        assert all((tensor == value).all() for tensor, value in live)

    for index, (action, number) in enumerate(steps):
        if action == "take":
            tensor = arena.empty(number, tag=f"tag{number % 3}")
            tensor.fill_(index % 251)
            live.append((tensor, index % 251))
        elif live:
            live.pop(number % len(live))
            tensor = live[-1][0] if live else None
        assert all(t[0] == value and t[-1] == value for t, value in live)
    check(live)
    tensor = None
    ranges = sorted((t.data_ptr(), t.data_ptr() + t.numel()) for t, _ in live)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
    stats = arena.stats()
    assert sum(v for k, v in stats.items() if k.startswith("tag")) == sum(
        t.numel() for t, _ in live
    )
    live.clear()
    stats = arena.stats()
    assert stats["arena_used"] == 0
    assert stats["arena_bytes"] == stats["arena_slabs"] * MIB  # own slabs of large blocks are gone
    assert stats["arena_largest_free"] == (MIB if stats["arena_slabs"] else 0)
    assert arena.trim() == stats["arena_bytes"] and arena.stats()["arena_bytes"] == 0


def test_first_fit_fills_a_hole() -> None:
    arena = PinnedArena(slab=MIB)
    blocks = [arena.empty(10 * KIB) for _ in range(4)]
    hole = blocks[1].data_ptr()
    del blocks[1]
    small, large = arena.empty(4 * KIB), arena.empty(11 * KIB)
    assert small.data_ptr() == hole
    assert large.data_ptr() > blocks[-1].data_ptr()


def test_a_large_block_takes_its_own_bytes_not_the_next_power_of_two() -> None:
    arena = PinnedArena(slab=8 * MIB)
    sizes = [5 * MIB + 3, 4 * MIB + PAGE, 9 * MIB, 1 * MIB + 1]
    blocks = [arena.empty(size) for size in sizes]
    stats = arena.stats()
    assert stats["arena_bytes"] == sum(-(-size // PAGE) * PAGE for size in sizes)
    assert stats["arena_slabs"] == len(sizes)
    blocks.clear()
    assert arena.stats()["arena_bytes"] == 0


def test_small_blocks_share_slabs_and_waste_less_than_an_eighth() -> None:
    arena = PinnedArena(slab=MIB)
    blocks = [arena.empty(size) for size in [100 * KIB] * 50]
    stats = arena.stats()
    assert stats["arena_bytes"] <= 50 * 100 * KIB / (1 - 1 / 8) + MIB
    assert stats["host_alloc_calls"] == stats["arena_slabs"] == 5
    del blocks


def test_a_reservation_is_rounded_to_pages_and_made_once() -> None:
    arena = PinnedArena(slab=64 * MIB)
    wanted = 3 * MIB + 5
    assert arena.reserve(wanted) == 3 * MIB + PAGE
    assert arena.stats()["arena_bytes"] == 3 * MIB + PAGE
    assert arena.reserve(wanted) == 0
    assert arena.reserve(0) == 0
    calls = arena.stats()["host_alloc_calls"]
    for _ in range(5):  # a steady state maps nothing
        blocks = [arena.empty(MIB, tag="a"), arena.empty(2 * MIB, tag="b")]
        assert arena.stats()["a"] == MIB
        del blocks
    assert arena.stats()["host_alloc_calls"] == calls
    block = arena.empty(wanted)
    assert arena.stats()["host_alloc_calls"] == calls
    assert arena.reserve(wanted) == 3 * MIB + PAGE
    del block


def test_untouched_memory_takes_no_ram() -> None:
    process = psutil.Process()
    arena = PinnedArena()  # slabs of 1 GiB
    assert arena.slab == 1 << 30
    before = process.memory_info().rss
    tensor = arena.empty(1000, torch.float32)
    tensor.fill_(1)
    reserved = arena.reserve((1 << 30) + 1)
    grown = process.memory_info().rss - before
    assert reserved == (1 << 30) + PAGE and arena.stats()["arena_bytes"] > 2 << 30
    assert grown < 16 * MIB


def test_a_large_block_gives_its_ram_back() -> None:
    process = psutil.Process()
    arena = PinnedArena()
    size = 200 * MIB
    before = process.memory_info().rss
    tensor = arena.empty(size)
    tensor.fill_(1)
    assert process.memory_info().rss - before > 190 * MIB
    del tensor
    assert process.memory_info().rss - before < 20 * MIB


def test_memory_that_cannot_be_had_is_an_error_in_words() -> None:
    arena = PinnedArena()
    with pytest.raises(OutOfBudgetError, match="bytes of host memory cannot be had: mmap: "):
        arena.empty(1 << 50)
    with pytest.raises(OutOfBudgetError, match="cannot be had"):
        arena.reserve(1 << 50)
    assert arena.stats()["arena_bytes"] == 0
    assert arena.empty(10).numel() == 10


def test_threads_share_an_arena() -> None:
    arena = PinnedArena(slab=MIB)
    errors: list[BaseException] = []

    def work(value: int) -> None:
        try:
            for round_index in range(60):
                tensors = [
                    arena.empty(1 + (round_index * 977 + k) % 60_000, tag="t") for k in range(4)
                ]
                for tensor in tensors:
                    tensor.fill_(value)
                assert all(bool((tensor == value).all()) for tensor in tensors)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert arena.stats()["arena_used"] == 0 and "t" not in arena.stats()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("64K", 64 * KIB),
        ("512M", 512 * MIB),
        ("1g", 1 << 30),
        (" 2GiB ", 2 << 30),
        ("3MB", 3 * MIB),
        ("1T", 1 << 40),
    ],
)
def test_sizes_in_words(text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_size(text) == size
    monkeypatch.setenv("TRAINSTREAM_HOST_ARENA_SLAB", text)
    assert PinnedArena().slab == size


@pytest.mark.parametrize("text", ["1.5G", "G", "-1", "1X", "0", "1 2"])
def test_a_wrong_slab_size_names_the_variable(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSTREAM_HOST_ARENA_SLAB", text)
    with pytest.raises(OptionError, match="TRAINSTREAM_HOST_ARENA_SLAB"):
        PinnedArena()


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(OptionError, match="slab=-1"):
        PinnedArena(slab=-1)
    with pytest.raises(OptionError, match="cap=-1"):
        PinnedArena(cap=-1)
    with pytest.raises(OptionError, match="bytes_now=-1"):
        PinnedArena().reserve(-1)


def test_the_processes_arena_and_its_statistics(run_python: Run) -> None:
    code = """
import torch
from ts_core import pinned_stats, reserve_pinned
from ts_core.memory.arena import default_arena
assert default_arena() is default_arena()
keys = {"arena_bytes", "arena_used", "arena_slabs", "arena_cap", "arena_fallbacks",
        "arena_largest_free", "host_alloc_calls"}
assert keys <= pinned_stats().keys() and pinned_stats()["arena_bytes"] == 0
assert reserve_pinned(10000, cap=1 << 20, slab=1 << 16) == 12288
tensor = default_arena().empty(100, torch.float32, tag="moments")
stats = pinned_stats()
assert stats["moments"] == 400 and stats["arena_used"] == 448 and stats["arena_slabs"] == 1
assert stats["arena_cap"] == 1 << 20 and stats["arena_largest_free"] == 12288 - 448
assert stats["arena_fallbacks"] == 0 and stats["arena_pinned"] == 0 and stats["arena_refusal"] == ""
other = default_arena().empty(5000)
assert pinned_stats()["arena_slabs"] == 1
third = default_arena().empty(8000)
assert pinned_stats()["arena_bytes"] == 12288 + (1 << 16)
assert not torch.cuda.is_initialized()
# Tensors that live until the interpreter ends are no trouble.
"""
    assert "rror" not in run_python(code).stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_of_fork_leaves_the_parents_arena_alone(run_python: Run) -> None:
    code = """
import os, torch
from ts_core.memory.arena import default_arena, pinned_stats
mine = default_arena().empty(1000, torch.float32, tag="mine")
mine.fill_(1)
before = pinned_stats()
child = os.fork()
if child == 0:
    assert "mine" not in pinned_stats() and pinned_stats()["arena_bytes"] == 0
    assert bool((mine == 1).all())
    mine.fill_(5)
    own = default_arena().empty(1000, torch.float32, tag="own")
    own.fill_(2)
    assert own.data_ptr() != mine.data_ptr() and pinned_stats()["own"] == 4000
    del mine, own
    assert "own" not in pinned_stats()
    os._exit(9)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert status == 9, status
assert pinned_stats() == before and bool((mine == 1).all())
"""
    run_python(code)


def test_default_cap_is_a_share_of_ram() -> None:
    total = psutil.virtual_memory().total
    assert 0 < PinnedArena().cap <= 0.8 * total
    assert PinnedArena(cap=123).cap == 123
    assert default_arena().cap > 0
