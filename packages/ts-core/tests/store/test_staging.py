"""The staging ring: right bytes in the right order, whatever is slow; errors; cancelling."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ts_core.errors import StateError
from ts_core.memory.arena import PinnedArena
from ts_core.store import staging
from ts_core.store.staging import MemoryReader, Reader, Stager
from ts_core.testing import inject_delays
from ts_core.transfer import CopyEngine, PendingCopy

Numbers = Callable[[int, int], torch.Tensor]
SIZES = (1, 1024, 1025, 10_000)


class SlowReader:
    """Puts bytes in place on other threads, later parts often before earlier ones."""

    def __init__(self, source: torch.Tensor, threads: ThreadPoolExecutor, fail_at: int = -1):
        self.source, self.threads, self.fail_at = source, threads, fail_at
        self.loaded_bytes = 0
        self.started: list[int] = []
        self.gate = threading.Event()
        self.gate.set()

    def start(self, target_h: torch.Tensor, offset: int) -> Sequence[Future[None]]:
        self.started.append(offset)
        return [self.threads.submit(self._fill, target_h, offset)]

    def _fill(self, target_h: torch.Tensor, offset: int) -> None:
        self.gate.wait()
        time.sleep(0.002 if offset % 2048 else 0.006)
        if offset == self.fail_at:
            raise OSError("a part is missing")
        target_h.copy_(self.source[offset : offset + target_h.numel()])


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("slots", [2, 3])
def test_every_byte_arrives(
    new_stager: Callable[..., Stager],
    copies: CopyEngine,
    numbers: Numbers,
    direct: bool,
    slots: int,
) -> None:
    stager = new_stager(direct=direct, slot_count=slots)
    with ThreadPoolExecutor(3) as threads, inject_delays(3) as plan:
        pairs: list[tuple[torch.Tensor, torch.Tensor, PendingCopy]] = []
        readers: list[Reader] = []
        for seed, size in enumerate(SIZES * 2):
            source, target = numbers(seed, size), torch.zeros(size, dtype=torch.uint8)
            readers.append(MemoryReader(source) if seed % 2 else SlowReader(source, threads))
            pairs.append((source, target, stager.load(target, readers[-1])))
        for source, target, pending in pairs:
            copies.wait_compute(pending)
            assert torch.equal(source, target)
    assert plan.pauses > 0
    assert sum(reader.loaded_bytes for reader in readers) == 2 * sum(SIZES)


@pytest.mark.parametrize("direct", [False, True])
def test_it_waits_for_what_came_before(
    new_stager: Callable[..., Stager], copies: CopyEngine, numbers: Numbers, direct: bool
) -> None:
    """A load follows `after`, and every copy into the same memory that was queued before."""
    stager = new_stager(direct=direct)
    target = torch.zeros(5000, dtype=torch.uint8)
    old, new = numbers(0, 5000), numbers(1, 5000)
    with inject_delays(5, max_ms=10, share=1.0):
        gate = copies.d2h(torch.zeros(8), torch.ones(8))
        copies.h2d(target, old)
        pending = stager.load(target, MemoryReader(new), after=gate)
        copies.wait_compute(pending)
        assert gate.query() and torch.equal(target, new)


def test_a_slot_is_not_filled_while_it_is_copied_out(
    new_stager: Callable[..., Stager],
    copies: CopyEngine,
    numbers: Numbers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And without that wait the bytes are wrong, so the test would see it."""
    source = numbers(0, 20_000)

    def load() -> torch.Tensor:
        target = torch.zeros_like(source)
        copies.device.delay(copies._lanes["h2d"].stream, 0.3)
        copies.wait_compute(new_stager().load(target, MemoryReader(source)))
        return target

    assert torch.equal(load(), source)

    def impatient(state: Any) -> Any:
        state.next_slot = (state.next_slot + 1) % len(state.slots)
        return state.slots[state.next_slot]

    monkeypatch.setattr(staging._State, "take", impatient)
    assert not torch.equal(load(), source)


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("fail_at", [0, 4096, 9216])
def test_an_error_reaches_who_waits_and_the_next_load_is_clean(
    new_stager: Callable[..., Stager],
    copies: CopyEngine,
    numbers: Numbers,
    direct: bool,
    fail_at: int,
) -> None:
    stager = new_stager(direct=direct)
    source, target = numbers(0, 10_000), torch.zeros(10_000, dtype=torch.uint8)
    with ThreadPoolExecutor(2) as threads:
        broken = stager.load(target, SlowReader(source, threads, fail_at))
        following = stager.load(target, SlowReader(source, threads))
        with pytest.raises(OSError, match="a part is missing"):
            copies.wait_compute(broken)
        copies.wait_compute(following)
    assert torch.equal(source, target)


