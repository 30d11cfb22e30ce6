"""What is paged, when its memory goes, and that nothing piles up."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from ts_core.device import HostDevice
from ts_core.engine.activation_options import ActivationOptions
from ts_core.engine.activations import Activations
from ts_core.engine.page_transfers import ALIGN
from ts_core.engine.runner import BlockRunner
from ts_core.engine.turns import in_backward
from ts_core.memory.arena import PinnedArena
from ts_core.testing import inject_delays
from ts_core.transfer import CopyEngine

WIDTH = 8


class Stack(nn.Module):
    """Blocks one after the other; `body` is what a block computes."""

    def __init__(self, body: Callable[..., torch.Tensor], depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Body(body) for _ in range(depth))

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, **kwargs)
        return x


class Body(nn.Module):
    def __init__(self, body: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.register_buffer("table", torch.randn(WIDTH, WIDTH))
        self.body = body

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return self.body(self, x, **kwargs)


class Paging:
    """A stack whose activations are treated, without wrap()."""

    def __init__(
        self,
        model: Stack,
        offload: Any = True,
        recompute: Any = False,
        *,
        min_bytes: int = 0,
        prefetch_depth: int = 1,
        max_inflight_bytes: int = 1,
        read_ram: Callable[[], int] = lambda: 1 << 40,
    ) -> None:
        self.events: list[str] = []
        self.arena = PinnedArena(slab=1 << 20)
        options = ActivationOptions(offload, recompute, min_bytes, prefetch_depth)
        self.activations = Activations(
            list(model.layers),
            CopyEngine(HostDevice(), max_inflight_bytes),
            options,
            self.events.append,
            arena=self.arena,
            read_ram=read_ram,
        )
        self.runner = BlockRunner(list(model.layers), None, self.activations)
        self.hook = model.register_forward_pre_hook(lambda *_: self.runner.new_pass())
        self.store = self.activations.store
        self.stats = self.store.stats

    def close(self) -> None:
        self.hook.remove()
        self.runner.remove()
        self.activations.close()


@pytest.fixture
def paging() -> Iterator[Callable[..., Paging]]:
    made: list[Paging] = []

    def make(*args: Any, **kwargs: Any) -> Paging:
        made.append(Paging(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (4, WIDTH)), requires_grad=True)


def product(block: Body, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ block.weight)


def gradients(model: Stack, x: torch.Tensor, **kwargs: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    out = model(x, **kwargs)
    return list(torch.autograd.grad(out.sum(), [x, *model.parameters()], allow_unused=True))


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(
        (a is None and b is None) or torch.equal(a, b) for a, b in zip(first, second, strict=True)
    )


def broadcast(block: Body, x: torch.Tensor) -> torch.Tensor:
    return x * x.mean(0, keepdim=True).expand(4, WIDTH) @ block.weight


def masked(block: Body, x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(1, WIDTH, dtype=torch.bool).expand(4, WIDTH).clone()
    return x.masked_fill(mask & (x > 0.5), 0.25) @ block.weight


def transposed(block: Body, x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x @ block.weight)
    return (y.t() @ y) @ block.weight.t()[:, :WIDTH] @ torch.ones(WIDTH, WIDTH)


def chunks(block: Body, x: torch.Tensor) -> torch.Tensor:
    wide = F.linear(x, torch.cat([block.weight, block.weight, block.weight]))
    a, b, c = wide.chunk(3, -1)
    return a * b * c


def permuted(block: Body, x: torch.Tensor) -> torch.Tensor:
    heads = (x @ block.weight).view(4, 2, 4).permute(1, 0, 2)
    return torch.matmul(heads, heads.transpose(1, 2)).sum(0).mean(1, keepdim=True) * x


def twice(block: Body, x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x @ block.weight)
    return y * y * torch.sigmoid(y)


def weight_views(block: Body, x: torch.Tensor) -> torch.Tensor:
    return x @ block.weight.t() + x @ block.weight[:, :] + x @ block.table.t()


def dropping(block: Body, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x @ block.weight, 0.5, training=True) + x


def in_place(block: Body, x: torch.Tensor) -> torch.Tensor:
    y = x @ block.weight
    return torch.relu_(y) * 2


def tiny(block: Body, x: torch.Tensor) -> torch.Tensor:
    return x.sigmoid() * x.mean().exp()


def complex_values(block: Body, x: torch.Tensor) -> torch.Tensor:
    z = torch.complex(x, x @ block.weight)
    return (z * z.conj() * z).real


ALL = [
    product,
    broadcast,
    masked,
    transposed,
    chunks,
    permuted,
    twice,
    weight_views,
    dropping,
    in_place,
    tiny,
    complex_values,
]


@pytest.mark.parametrize("body", ALL, ids=lambda body: body.__name__)
@pytest.mark.parametrize(("offload", "recompute"), [(True, False), (False, True), (True, [0])])
def test_every_kind_of_saved_tensor(
    body: Any, offload: Any, recompute: Any, paging: Callable[..., Paging]
) -> None:
    model, x = Stack(body), inputs(WIDTH, WIDTH) if body is transposed else inputs()
    expected = gradients(model, x)
    one = paging(model, offload, recompute)
    for seed in range(3):
        with inject_delays(seed, max_ms=0.3):
            assert same(expected, gradients(model, x))
    assert (one.stats.pages > 0) == bool(offload)
    assert one.activations.stats["host_bytes_in_use"] == 0


def saved_kinds(model: Stack, one: Paging, x: torch.Tensor, **kwargs: Any) -> list[torch.Tensor]:
    """Tensors that the first block's forward gave to the host."""
    seen: list[torch.Tensor] = []
    store = one.store.save

    def save(call: Any, tensor: torch.Tensor) -> Any:
        handle = store(call, tensor)
        if handle is not None and call.index == 0:
            seen.append(tensor.detach().clone())
        return handle

    one.store.save = save  # type: ignore[method-assign]
    model(x, **kwargs)
    del one.store.save
    return seen


