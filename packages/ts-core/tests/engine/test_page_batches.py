"""Pages of a block leave together and come back together, in one slice of host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ts_core.device import HostDevice
from ts_core.engine import page_transfers
from ts_core.engine.activation_options import ActivationOptions
from ts_core.engine.activations import Activations
from ts_core.engine.page_transfers import ALIGN, batches_of, slice_bytes
from ts_core.engine.runner import BlockRunner
from ts_core.memory.arena import PinnedArena
from ts_core.testing import inject_delays
from ts_core.transfer import CopyEngine

WIDTH, DEPTH, STEPS = 8, 5, 4
PAGES = 4  # of one block below: its input, and the results of tanh, exp and the product


class Curved(nn.Module):
    """Saves PAGES tensors; `meanwhile` is called between its first and its last operation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.meanwhile: Any = lambda x, y: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ self.weight)
        self.meanwhile(x, y)
        z = y.exp()
        return z * (z + y)


class CurvedStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Curved() for _ in range(DEPTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x * 0.5)
        return x


class Batched:
    """A stack whose blocks are paged, all but the last, with what can be counted."""

    def __init__(self, model: CurvedStack, max_inflight_bytes: int = 1) -> None:
        self.arena = PinnedArena(slab=1 << 20)
        self.copies = CopyEngine(HostDevice(), max_inflight_bytes)
        self.activations = Activations(
            list(model.layers),
            self.copies,
            ActivationOptions(True, False, 0, 1),
            lambda text: None,
            arena=self.arena,
            read_ram=lambda: 1 << 40,
        )
        self.runner = BlockRunner(list(model.layers), None, self.activations)
        self.hook = model.register_forward_pre_hook(lambda *_: self.runner.new_pass())
        self.stats = self.activations.store.stats

    def close(self) -> None:
        self.hook.remove()
        self.runner.remove()
        self.activations.close()


@pytest.fixture
def stack() -> CurvedStack:
    torch.manual_seed(0)
    return CurvedStack()


@contextlib.contextmanager
def batched(model: CurvedStack, **options: Any) -> Iterator[Batched]:
    made = Batched(model, **options)
    try:
        yield made
    finally:
        made.close()


def batch_input(rows: int = 4) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * WIDTH).view(rows, WIDTH).requires_grad_()


