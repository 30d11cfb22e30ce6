"""Blocks of every kind that a StreamedModel runs in a row."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from ts_core.testing import TinyBlock

WIDTH = 8


class Shifted(nn.Module):
    """Takes a tensor argument and returns a tuple; one parameter is used twice, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.again = self.mix
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, hidden: torch.Tensor, shift: torch.Tensor, *, gain: float = 1.0) -> Any:
        """The next hidden state, and a text."""
        out = torch.tanh(self.again(self.mix(hidden)) * self.scale * gain) + shift
        return out, "ignored"


class Normal(nn.Module):
    """A TinyBlock (dropout, adapter, view of a weight) that takes and ignores the arguments."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.inner = TinyBlock(WIDTH, 2, dropout)

    def forward(self, hidden: torch.Tensor, shift: torch.Tensor, *, gain: float = 1.0) -> Any:
        """The inner block's result."""
        return self.inner(hidden)


class Tokens(nn.Module):
    """Integers in, hidden state out; no gradient flows into it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)

    def forward(self, hidden: torch.Tensor, shift: torch.Tensor, *, gain: float = 1.0) -> Any:
        """A row of the table for each token."""
        return self.table(hidden)


class Head(nn.Module):
    """A frozen matrix and a dict as result."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 5)
        self.out.weight.requires_grad_(False)

    def forward(self, hidden: torch.Tensor, shift: torch.Tensor, *, gain: float = 1.0) -> Any:
        """Logits, the best of them, and None."""
        logits = self.out(hidden)
        return OrderedDict(logits=logits, best=logits.argmax(-1), nothing=None)


def zoo(seed: int = 0) -> list[nn.Module]:
    """A stack of all of them."""
    torch.manual_seed(seed)
    return [Tokens(), Normal(), Shifted(), Normal(), Shifted(), Head()]


def resident_forward(blocks: list[nn.Module], x: Any, *args: Any, **kwargs: Any) -> Any:
    """What a StreamedModel of these blocks computes."""
    for k, block in enumerate(blocks):
        x = block(x, *args, **kwargs)
        if isinstance(x, tuple) and k + 1 < len(blocks):
            x = x[0]
    return x


def inputs(step: int, batch: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and the argument that every block gets."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 11, (batch, 3), generator=generator)
    return tokens, torch.randn(1, 1, WIDTH, generator=generator, requires_grad=True)
