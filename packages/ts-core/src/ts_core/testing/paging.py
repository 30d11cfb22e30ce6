"""Stacks whose activations are paged or recomputed, without wrap()."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ts_core.device import HostDevice
from ts_core.engine.activation_options import ActivationOptions
from ts_core.engine.activations import Activations
from ts_core.engine.runner import BlockRunner
from ts_core.memory.arena import PinnedArena
from ts_core.transfer import CopyEngine

WIDTH = 8


class Stack(nn.Module):
    """Blocks one after the other; `body` is what a block computes."""

    def __init__(self, body: Callable[..., torch.Tensor], depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Body(body) for _ in range(depth))

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """The last hidden state."""
        for layer in self.layers:
            x = layer(x, **kwargs)
        return x


class Body(nn.Module):
    """One block, with a weight and a buffer."""

    def __init__(self, body: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.register_buffer("table", torch.randn(WIDTH, WIDTH))
        self.body = body

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """The next hidden state."""
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
        """Remove the hooks; pages go with their graphs."""
        self.hook.remove()
        self.runner.remove()
        self.activations.close()


def inputs(*shape: int) -> torch.Tensor:
    """Random, of four rows where no shape is given; asks for a gradient."""
    return torch.randn(*(shape or (4, WIDTH)), requires_grad=True)


def product(block: Body, x: torch.Tensor) -> torch.Tensor:
    """A body."""
    return torch.tanh(x @ block.weight)


def gradients(model: Stack, x: torch.Tensor, **kwargs: Any) -> list[torch.Tensor]:
    """Of the input and of all parameters, with random numbers that begin anew."""
    torch.manual_seed(0)
    out = model(x, **kwargs)
    return list(torch.autograd.grad(out.sum(), [x, *model.parameters()], allow_unused=True))


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    """Whether two lists of gradients are equal bit for bit."""
    return all(
        (a is None and b is None) or torch.equal(a, b) for a, b in zip(first, second, strict=True)
    )


def dropping(block: Body, x: torch.Tensor) -> torch.Tensor:
    """A body with dropout."""
    return F.dropout(x @ block.weight, 0.5, training=True) + x
