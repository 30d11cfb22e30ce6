"""Random sequences of what users do with a StreamedModel, each equal to a resident model's."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ts_core import StreamedModel
from ts_core.testing import TinyBlock, inject_delays

WIDTH = 4
ACTIONS = (
    *("train", "train", "accumulate", "eval", "retain"),
    *("checkpoint", "reentrant checkpoint", "raise in forward", "raise in backward"),
)


class RaiseInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError


def raise_in_forward(*_: Any) -> None:
    raise ZeroDivisionError


def act(
    action: str,
    model: nn.Module,
    block: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
) -> list[torch.Tensor | None]:
    """Do one thing with `model`; everything that can be compared afterwards."""
    x = x.clone().requires_grad_()
    if action == "eval":
        with torch.no_grad():
            result = model.eval()(x)
        model.train()
        return [result]
    if action == "raise in forward":
        handle = block.register_forward_pre_hook(raise_in_forward)
        with pytest.raises(ZeroDivisionError):
            model(x)
        handle.remove()
        return []
    if action == "raise in backward":
        with pytest.raises(ZeroDivisionError):
            model(RaiseInBackward.apply(x)).sum().backward()
        optimizer.zero_grad()
        return []
    if "checkpoint" in action:
        output = checkpoint(model, x, use_reentrant="reentrant" in action)
    else:
        output = model(x)
    loss = output.square().sum()
    if action == "retain":
        loss.backward(retain_graph=True)
    loss.backward()
    found = [loss.detach(), x.grad, *(p.grad for p in model.parameters())]
    if action != "accumulate":
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.detach().clone() for p in model.parameters())]


def equal(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


@pytest.mark.parametrize("seed", range(6))
def test_equals_resident(seed: int) -> None:
    choose = random.Random(seed)
    torch.manual_seed(seed)
    blocks: list[nn.Module] = [
        TinyBlock(WIDTH, 2, choose.choice([0, 0.3]))
        if choose.random() < 0.7
        else nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2))
        for _ in range(choose.randint(1, 6))
    ]
    for block in blocks:
        for parameter in block.parameters():
            parameter.requires_grad_(choose.random() > 0.3)
    streamed = StreamedModel(copy.deepcopy(blocks), "host", choose.randint(0, 4))
    resident = nn.Sequential(*blocks)
    sides = [(resident, blocks), (streamed, list(streamed.blocks))]
    optimizers = [
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-3, momentum=0.9)
        for model, _ in sides
    ]
    with inject_delays(seed, max_ms=1.0), streamed:
        for step in range(6):
            action = choose.choice(ACTIONS)
            x = torch.randn(choose.randint(1, 3), 2, WIDTH)
            found = []
            for (model, mine), optimizer in zip(sides, optimizers, strict=True):
                torch.manual_seed(step)
                found.append(act(action, model, mine[len(mine) // 2], optimizer, x))
            same = [equal(a, b) for a, b in zip(*found, strict=True)]
            assert all(same), (step, action, same)
