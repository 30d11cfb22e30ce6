"""When the memory of pages goes, on the device and on the host, and what happens without room."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ts_core.engine.page_transfers import ALIGN
from ts_core.engine.turns import in_backward
from ts_core.memory.arena import PinnedArena
from ts_core.testing import inject_delays
from ts_core.testing.paging import (
    WIDTH,
    Body,
    Paging,
    Stack,
    dropping,
    gradients,
    inputs,
    product,
    same,
)


def test_memory_leaves_the_device_in_forward(paging: Callable[..., Paging]) -> None:
    """After forward, no activation of a paged block is left; before, all are."""
    alive = []
    for offload in (False, True):
        storages: list[StorageWeakRef] = []

        def body(
            block: Body, x: torch.Tensor, storages: list[StorageWeakRef] = storages
        ) -> torch.Tensor:
            y = torch.tanh(x @ block.weight)
            storages.append(StorageWeakRef(y.untyped_storage()))
            return y.exp()

        model = Stack(body, depth=4)
        if offload:
            one = paging(model)
        out = model(inputs())
        if offload:
            one.activations._copies.synchronize()
        alive.append(sum(not storage.expired() for storage in storages))
        out.sum().backward()
        assert all(storage.expired() for storage in storages)
    assert alive == [4, 1]


@pytest.mark.parametrize("depth", [1, 2])
def test_backward_holds_few_blocks_at_once(depth: int, paging: Callable[..., Paging]) -> None:
    model = Stack(product, depth=8)
    one = paging(model, prefetch_depth=depth)
    most = 0

    def look(grad: torch.Tensor) -> None:
        nonlocal most
        here = {page.serial for page in one.store._here if page.device_d is not None}
        most = max(most, len(here))

    for layer in model.layers:
        layer.register_forward_hook(lambda m, a, output: output.register_hook(look) and None)
    gradients(model, inputs())
    assert depth <= most <= depth + 2


def test_graphs_that_are_kept_leave_no_pages_on_the_device(paging: Callable[..., Paging]) -> None:
    model, x = Stack(product), inputs()
    one = paging(model)
    out = model(x).sum()
    first = torch.autograd.grad(out, x, retain_graph=True)[0]
    assert not [page for page in one.store._here if page.device_d is not None]
    assert torch.equal(first, torch.autograd.grad(out, x)[0])


def test_forgotten_graphs_free_everything(paging: Callable[..., Paging]) -> None:
    """Nothing waits for the garbage collector: no cycle runs through a graph."""
    model = Stack(lambda block, x: (x @ block.weight).exp())
    one = paging(model, recompute=[1])
    storages = []
    model.layers[0].register_forward_hook(
        lambda m, a, output: storages.append(StorageWeakRef(output.untyped_storage()))
    )
    gc.disable()
    try:
        for _ in range(3):
            model(inputs())
        one.activations._copies.synchronize()
        assert one.activations.stats["host_bytes_in_use"] == 0
        assert all(storage.expired() for storage in storages)
    finally:
        gc.enable()


def test_nothing_is_allocated_after_the_first_steps(
    paging: Callable[..., Paging], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers are taken again; none is carved in a backward, where page-locking may deadlock."""
    carved_in_backward = []
    empty = PinnedArena.empty

    def watched(self: PinnedArena, *args: Any, **kwargs: Any) -> torch.Tensor:
        carved_in_backward.append(in_backward())
        return empty(self, *args, **kwargs)

    monkeypatch.setattr(PinnedArena, "empty", watched)
    model = Stack(dropping, depth=5)
    one = paging(model, recompute=[2])
    seen = []
    for step in range(8):
        with inject_delays(step, max_ms=0.3):
            gradients(model, inputs())
        stats = one.activations.stats
        seen.append((stats["host_allocations"], one.arena.stats()["host_alloc_calls"]))
    assert len(set(seen[2:])) == 1
    assert carved_in_backward and not any(carved_in_backward)