def grads_of(model: CurvedStack, x: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(model(x).sum(), [x, *model.parameters()]))


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_one_event_per_block_and_direction(
    stack: CurvedStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = batch_input()
    expected = grads_of(stack, x)
    with batched(stack) as one:
        waits = []
        wait = one.copies.wait_compute
        monkeypatch.setattr(one.copies, "wait_compute", lambda e: (waits.append(e), wait(e)))
        for step in range(STEPS):
            with inject_delays(step, max_ms=0.3):
                assert equal(expected, grads_of(stack, x))
        left = (DEPTH - 1) * STEPS
        assert one.stats.pages == PAGES * left and one.stats.batches == left
        assert 0 < one.stats.fetch_batches <= left
        assert one.stats.fetches == PAGES * one.stats.fetch_batches
        assert one.stats.fetch_copies == one.stats.fetch_batches  # neighbours are one copy
        assert len(waits) == len(set(map(id, waits))) == one.stats.fetch_batches
        assert one.stats.late_fetches == 0


@pytest.mark.parametrize("seed", range(4))
def test_batches_that_pile_up_in_flight(stack: CurvedStack, seed: int) -> None:
    """Several on their way at once, every place delayed; some come back before they have left."""
    x = batch_input()
    expected = grads_of(stack, x)
    bytes_of_two = 2 * PAGES * x.numel() * 4
    with (
        batched(stack, max_inflight_bytes=bytes_of_two + (1 << 20)) as one,
        inject_delays(seed, max_ms=1.0, share=1.0),
    ):
        for _ in range(STEPS):
            assert equal(expected, grads_of(stack, x))
        assert one.activations.stats["host_bytes_in_use"] == 0


def test_a_slice_per_block_laid_out_once(stack: CurvedStack) -> None:
    x = batch_input()
    with batched(stack) as one:
        grads_of(stack, x)
        grads_of(stack, x)
        store = one.activations.store
        taken = []

        def look(_: Any, args: Any, out: Any) -> None:
            taken.extend(page.slice for page in store._pages.values() if page.slice)

        hook = stack.register_forward_hook(look)
        layouts = []
        for _ in range(STEPS):
            taken.clear()
            grads_of(stack, x)
            slices = {id(held): held for held in taken}
            assert len(slices) == DEPTH - 1
            layouts.append({id(held.buffer): id(held.buffer._parts) for held in slices.values()})
            slices.clear()
        hook.remove()
        assert all(layout == layouts[0] for layout in layouts)
        assert one.activations.stats["host_allocations"] == DEPTH - 1
        assert one.activations.stats["host_bytes"] == (DEPTH - 1) * slice_bytes(
            [x.numel() * 4] * PAGES
        )


def test_large_blocks_leave_in_several_batches(
    stack: CurvedStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = batch_input()
    expected = grads_of(stack, x)
    page = x.numel() * 4
    monkeypatch.setattr(page_transfers, "_LEAST_BATCH_BYTES", 2 * page)
    with batched(stack) as one:
        for step in range(STEPS):
            with inject_delays(step, max_ms=0.3, share=1.0):
                assert equal(expected, grads_of(stack, x))
        assert one.stats.batches == 2 * (DEPTH - 1) * STEPS
        assert one.stats.fetches == 2 * one.stats.fetch_copies
        assert one.stats.fetch_copies > one.stats.fetch_batches > 0
        assert one.activations.stats["host_bytes"] == 2 * (DEPTH - 1) * slice_bytes([page, page])


def test_pieces_are_bounded(stack: CurvedStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece of device memory is freed with the last of its pages, so it must not be large."""
    x = batch_input()
    expected = grads_of(stack, x)
    monkeypatch.setattr(page_transfers, "PIECE_BYTES", 3 * ALIGN)
    with batched(stack) as one:
        for _ in range(STEPS):
            assert equal(expected, grads_of(stack, x))
        assert one.stats.fetches == PAGES * one.stats.fetch_batches
        assert one.stats.fetch_copies == 2 * one.stats.fetch_batches


def test_a_block_that_fails_keeps_what_it_saved(stack: CurvedStack) -> None:
    """Nothing of it goes to the host, what the caller still holds works, and nothing is left."""
    x = batch_input()
    expected = grads_of(stack, x)
    held: list[torch.Tensor] = []

    def fail(x: torch.Tensor, y: torch.Tensor) -> None:
        held.append(y)
        raise ZeroDivisionError

    with batched(stack) as one:
        grads_of(stack, x)
        for place in (0, 2, DEPTH - 1):
            before = one.stats.batches
            stack.layers[place].meanwhile = fail
            with pytest.raises(ZeroDivisionError):
                stack(x)
            assert one.stats.batches == before + place
            stack.layers[place].meanwhile = lambda x, y: None
            found = torch.autograd.grad(held.pop().sum(), x)[0]  # of a graph that is in part paged
            y = x
            for layer in stack.layers[:place]:
                y = layer(y * 0.5)
            wanted = torch.tanh(y * 0.5 @ stack.layers[place].weight)
            assert torch.equal(found, torch.autograd.grad(wanted.sum(), x)[0])
            del y, wanted, found
            assert equal(expected, grads_of(stack, x))
        assert one.activations.stats["host_bytes_in_use"] == 0
        assert not list(one.activations.store._pages.values())


def test_a_backward_inside_a_block(stack: CurvedStack) -> None:
    """What it reads has not left yet."""
    x = batch_input()
    seen: list[torch.Tensor] = []

    def look(x: torch.Tensor, y: torch.Tensor) -> None:
        seen.append(torch.autograd.grad(y.sum(), x, retain_graph=True)[0])

    stack.layers[1].meanwhile = look
    expected = grads_of(stack, x)
    with batched(stack):
        for step in range(STEPS):
            with inject_delays(step, max_ms=0.3):
                assert equal(expected, grads_of(stack, x))
    assert all(torch.equal(seen[0], other) for other in seen)


def test_writes_without_a_version_count_as_in_torch(stack: CurvedStack) -> None:
    """A kernel may change a saved tensor unnoticed, in its block: backward sees the new values."""

    def write(x: torch.Tensor, y: torch.Tensor) -> None:
        y.data.mul_(0.5)

    x = batch_input()
    unwritten = grads_of(stack, x)
    for layer in stack.layers:
        layer.meanwhile = write
    expected = grads_of(stack, x)
    assert not equal(unwritten, expected)
    with batched(stack):
        for step in range(STEPS):
            with inject_delays(step, max_ms=0.3):
                assert equal(expected, grads_of(stack, x))


def test_what_is_foreseen_is_what_leaves() -> None:
    assert slice_bytes([]) == 0 and slice_bytes([1, ALIGN, ALIGN + 1]) == 4 * ALIGN
    assert batches_of([], 10) == []
    assert batches_of([4, 4, 4], 8) == [2 * ALIGN, ALIGN]
    assert batches_of([8, 1], 8) == [ALIGN, ALIGN]
    assert batches_of([1, 2, 3], 100) == [3 * ALIGN]


def test_no_room_for_a_slice_keeps_the_whole_batch(stack: CurvedStack) -> None:
    x = batch_input()
    expected = grads_of(stack, x)
    with batched(stack) as one:
        one.activations.memory.buffers.limit_bytes = 2 * slice_bytes([x.numel() * 4] * PAGES)
        assert equal(expected, grads_of(stack, x))
        assert (one.stats.batches, one.stats.pages) == (2, 2 * PAGES)
        assert one.stats.kept_for_ram == (DEPTH - 3) * PAGES
        assert one.activations.stats["host_bytes_in_use"] == 0


@pytest.mark.gpu
def test_batches_on_the_gpu(stack: CurvedStack) -> None:
    """As on the host device; see also the tests of policies."""
    from ts_core.device import resolve_device

    stack.cuda()
    x = batch_input(4096).detach().cuda().requires_grad_()
    expected = grads_of(stack, x)
    activations = Activations(
        list(stack.layers),
        CopyEngine(resolve_device("cuda"), 1),
        ActivationOptions(True, False, 0, 1),
        lambda text: None,
    )
    runner = BlockRunner(list(stack.layers), None, activations)
    hook = stack.register_forward_pre_hook(lambda *_: runner.new_pass())
    for step in range(STEPS):
        with inject_delays(step, max_ms=2.0):
            assert equal(expected, grads_of(stack, x))
    stats = activations.store.stats
    assert stats.batches == (DEPTH - 1) * STEPS and stats.pages == PAGES * stats.batches
    assert 0 < stats.fetch_copies == stats.fetch_batches
    torch.cuda.synchronize()
    assert activations.stats["host_bytes_in_use"] == 0
    hook.remove()
    runner.remove()
    activations.close()
