"""Stacks of any shape whose trained weights stream: shared, repeated, reordered, odd in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ts_core.store.leaves import Leaf
from ts_core.testing.trained import (
    CLIP,
    WIDTH,
    Block,
    Stack,
    batch,
    compare,
    looped,
    looped_body,
    steps_body,
    streamed,
)


@pytest.mark.parametrize("options", [{}, CLIP], ids=["eager", "clipped"])
def test_blocks_called_several_times_and_out_of_order(options: dict[str, Any]) -> None:
    compare(looped_body, **options)


@pytest.mark.parametrize("options", [{}, CLIP], ids=["eager", "clipped"])
def test_blocks_whose_gradients_come_in_parts(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU torch starts a new accumulator when a weight changes memory; so it does here."""
    monkeypatch.setattr("ts_core.device.host.HostDevice.separate_memory", True)
    proper = Leaf.set

    def set_anew(self: Leaf, tensor: torch.Tensor) -> None:
        if self.trained:
            proper(self, tensor.double())  # another dtype: torch drops the accumulator
        proper(self, tensor)

    monkeypatch.setattr(Leaf, "set", set_anew)
    parts: list[int] = []

    def body(model: Any, optimizer: Any) -> None:
        weight = model.layers[0].up.weight
        weight.register_post_accumulate_grad_hook(lambda _: parts.append(1))
        for _ in range(3):
            for _ in range(2):
                (looped(model) / 2).backward()
            optimizer.step()
            optimizer.zero_grad()

    compare(body, accumulation_steps=2, **options)
    assert len(parts) == 3 * 2 * 3 + 3 * 2  # three parts per backward when streamed, one in torch


def test_a_block_that_is_in_the_stack_twice() -> None:
    def make() -> nn.Module:
        shared = Block()
        model = Stack()
        model.layers[1] = model.layers[3] = shared
        return model

    compare(steps_body, make)
    compare(steps_body, make, **CLIP)


def test_weights_tied_across_blocks_and_with_the_head() -> None:
    class Tied(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.layers[2].up.weight = self.layers[0].up.weight
            self.out = nn.Linear(2 * WIDTH, WIDTH, bias=False)
            self.out.weight = self.layers[1].down.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.head(self.out(torch.cat([x, x], 1)))  # type: ignore[no-any-return]

    compare(steps_body, Tied)
    model, _ = streamed(Tied)
    homed = {home.param for home in model._trainstream_session.homes}
    assert model.layers[0].up.weight not in homed
    assert model.layers[1].down.weight not in homed
    assert model.layers[3].down.weight in homed


class Wide(Block):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)


def test_heterogeneous_blocks() -> None:
    sizes = iter([8, 40, 16, 24] * 2)
    compare(steps_body, lambda: Stack(lambda: Wide(next(sizes))))


def test_a_weight_that_is_not_contiguous() -> None:
    def make() -> nn.Module:
        model = Stack()
        for layer in model.layers:
            layer.up.weight = nn.Parameter(layer.up.weight.detach().t().contiguous().t())
        return model

    compare(steps_body, make)


def test_a_block_weight_used_outside_its_block() -> None:
    def body(model: Any, optimizer: Any) -> None:
        for _ in range(4):
            x = batch()
            for layer in model.layers:
                x = layer(x)
                x = x + torch.tanh(F.linear(x, layer.up.weight[:WIDTH]))
            model.head(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    compare(body)
