"""Autocast's copies of trained weights do not outlive a block that is computed again."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ts_core import wrap

WIDTH, DEPTH = 8, 5


class Copies(TorchDispatchMode):
    """Keeps weak references to the bfloat16 copies of weights that are made under it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and tuple(result.shape) == (WIDTH, WIDTH):
            self.found.append(weakref.ref(result))
        return result

    @property
    def alive(self) -> int:
        return sum(reference() is not None for reference in self.found)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(self.first(x))))


class Model(nn.Module):
    """Blocks; `again` of them run a second time, and the last two may share a weight."""

    def __init__(self, again: int = 0, tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(DEPTH))
        self.again = again
        if tied:
            self.layers[-1].second.weight = self.layers[-2].second.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers, *self.layers[: self.again]]:
            x = layer(x)
        return x.float().square().mean()


def steps(model: nn.Module, optimizer: Any, count: int = 4) -> list[torch.Tensor]:
    found = []
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.randn(5, WIDTH, generator=generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found


@pytest.mark.parametrize(
    ("recompute", "alive"), [(True, 0), ([0, 1, 2], 2 * 2), (False, 2 * DEPTH)]
)
def test_copies_go_with_blocks_that_are_computed_again(recompute: Any, alive: int) -> None:
    model, _ = wrap(Model(), lr=1e-2, device="host", recompute=recompute, activation_offload=False)
    with torch.autocast("cpu", torch.bfloat16), Copies() as copies:
        loss = model(torch.randn(5, WIDTH))
        assert len(copies.found) == 2 * DEPTH  # each weight is converted once, as without wrap()
        assert copies.alive == alive
    loss.backward()


@pytest.mark.parametrize("param_offload", [False, 0.6])
@pytest.mark.parametrize(("again", "tied"), [(0, False), (0, True)])
def test_the_result_is_that_of_plain_autocast(again: int, tied: bool, param_offload: Any) -> None:
    torch.manual_seed(0)
    plain = Model(again, tied)
    ours = copy.deepcopy(plain)
    expected = steps(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    ours, optimizer = wrap(
        ours,
        lr=1e-2,
        device="host",
        recompute=True,
        activation_offload=False,
        param_offload=param_offload,
        quantize="none",
    )
    found = steps(ours, optimizer)
    assert [float(loss) for loss in found] == pytest.approx([float(x) for x in expected], rel=1e-6)
    optimizer.synchronize()
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=3e-7)


def test_copies_stay_once_a_block_has_run_twice_in_a_forward() -> None:
    """Their gradients are then summed at the copy, as plain autocast does."""
    torch.manual_seed(0)
    plain = Model(again=2)
    ours = copy.deepcopy(plain)
    ours, _ = wrap(ours, lr=1e-2, device="host", recompute=True, activation_offload=False)
    x = torch.randn(5, WIDTH)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16), Copies() as copies:
            loss = ours(x)
            alive = copies.alive
        ours.zero_grad()
        del loss
    assert alive == 2 * DEPTH


class Outside(nn.Module):
    """The same stack between two layers; the last one's weight may be a block's own."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.stack = Model()
        self.last = nn.Linear(WIDTH, WIDTH)
        if tied:
            self.last.weight = self.stack.layers[1].second.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.stack.layers:
            x = layer(x)
        return self.last(x).float().square().mean()


def gradients(
    model: nn.Module, calls: int = 1, cache: bool = True
) -> dict[str, list[torch.Tensor]]:
    """Of each of three steps, by name."""
    found: dict[str, list[torch.Tensor]] = {}
    handles = [
        parameter.register_hook(lambda grad, name=name: found.setdefault(name, []).append(grad))
        for name, parameter in model.named_parameters()
    ]
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            batches = torch.randn(calls, 40, WIDTH, generator=generator)
            sum(model(x) for x in batches).backward()  # type: ignore[union-attr]
        model.zero_grad()
    for handle in handles:
        handle.remove()
    return found


def recomputing(model: nn.Module, recompute: Any) -> nn.Module:
    """lr 0: values stay, though updates start in backward."""
    ours = copy.deepcopy(model)
    ours, _ = wrap(
        ours,
        lr=0.0,
        device="host",
        blocks=list(ours.stack.layers),
        recompute=recompute,
        activation_offload=False,
    )
    return ours


def equal(a: dict[str, list[torch.Tensor]], b: dict[str, list[torch.Tensor]]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(x, y) for name in a for x, y in zip(a[name], b[name], strict=True)
    )


@pytest.mark.parametrize("recompute", [True, [0, 1]])
def test_copies_of_weights_shared_with_the_rest_of_the_model_stay(recompute: Any) -> None:
    torch.manual_seed(0)
    model = Outside(tied=True)
    expected = gradients(model)
    assert not equal(expected, gradients(model, cache=False))
    assert equal(gradients(recomputing(model, recompute)), expected)


def test_uses_before_and_after_a_block_have_copies_of_their_own() -> None:
    """As docs/options.md says of `recompute`: two forwards for one loss; without a cache all is as
    in plain training."""
    torch.manual_seed(0)
    model = Outside(tied=False)
    assert equal(gradients(recomputing(model, True)), gradients(model))
    cached, apart = gradients(model, 2), gradients(model, 2, cache=False)
    assert not equal(cached, apart)
    assert equal(gradients(recomputing(model, True), 2, cache=False), apart)
    ours = gradients(recomputing(model, True), 2)
    assert not equal(ours, cached)
    for name in ours:
        for a, b in zip(ours[name], apart[name], strict=True):
            assert torch.allclose(a, b, rtol=0.02, atol=1e-2 * float(b.abs().max())), name
