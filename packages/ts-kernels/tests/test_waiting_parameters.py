"""Parameters whose values are still being written: the same kernel runs, after they are there."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import ts_kernels
from ts_kernels._heads import is_plain, settled


class Waiting(nn.Parameter):
    """Arrives at the first operation, as a parameter in the middle of a background update does."""

    reads_wait = True
    arrived: ClassVar[list[int]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.arrived.append(1)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class OwnMaths(torch.Tensor):
    """A subclass with arithmetic of its own is not plain."""


def waiting(parameter: nn.Parameter) -> nn.Parameter:
    parameter.__class__ = Waiting
    return parameter


def test_what_counts_as_plain() -> None:
    assert is_plain(waiting(nn.Parameter(torch.ones(2))))
    assert not is_plain(torch.ones(2).as_subclass(OwnMaths))
    plain = nn.Parameter(torch.ones(2))
    assert settled(plain) is plain
    Waiting.arrived.clear()
    assert type(settled(waiting(nn.Parameter(torch.ones(2))))) is torch.Tensor and Waiting.arrived


def lora(*parts: torch.Tensor) -> torch.Tensor:
    return ts_kernels.lora_linear(torch.ones(3, 8), parts[0], parts[1], parts[2], 0.5, parts[3])


def loss(*parts: torch.Tensor) -> torch.Tensor:
    targets = torch.tensor([1, 2, 0])
    return ts_kernels.chunked_cross_entropy(
        parts[1] @ torch.ones(8, 8), parts[0], targets, parts[3], chunk_size=2
    )


def logprobs(*parts: torch.Tensor) -> torch.Tensor:
    labels = torch.tensor([[1, 2, 0]])
    return ts_kernels.sequence_logprobs(parts[1][None], parts[0], labels, parts[3])


@pytest.mark.parametrize("function", [lora, loss, logprobs])
def test_values_and_gradients_are_those_of_ordinary_parameters(function: Any) -> None:
    found = []
    for make in (lambda p: p, waiting):
        torch.manual_seed(0)
        shapes = [(6, 8), (3, 8), (6, 3), (6,)]
        parts = [make(nn.Parameter(torch.randn(shape))) for shape in shapes]
        Waiting.arrived.clear()
        result = function(*parts)
        assert bool(Waiting.arrived) == (make is waiting)
        result.sum().backward()
        found.append([result.detach(), *(part.grad for part in parts if part.grad is not None)])
    assert len(found[0]) == len(found[1]) >= 3
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_patched_norm_does_not_depend_on_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Norm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(16) + 0.5)
            self.variance_epsilon = 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = x.float()
            wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            return self.weight * wide.to(x.dtype)

    block = nn.Sequential(Norm())
    ts_kernels.patch_blocks([block], device="cpu")
    from ts_kernels.patching import _norm

    used: list[int] = []
    kernel = _norm.rms_norm
    monkeypatch.setattr(_norm, "rms_norm", lambda *a, **k: used.append(1) or kernel(*a, **k))
    x = torch.randn(4, 16)
    plain = block(x)
    waiting(block[0].weight)
    assert torch.equal(block(x), plain) and len(used) == 2