def test_weights_buffers_and_broadcasts_stay(paging: Callable[..., Paging]) -> None:
    model = Stack(weight_views)
    one = paging(model)
    x = inputs()
    seen = saved_kinds(model, one, x)
    assert len(seen) == 2 and all(torch.equal(tensor, x) for tensor in seen)
    assert one.stats.reused >= 1
    model = Stack(lambda block, x: x * x.mean(0, keepdim=True).expand(4, WIDTH))
    one = paging(model)
    assert [tuple(tensor.shape) for tensor in saved_kinds(model, one, x)] == [(4, WIDTH)]


def test_small_tensors_stay(paging: Callable[..., Paging]) -> None:
    model = Stack(product)
    one = paging(model, min_bytes=4 * WIDTH * 4 + 1)
    gradients(model, inputs())
    assert one.stats.pages == 0
    one.close()
    one = paging(model, min_bytes=4 * WIDTH * 4)
    gradients(model, inputs())
    assert one.stats.pages > 0


def test_one_page_for_a_tensor_saved_often(paging: Callable[..., Paging]) -> None:
    """Also for views of other shapes over the same bytes, and for chunks of one product."""
    model = Stack(twice, depth=2)
    one = paging(model)
    model(inputs())
    assert one.stats.pages == 4  # x, tanh's result, its square, sigmoid's result
    assert one.stats.reused >= 2
    model = Stack(chunks, depth=2)
    one = paging(model)
    model(inputs())
    assert one.stats.page_bytes <= (4 * WIDTH * 4) * (1 + 3 + 1 + 3 * 3)
    assert one.stats.reused >= 2


def test_a_changed_tensor_raises_torchs_error(paging: Callable[..., Paging]) -> None:
    def body(block: Body, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ block.weight)
        z = y * 2
        y.add_(1)  # tanh's result, which its backward needs
        return z + y

    messages = []
    for offload, min_bytes in ((False, 0), (True, 0), (True, 1 << 20)):
        model = Stack(body)
        if offload:
            paging(model, offload, min_bytes=min_bytes)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            gradients(model, inputs())
        messages.append(str(caught.value))
    for message in messages:
        assert "[4, 8]" in message and "is at version 1; expected version 0" in message


