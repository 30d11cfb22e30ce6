"""E[x^2] block by block equals what hooks on the whole model see."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ts_quant


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.5)

    def forward(self, hidden: Tensor, shift: Tensor | None = None, gain: float = 1.0) -> Tensor:
        shift = torch.zeros_like(hidden) if shift is None else shift
        return hidden + self.drop(self.down(torch.relu(self.up(hidden + shift)))) * gain


class Stack(nn.Module):
    def __init__(self, width: int = 12, depth: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        shift = torch.linspace(-1, 1, hidden.shape[-1]).expand_as(hidden)
        for index, block in enumerate(self.blocks):
            hidden = block(hidden, shift * index, gain=1.0 / (1 + index))
        return hidden


def _by_hooks(model: nn.Module, batches: list[Any]) -> dict[str, Tensor]:
    rows: dict[str, list[Tensor]] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda m, args, name=name: rows.setdefault(name, []).append(args[0].flatten(0, -2))
        )
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(found).square().mean(0) for name, found in rows.items()}


@pytest.mark.parametrize("how", ["tensor", "tuple", "dict"])
def test_block_by_block_equals_the_whole_model(how: str) -> None:
    model = Stack().train()
    batches = [torch.randint(0, 17, (2, 5)), torch.randint(0, 17, (1, 9))]
    given = {
        "tensor": batches,
        "tuple": [(ids,) for ids in batches],
        "dict": [{"ids": ids} for ids in batches],
    }[how]
    found = ts_quant.error_stats(model, given, blocks=list(model.blocks))
    assert model.training  # put back
    expected = _by_hooks(model.eval(), batches)
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
    assert all("forward" not in block.__dict__ for block in model.blocks)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_layers_that_no_data_reached_weigh_all_channels_the_same() -> None:
    model = Stack()
    model.blocks[1].spare = nn.Linear(5, 3)
    ids = torch.randint(0, 17, (1, 4))
    found = ts_quant.error_stats(model, [ids], blocks=list(model.blocks))
    assert torch.equal(found["blocks.1.spare"], torch.ones(5))


def test_refused() -> None:
    model = Stack()
    ids = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(ts_quant.OptionError, match="at least one batch"):
        ts_quant.error_stats(model, [], blocks=list(model.blocks))
    with pytest.raises(ts_quant.OptionError, match="got none"):
        ts_quant.error_stats(model, [ids], blocks=[])
    with pytest.raises(ts_quant.OptionError, match="modules of the model"):
        ts_quant.error_stats(model, [ids], blocks=[nn.Linear(2, 2)])
    with pytest.raises(ts_quant.OptionError, match="not in their order"):
        ts_quant.error_stats(model, [ids], blocks=list(model.blocks)[::-1])
    assert all("forward" not in block.__dict__ for block in model.blocks)


@pytest.mark.gpu
def test_blocks_visit_the_gpu_one_by_one_and_come_back() -> None:
    model = Stack(width=64, depth=3)
    batches = [torch.randint(0, 17, (2, 50))]
    expected = ts_quant.error_stats(model, batches, blocks=list(model.blocks))
    found = ts_quant.error_stats(model, batches, blocks=list(model.blocks), device="cuda")
    assert all(p.device.type == "cpu" for p in model.parameters())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
