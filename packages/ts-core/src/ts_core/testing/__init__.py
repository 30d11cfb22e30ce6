"""Small models and loops for tests of streaming; imported by nothing at run time.

A trainable stack with everything that makes streaming hard to get right: frozen matrices, a view
of a weight, a non-linear use of one, dropout, norms, trained adapters, a tied head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ts_core.transfer.edges import inject_delays

__all__ = ["TinyBlock", "TinyModel", "TrainingRecord", "inject_delays", "tiny_model", "train"]


class TinyBlock(nn.Module):
    """Two frozen linears, a matrix used through a view, a gate, and a trained low-rank adapter."""

    def __init__(self, width: int, rank: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.mix = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.gate = nn.Parameter(torch.randn(1, width))
        self.lora_a = nn.Linear(width, rank, bias=False)
        self.lora_b = nn.Linear(rank, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        x = self.norm(hidden)
        y = self.down(F.gelu(self.up(x))) + x @ self.mix.t() * torch.sigmoid(self.gate)
        y = y + self.lora_b(self.lora_a(self.dropout(x)))
        out: torch.Tensor = hidden + y
        return out


class TinyModel(nn.Module):
    """Embedding, `depth` blocks, a head tied to the embedding, next-token loss."""

    def __init__(
        self, depth: int, width: int, vocab: int = 37, rank: int = 3, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(TinyBlock(width, rank, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(self.norm(hidden)).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def tiny_model(
    depth: int = 5,
    width: int = 16,
    *,
    seed: int = 0,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    full: bool = False,
) -> TinyModel:
    """A seeded TinyModel in which only the adapters are trained (`full`: everything is)."""
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    model = TinyModel(depth, width, dropout=dropout).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(full or "lora" in name)
    torch.set_rng_state(generator_state)
    return model


@dataclass
class TrainingRecord:
    """What a run produced, for bit-for-bit comparison."""

    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    trained: dict[str, torch.Tensor] = field(default_factory=dict)

    def differences(self, other: TrainingRecord) -> list[str]:
        """Names of everything that is not `torch.equal` in the other run."""
        found = [
            f"loss {k}"
            for k, (a, b) in enumerate(zip(self.losses, other.losses, strict=True))
            if not torch.equal(a, b)
        ]
        for k, (mine, theirs) in enumerate(zip(self.gradients, other.gradients, strict=True)):
            found += [
                f"gradient {k} of {name}"
                for name in mine
                if not torch.equal(mine[name], theirs[name])
            ]
        found += [
            f"trained {name}"
            for name in self.trained
            if not torch.equal(self.trained[name], other.trained[name])
        ]
        return found


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    accumulation: int = 1,
    batch: int = 2,
    length: int = 7,
    vocab: int = 37,
    seed: int = 1,
    device: torch.device | str = "cpu",
    call: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None,
    autocast: torch.dtype | None = None,
) -> TrainingRecord:
    """Train on seeded random tokens and record losses, gradients and final trained values."""
    record = TrainingRecord()
    generator = torch.Generator().manual_seed(seed)
    current: dict[str, torch.Tensor] = {}
    handles = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:

            def keep(grad: torch.Tensor, name: str = name) -> None:
                before = current.get(name)
                current[name] = grad.clone() if before is None else before + grad

            handles.append(parameter.register_hook(keep))
    for step in range(steps):
        torch.manual_seed(1000 + step)
        for _ in range(accumulation):
            tokens = torch.randint(0, vocab, (batch, length), generator=generator).to(device)
            kind = torch.device(device).type
            context: Any = torch.autocast(kind, dtype=autocast or torch.bfloat16)
            with context if autocast is not None else torch.enable_grad():
                loss = call(model, tokens) if call is not None else model(tokens)
            (loss / accumulation).backward()
            record.losses.append(loss.detach().clone())
        record.gradients.append(dict(current))
        current.clear()
        optimizer.step()
        optimizer.zero_grad()
    for handle in handles:
        handle.remove()
    record.trained = {
        name: parameter.detach().clone().cpu()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    return record
