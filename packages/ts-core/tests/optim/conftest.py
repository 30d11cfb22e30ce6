"""Models and loops for tests of the optimizer."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import pytest
import torch
from torch import nn


@functools.cache
def _factors(name: str, shape: tuple[int, ...], step: int, micro: int) -> torch.Tensor:
    seed = zlib.crc32(f"{name} {step} {micro}".encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Lab:
    """A small model whose gradients do not depend on rounding before them, and its training."""

    @staticmethod
    def model(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
        """Small parameters (one bucket), an unused one, and a large one (a bucket of its own)."""
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(13, 29), nn.Tanh(), nn.Linear(29, 7), nn.LayerNorm(7))
        model.register_parameter("unused", nn.Parameter(torch.randn(5)))
        model.register_parameter("large", nn.Parameter(torch.randn(400, 701) * 0.01))
        model.register_parameter("second", nn.Parameter(torch.randn(300, 1000) * 0.01))
        return model.to(dtype)

    @staticmethod
    def loss(model: nn.Module, step: int, micro: int = 0) -> torch.Tensor:
        """Linear in every used parameter."""
        total = torch.zeros((), device=next(model.parameters()).device)
        for name, parameter in model.named_parameters():
            if name != "unused":
                factor = _factors(name, tuple(parameter.shape), step % 4, micro).to(parameter)
                total = total + (parameter * factor).sum().float() * 1e-2
        return total

    @classmethod
    def run(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        steps: int,
        *,
        accumulation: int = 1,
        clip: float | None = None,
        first: int = 0,
    ) -> None:
        """Train; `clip` by torch's own function (for reference optimizers)."""
        for step in range(first, first + steps):
            for micro in range(accumulation):
                (cls.loss(model, step, micro) / accumulation).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()

    @staticmethod
    def distance(a: nn.Module, b: nn.Module) -> float:
        """Largest difference of any parameter."""
        return max(
            (p.detach().float().cpu() - q.detach().float().cpu()).abs().max().item()
            for p, q in zip(a.parameters(), b.parameters(), strict=True)
        )

    @staticmethod
    def groups(model: nn.Module, grouped: bool) -> list[dict[str, Any]]:
        """One group, or two with hyper-parameters of their own."""
        params = list(model.parameters())
        if not grouped:
            return [{"params": params}]
        return [
            {"params": params[:3], "lr": 3e-3, "weight_decay": 0.0},
            {"params": params[3:], "betas": (0.8, 0.95), "eps": 1e-6},
        ]


@pytest.fixture
def lab() -> type[Lab]:
    """The model and loops."""
    return Lab
