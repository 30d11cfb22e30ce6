"""Stand-ins for low-rank adapters, so that a plan counts what they hold and keep."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class AdaptedLinear(nn.Module):
    """A linear layer with an fp32 adapter beside it, as PEFT runs it: B(A(x in fp32))."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(base.in_features, rank, bias=False, dtype=torch.float32)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.lora_B(self.lora_A(x.float())) * 2.0
        return out


def add_adapters(blocks: Sequence[nn.Module], rank: int) -> int:
    """Put an adapter beside every linear layer of the blocks; returns how many."""
    found = [
        (module, name, child)
        for block in blocks
        for module in block.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.Linear)
    ]
    for module, name, child in found:
        setattr(module, name, AdaptedLinear(child, rank))
    return len(found)
