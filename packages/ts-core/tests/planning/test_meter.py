"""Counting what operations allocate: by hand, and the same on fake and on real tensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ts_core.planning.meter import Meter, measure_step
from ts_core.planning.stack import short_stack
from ts_core.testing import TinyModel, tiny_model


def test_storages_count_while_they_live_and_views_do_not() -> None:
    with FakeTensorMode(), Meter() as meter:
        a = torch.empty(1000)
        b = a.view(10, 100)[2:]
        assert meter.now == 4000
        c = b + 1
        assert meter.now == 4000 + 3200
        del a
        assert meter.now == 4000 + 3200  # b is a view of it
        del b
        assert meter.now == 3200
        c.add_(1)
        assert (meter.now, meter.peak) == (3200, 7200)
        assert meter.mark() == 3200
        del c
        assert (meter.now, meter.peak) == (0, 3200)


class Squares(nn.Module):
    """Keeps its input for backward, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_what_blocks_keep_by_hand() -> None:
    blocks = nn.ModuleList(Squares() for _ in range(3))
    size = 4 * 500

    def loss() -> torch.Tensor:
        hidden = torch.ones(500)
        for block in blocks:
            hidden = block(hidden)
        return hidden.sum()

    step = measure_step(blocks, list(blocks), loss)
    assert step.activations == (size, size, size)  # its output is the next one's input
    assert step.inputs == (size, size, size)
    assert size <= step.head <= size + 64  # the tensor that went in, the loss and its gradient
    # Two gradients of `size` (what comes, what goes, and the product that is summed for scale).
    assert 2 * size <= step.transient <= 4 * size
    assert all(block.scale.grad is None for block in blocks)
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in blocks)


def test_fake_and_real_tensors_count_the_same() -> None:
    def run(model: TinyModel) -> Any:
        tokens = torch.zeros(2, 9, dtype=torch.long)

        def loss() -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return model(tokens)

        return measure_step(model, list(model.layers), loss)

    real = run(TinyModel(4, 32))
    with FakeTensorMode():
        fake = run(TinyModel(4, 32))
    assert fake == real
    assert min(real.activations) > 0 and real.transient > 0 and real.head > 0


def test_a_short_stack_of_like_blocks_says_the_same() -> None:
    tokens = torch.zeros(2, 9, dtype=torch.long)
    model = tiny_model(7, 32)
    before = list(model.layers)
    full = measure_step(model, before, lambda: model(tokens))
    with short_stack(model, before) as fewer:
        assert len(fewer) == 3 and list(model.layers) == fewer
        short = measure_step(model, fewer, lambda: model(tokens))
    assert list(model.layers) == before
    assert full.activations == (
        *short.activations[:2],
        *([short.activations[1]] * 4),
        short.activations[2],
    )
    assert (full.head, full.inputs[0]) == (short.head, short.inputs[0])
    assert full.transient == pytest.approx(short.transient, rel=0.02)


@pytest.mark.parametrize("change", ["frozen", "elsewhere", "few"])
def test_stacks_that_are_not_alike_stay_whole(change: str) -> None:
    model = tiny_model(3 if change == "few" else 5, 16)
    blocks = list(model.layers)
    if change == "frozen":
        blocks[2].norm.weight.requires_grad_(True)
    if change == "elsewhere":
        blocks = copy.deepcopy(blocks)
    with short_stack(model, blocks) as kept:
        assert kept == blocks


def test_the_model_is_left_as_it_was_when_it_raises() -> None:
    model = tiny_model(3, 16)

    def loss() -> torch.Tensor:
        model(torch.zeros(1, 4, dtype=torch.long))
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        measure_step(model, list(model.layers), loss)
    hooks = [(m._forward_hooks, m._forward_pre_hooks) for m in model.layers]
    assert not any(after or before for after, before in hooks)
