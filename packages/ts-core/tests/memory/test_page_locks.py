"""What wrap() page-locks, when, and what it does where that is refused (a made-up driver)."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ts_core import memory_report, pinned_stats, unwrap, wrap
from ts_core.engine import hosting
from ts_core.engine.turns import in_backward
from ts_core.memory import arena as arena_module
from ts_core.memory import budget, ram
from ts_core.memory.arena import PinnedArena
from ts_core.memory.budget import PageLockBudget, page_lock_budget
from ts_core.store import placing
from ts_core.store.placing import ImageStore, within
from ts_core.testing import TinyModel, TrainingRecord, tiny_model, train

MIB = 1 << 20
IMAGE = 328_192  # bytes of a block of width 128


@pytest.fixture
def arena(cuda: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[PinnedArena]:
    """The process's arena, made anew, on a machine with a made-up GPU."""
    fresh = PinnedArena(slab=MIB)
    monkeypatch.setattr(arena_module, "_default", fresh)
    store = functools.partial(ImageStore, through_ring=True)
    monkeypatch.setattr(hosting, "ImageStore", store)
    monkeypatch.setattr(placing, "_LEAST_PART_BYTES", 64 << 10)
    yield fresh
    gc.collect()
    fresh.trim()


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the page-lock budget."""

    def choose(size_bytes: int) -> None:
        monkeypatch.setattr(
            hosting, "page_lock_budget", lambda: PageLockBudget(size_bytes, "a test's")
        )

    return choose


def run(steps: int = 3, **options: Any) -> tuple[TinyModel, TrainingRecord]:
    options = {"param_offload": True, "quantize": "none", "offload": True, **options}
    model, optimizer = wrap(tiny_model(6, 128), lr=1e-2, device="host", **options)
    return model, train(model, optimizer, steps)


def resident() -> TrainingRecord:
    """A run without streaming, of which no page-locked memory is left."""
    model, record = run(param_offload=False)
    unwrap(model)
    del model
    gc.collect()
    arena_module.default_arena().trim()
    return record


def test_the_budget_is_40_percent_of_ram_shared_by_local_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(budget, "ram_limit_bytes", lambda: 100 << 30)
    alone = page_lock_budget()
    assert alone == PageLockBudget(40 << 30, "40% of 100.0 GiB of RAM")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    shared = page_lock_budget()
    assert shared.size_bytes == 10 << 30 and shared.why.endswith("shared by 4 processes")


@pytest.mark.parametrize(("wsl", "container"), [(True, True), (False, True), (False, False)])
def test_limits_are_named(monkeypatch: pytest.MonkeyPatch, wsl: bool, container: bool) -> None:
    monkeypatch.setattr(budget, "page_lock_limit_bytes", lambda: 64 << 10)
    monkeypatch.setattr(budget, "in_wsl", lambda: wsl)
    monkeypatch.setattr(budget, "in_container", lambda: container)
    words = budget.limits_in_words()
    assert "ulimit -l is 64 KiB" in words and "doctor" in words
    assert ("WSL" in words, "container" in words) == (wsl, container and not wsl)
    monkeypatch.setattr(budget, "page_lock_limit_bytes", lambda: -1)
    monkeypatch.setattr(budget, "in_wsl", lambda: False)
    monkeypatch.setattr(budget, "in_container", lambda: False)
    assert budget.limits_in_words() == ""
    monkeypatch.setattr(ram.platform, "release", lambda: "5.15.90.4-Microsoft-standard-WSL2")
    assert ram.in_wsl()


def test_as_many_as_fit_spread_through_the_stack() -> None:
    sizes = dict.fromkeys(range(10), 4)
    assert within(list(range(10)), sizes, 40) == list(range(10))
    assert within(list(range(10)), sizes, 21) == [1, 3, 5, 7, 9]
    assert within(list(range(10)), sizes, 3) == [] == within([], {}, 100)
    assert within([2, 5, 7], {2: 100, 5: 1, 7: 1}, 2) == [5]


@pytest.mark.parametrize("blocks", [0, 2, 4])
def test_beyond_the_budget_memory_is_staged_and_not_locked(
    cuda: Any, arena: PinnedArena, limit: Callable[[int], None], blocks: int
) -> None:
    expected = resident()
    limit(blocks * IMAGE + IMAGE + 1000)  # the staging ring counts too
    model, record = run()
    assert expected.differences(record) == []
    params = memory_report(model)["params"]
    assert len(params["staged_blocks"]) == 6 - blocks
    images = model._trainstream_session.pager.images
    for index, image in images.items():
        assert cuda.locked(image.buffer_h) == (index not in params["staged_blocks"])
    [event] = [e for e in model._trainstream_session.events if e.startswith("weights:")]
    assert f"{blocks} of 6 paged blocks in memory" in event and "(a test's)" in event
    before = pinned_stats()
    assert before["staging"] > 0 and before["arena_fallbacks"] == 0
    unwrap(model)
    del images, image
    gc.collect()
    assert "staging" not in pinned_stats()


@pytest.mark.parametrize("locked", [0, 300_000, MIB])
def test_a_refusal_of_the_driver_is_an_event_and_training_is_exact(
    cuda: Any, arena: PinnedArena, monkeypatch: pytest.MonkeyPatch, locked: int
) -> None:
    expected = resident()
    monkeypatch.setenv("FAKE_CUDA_PIN_LIMIT", str(locked))
    model, record = run()
    assert expected.differences(record) == []
    params = memory_report(model)["params"]
    events = "\n".join(model._trainstream_session.events)
    assert "CUDA_ERROR_OUT_OF_MEMORY" in events and "page-locking" in events
    if locked == 0:  # not even a ring
        assert params["staged_blocks"] == [] and "several times slower" in events
    else:
        assert len(params["staged_blocks"]) >= 3 and params["bounce_bytes"] > 0
    unwrap(model)


def test_files_are_read_where_nothing_can_be_page_locked(
    cuda: Any,
    arena: PinnedArena,
    limit: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    expected = resident()
    monkeypatch.setenv("FAKE_CUDA_PIN_LIMIT", "0")
    limit(0)
    model, record = run(disk_offload=tmp_path)
    assert expected.differences(record) == []
    assert len(memory_report(model)["params"]["disk_blocks"]) == 6
    assert any("several times slower" in event for event in model._trainstream_session.events)
    unwrap(model)


@pytest.mark.parametrize("options", [{}, {"activation_offload": True, "min_offload_bytes": 0}])
def test_nothing_is_page_locked_in_backward_or_after_the_first_steps(
    cuda: Any,
    arena: PinnedArena,
    limit: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
) -> None:
    places: list[bool] = []
    whole = PinnedArena._add_pinned

    def recorded(self: PinnedArena, *arguments: Any, **keywords: Any) -> bool:
        places.append(in_backward())
        return whole(self, *arguments, **keywords)

    monkeypatch.setattr(PinnedArena, "_add_pinned", recorded)
    limit(3 * IMAGE)
    model, optimizer = wrap(
        tiny_model(6, 128), lr=1e-2, param_offload=True, quantize="none", device="host", **options
    )
    train(model, optimizer, 3)
    calls = pinned_stats()["host_alloc_calls"]
    assert places and not any(places)
    train(model, optimizer, 4)
    assert pinned_stats()["host_alloc_calls"] == calls
    unwrap(model)


@pytest.mark.parametrize(
    ("asked", "reserved"), [(False, 0), (None, 0), ("2MiB", 2 * MIB), (3 * MIB + 1, 3 * MIB + 4096)]
)
def test_host_arena(cuda: Any, arena: PinnedArena, asked: Any, reserved: int) -> None:
    device = wrapped_device()
    assert hosting.reserve_arena(asked, arena, device, True) == reserved
    stats = arena.stats()
    assert stats["arena_bytes"] == stats["arena_pinned"] == stats["arena_largest_free"] == reserved
    assert hosting.reserve_arena(asked, arena, device, True) == 0


def test_host_arena_auto(cuda: Any, arena: PinnedArena, monkeypatch: pytest.MonkeyPatch) -> None:
    """One slab, where blocks stream to a device with memory of its own and RAM is plentiful."""
    device = wrapped_device()
    assert hosting.reserve_arena("auto", arena, device, True) == 0  # the host's own memory
    monkeypatch.setattr(device, "separate_memory", True)
    assert hosting.reserve_arena("auto", arena, device, False) == 0
    with monkeypatch.context() as patch:
        patch.setattr(hosting, "ram_available_bytes", lambda: 4 * MIB)
        assert hosting.reserve_arena("auto", arena, device, True) == 0
    assert hosting.reserve_arena("auto", arena, device, True) == MIB
    kept = arena.empty(1000)
    assert cuda.locked(kept) and hosting.reserve_arena("auto", arena, device, True) == 0


def wrapped_device() -> Any:
    model, _ = wrap(tiny_model(), device="host")
    device = model._trainstream_session.device
    unwrap(model)
    gc.collect()
    arena_module.default_arena().trim()
    return device


def test_wrap_reserves_what_it_is_told(cuda: Any, arena: PinnedArena) -> None:
    model, _ = run(1, host_arena=8 * MIB)
    assert any("host_arena: 8.00 MiB reserved" in e for e in model._trainstream_session.events)
    assert pinned_stats()["arena_bytes"] >= 8 * MIB
    unwrap(model)