def test_changing_shapes_do_not_pile_up(paging: Callable[..., Paging]) -> None:
    model = Stack(product, depth=5)
    one = paging(model)
    for rows in (64, 7, 50, 33, 12, 64, 3, 21, 5, 64):
        gradients(model, inputs(rows, WIDTH))
    most = 2 * 4 * 64 * WIDTH * 4
    assert one.activations.stats["host_bytes"] <= 2 * most


def test_no_room_in_ram(paging: Callable[..., Paging]) -> None:
    """Pages that RAM cannot hold stay on the device in the probe, and then are recomputed."""
    model, x = Stack(product, depth=5), inputs()
    expected = gradients(model, x)
    one = paging(model, recompute="auto", read_ram=lambda: 0)
    for _ in range(3):
        assert same(expected, gradients(model, x))
    assert one.stats.pages == 0 and one.stats.kept_for_ram > 0
    assert one.activations.policy == ["recompute"] * 4 + ["keep"]


def test_ram_runs_low(paging: Callable[..., Paging]) -> None:
    """Each report turns half of the paged blocks into recomputed ones, from the next forward."""
    model, x = Stack(product, depth=9), inputs()
    expected = gradients(model, x)
    low = {"now": 1 << 40}
    one = paging(model, read_ram=lambda: low["now"])
    gradients(model, x)
    gradients(model, x)
    most = one.arena.stats()["arena_bytes"]
    counts = []
    for _ in range(5):
        counts.append(len(one.activations.offloaded_blocks))
        assert one.activations.memory.floor.check() is False  # as much is free as has to be
        low["now"] = 1000
        assert one.activations.memory.floor.check()
        assert not one.activations.memory.floor.check()  # once, until it had an effect
        assert len(one.activations.offloaded_blocks) == counts[-1]
        low["now"] = 1000
        before = one.stats.pages
        assert same(expected, gradients(model, x))
        left = len(one.activations.offloaded_blocks)
        assert one.stats.pages - before == 2 * left  # what is still paged is, with its own buffers
        page = -(-x.numel() * 4 // ALIGN) * ALIGN
        assert one.activations.stats["host_bytes"] == 2 * left * page
        assert one.arena.stats()["arena_bytes"] <= most
        most = one.arena.stats()["arena_bytes"]
        low["now"] = one.activations.memory.floor.floor_bytes
    assert one.stats.kept_for_ram == 0
    assert counts == [8, 4, 2, 1, 0]
    assert one.activations.stats["host_bytes"] == 0
    assert sum("under the floor" in event for event in one.events) == 4


def test_no_room_to_fetch_ahead(
    paging: Callable[..., Paging], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that is full when a block would be fetched ahead has room again when it is due."""
    model, x = Stack(product, depth=5), inputs()
    expected = gradients(model, x)
    one = paging(model, prefetch_depth=2)
    memory = one.store.transfers._memory
    calls = 0

    def sometimes(size: int) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls % 2 == 0:
            raise torch.OutOfMemoryError("made up")
        return memory(size)

    ahead = one.store._fetch_ahead

    def fetch_ahead(call: Any) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(one.store.transfers, "_memory", sometimes)
            return ahead(call)

    monkeypatch.setattr(one.store, "_fetch_ahead", fetch_ahead)
    for seed in range(3):
        with inject_delays(seed, max_ms=0.3):
            assert same(expected, gradients(model, x))
    assert one.stats.no_room_ahead > 0 and one.stats.late_fetches > 0


def test_what_has_left_is_let_go_in_backward(paging: Callable[..., Paging]) -> None:
    """Nothing else need be copied for finished copies to free their tensors."""
    storages: list[StorageWeakRef] = []

    def body(block: Body, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ block.weight)
        storages.append(StorageWeakRef(y.untyped_storage()))
        return y.exp()

    model = Stack(body, depth=6)
    one = paging(model, max_inflight_bytes=1 << 30)
    out = model(inputs())
    for lane in one.activations._copies._lanes.values():
        lane.stream.synchronize()  # finished, but nobody has looked
    left: list[int] = []
    out.register_hook(
        lambda grad: (
            model.layers[0].weight.register_hook(
                lambda grad: left.append(sum(not storage.expired() for storage in storages))
            )
            and None
        )
    )
    out.sum().backward()
    assert left == [0]
