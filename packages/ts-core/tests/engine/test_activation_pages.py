"""What is paged, and that every kind of saved tensor comes back as it was."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

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


def test_looking_at_saved_tensors_outside_a_backward(paging: Callable[..., Paging]) -> None:
    model, x = Stack(lambda block, x: x.exp()), inputs()
    one = paging(model)
    y = model.layers[0](x)
    assert torch.equal(y.grad_fn._saved_result, y)
    assert not list(one.store._here)


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