@pytest.mark.parametrize("direct", [False, True])
def test_a_cancelled_load_writes_nothing_more(
    new_stager: Callable[..., Stager], copies: CopyEngine, numbers: Numbers, direct: bool
) -> None:
    stager = new_stager(direct=direct)
    target = torch.zeros(40_000, dtype=torch.uint8)
    final = numbers(2, 40_000)
    with ThreadPoolExecutor(2) as threads:
        first = SlowReader(numbers(0, 40_000), threads)
        second = SlowReader(numbers(1, 40_000), threads)
        first.gate.clear()
        pending, waiting = stager.load(target, first), stager.load(target, second)
        while not first.started:
            time.sleep(0.001)
        waiting.cancel()  # has not begun: at once, though the first is under way
        assert not pending.query()
        cancelling = threading.Thread(target=pending.cancel)
        cancelling.start()
        while not pending.cancelled:
            time.sleep(0.001)
        first.gate.set()
        cancelling.join()
        assert len(first.started) < 40 and second.started == []
        copies.wait_compute(copies.h2d(target, final))
        time.sleep(0.02)
    assert torch.equal(target, final)


def test_parts_are_smaller_where_so_much_at_once_is_refused(copies: CopyEngine) -> None:
    class Strict(PinnedArena):
        most, count = 0, 0

        def try_pinned(self, nbytes: int, *, tag: str) -> torch.Tensor | None:
            if nbytes > self.most or self.count == 0:
                return None
            self.count -= 1
            return torch.empty(nbytes, dtype=torch.uint8)

    arena = Strict()
    arena.most, arena.count = 8 << 20, 3
    stager = Stager(copies, arena, direct=False)
    assert (stager.part_bytes, stager.ring_bytes, stager.page_locked) == (8 << 20, 24 << 20, True)
    arena.count = 0
    stager = Stager(copies, arena, direct=False)
    assert (stager.part_bytes, stager.ring_bytes, stager.page_locked) == (8 << 20, 32 << 20, False)


def test_an_idle_stager_uses_no_processor_time_and_ends_with_its_owner(
    cpu_of_threads: Callable[[], float],
    new_stager: Callable[..., Stager],
    copies: CopyEngine,
    numbers: Numbers,
) -> None:
    stager = new_stager()
    target = torch.zeros(100, dtype=torch.uint8)
    copies.wait_compute(stager.load(target, MemoryReader(numbers(0, 100))))
    thread = stager._thread
    assert thread is not None
    gate = threading.Event()

    class Never:
        loaded_bytes = 0

        def start(self, target_h: torch.Tensor, offset: int) -> Sequence[Future[None]]:
            gate.wait()
            return ()

    held = stager.load(target, Never())
    waiting = threading.Thread(target=held.queued)
    waiting.start()
    before = cpu_of_threads()
    time.sleep(0.3)
    assert cpu_of_threads() - before < 0.1  # three threads wait
    gate.set()
    waiting.join()
    stager.close()
    assert not thread.is_alive()
    with pytest.raises(StateError, match="unwrapped"):
        stager.load(target, Never())