def test_a_tensor_changed_before_it_is_saved_again(paging: Callable[..., Paging]) -> None:
    """Two versions of one tensor are two pages; a backward that reads only the later is right."""

    def body(block: Body, x: torch.Tensor) -> torch.Tensor:
        y = x.detach() * 1.0
        z = (y * block.weight.sum()).detach()
        y.add_(1)
        return y * x + z

    model, x = Stack(body), inputs()
    expected = gradients(model, x)
    paging(model)
    assert same(expected, gradients(model, x))


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


def test_looking_at_saved_tensors_outside_a_backward(paging: Callable[..., Paging]) -> None:
    model, x = Stack(lambda block, x: x.exp()), inputs()
    one = paging(model)
    y = model.layers[0](x)
    assert torch.equal(y.grad_fn._saved_result, y)
    assert not list(one.store._here)


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


class Cache:
    """What a key/value cache looks like: a second forward would add the same keys again."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []

    def update(self, key: torch.Tensor) -> torch.Tensor:
        self.keys.append(key)
        return torch.stack(self.keys).sum(0)


def test_blocks_with_a_cache_are_not_recomputed(paging: Callable[..., Paging]) -> None:
    def body(block: Body, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        return cache.update(torch.tanh(x @ block.weight))

    model, x = Stack(body), inputs()
    expected = gradients(model, x, cache=Cache())
    for offload, wanted in ((False, 0), (True, 1)):
        one = paging(model, offload, True)
        assert same(expected, gradients(model, x, cache=Cache()))
        assert one.activations.recomputed == 0 and (one.stats.pages > 0) == wanted
        assert sum("use_cache=False" in event for event in one.events) == 1
        one.close()


def test_in_several_threads(paging: Callable[..., Paging]) -> None:
    """Each thread its own forward and backward, through the same blocks."""
    model = Stack(product, depth=4)
    xs = [inputs() for _ in range(3)]
    expected = [gradients(model, x) for x in xs]
    paging(model, recompute=[1])
    found: dict[int, list[torch.Tensor]] = {}

    def work(k: int) -> None:
        for _ in range(5):
            out = model(xs[k])
            found[k] = list(torch.autograd.grad(out.sum(), [xs[k], *model.parameters()]))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    with inject_delays(1, max_ms=0.3):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    for k in range(3):
        assert same(expected[k], found[k])


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


def test_many_steps_of_everything(paging: Callable[..., Paging]) -> None:
    """Evaluations, forgotten forwards, exceptions, other shapes: nothing grows, all is exact."""
    reference, model = Stack(dropping, depth=4), Stack(dropping, depth=4)
    model.load_state_dict(reference.state_dict())
    one = paging(model, recompute=[1])
    rng = random.Random(0)
    seen = []
    threads = set(threading.enumerate())
    with inject_delays(0, max_ms=0.2):
        for _ in range(120):
            x = inputs(rng.choice((4, 4, 4, 9)), WIDTH)
            kind = rng.choice(("eval", "forgotten", "forward", "backward", "fine", "fine"))
            if kind == "eval":
                with torch.no_grad():
                    model(x)
            if kind == "forgotten":
                model(x)
            if kind in ("forward", "backward"):
                place = model.layers[rng.randrange(4)]

                def explode(*_: Any) -> None:
                    raise ZeroDivisionError

                hook = (
                    place.register_forward_hook(explode)
                    if kind == "forward"
                    else place.register_forward_hook(
                        lambda m, a, out, explode=explode: out.register_hook(explode) and None
                    )
                )
                with pytest.raises(ZeroDivisionError):
                    model(x).sum().backward()
                hook.remove()
            assert same(gradients(reference, x), gradients(model, x))
            seen.append(one.activations.stats["host_bytes"])
    assert max(seen[60:]) <= max(seen[:60])
    assert set(threading.enumerate()) <= threads
