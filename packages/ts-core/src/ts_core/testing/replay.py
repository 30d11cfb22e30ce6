"""Blocks to replay, and steps that train them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

WIDTH = 8


class Block(nn.Module):
    """Frozen matrix, adapter, dropout."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.adapted = True
        self.scaling = {"default": 0.5}

    def mixed(self, x: torch.Tensor) -> torch.Tensor:
        """What is added to the input."""
        y = torch.tanh(self.base(x))
        if self.adapted:
            y = y + self.up(self.down(self.dropout(x))) * self.scaling["default"]
        return y

    def forward(self, x: torch.Tensor) -> Any:
        """The next hidden state."""
        return x + self.mixed(x)


def batches(count: int, *shape: int) -> Iterator[torch.Tensor]:
    """The same inputs each time; of three rows where no shape is given."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(count):
        yield torch.randn(*(shape or (3, WIDTH)), generator=generator)


def plain_steps(
    model: nn.Module, optimizer: Any, count: int = 4, *args: Any, **kwargs: Any
) -> list[torch.Tensor]:
    """Training steps; returns results and gradients of the inputs."""
    found = []
    for x in batches(count):
        y = model(x.requires_grad_(), *args, **kwargs)
        (y * y).sum().backward()
        optimizer.step()
        found += [y.detach().clone(), x.grad]
    return found


def warm(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Enough steps that the next call is a replay."""
    return plain_steps(model, optimizer, 3)
