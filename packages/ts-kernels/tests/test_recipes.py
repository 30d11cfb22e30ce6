"""lora_linear keeps what rms_norm and gated_mlp keep anyway, instead of their results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ts_kernels

ROWS, WIDTH, OUT, RANK = 7, 24, 10, 3


def adapters(dtype: torch.dtype) -> list[Tensor]:
    made = torch.randn(RANK, WIDTH), torch.randn(OUT, RANK)
    return [tensor.to(dtype).requires_grad_() for tensor in made]


def mlp(seed: int, dtype: torch.dtype) -> tuple[list[Tensor], Callable[..., Tensor]]:
    torch.manual_seed(seed)
    gate, up = (torch.randn(2, ROWS, WIDTH, dtype=dtype).requires_grad_() for _ in range(2))
    return [gate, up], ts_kernels.gated_mlp


def norm(seed: int, dtype: torch.dtype) -> tuple[list[Tensor], Callable[..., Tensor]]:
    torch.manual_seed(seed)
    x = torch.randn(2, ROWS, WIDTH, dtype=dtype).requires_grad_()
    weight = torch.randn(WIDTH, dtype=dtype).requires_grad_()
    return [x, weight], lambda x, weight: ts_kernels.rms_norm(x, weight, 1e-6)


def saved_bytes(work: Callable[[], Tensor]) -> tuple[Tensor, int]:
    """The result, and the bytes that autograd saves, each memory counted once."""
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = work()
    return result, sum(tensor.untyped_storage().nbytes() for tensor in found.values())


@pytest.mark.parametrize("before", [mlp, norm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_from_fewer_bytes(
    before: Callable[..., tuple[list[Tensor], Callable[..., Tensor]]], dtype: torch.dtype
) -> None:
    inputs, make = before(0, dtype)
    weight, (a, b) = torch.randn(OUT, WIDTH, dtype=dtype), adapters(torch.float32)
    dy = torch.randn(2, ROWS, OUT, dtype=dtype)
    gradients, sizes = [], []
    for again in (True, False):

        def work(again: bool = again) -> Tensor:
            x = make(*inputs)
            # A view is another object, of which nothing is known.
            return ts_kernels.lora_linear(x if again else x.view_as(x), weight, a, b, 0.5)

        y, size = saved_bytes(work)
        gradients.append([y, *torch.autograd.grad(y, [*inputs, a, b], dy)])
        sizes.append(size)
    for mine, plain in zip(*gradients, strict=True):
        assert torch.equal(mine, plain)
    assert sizes[1] - sizes[0] == 2 * ROWS * WIDTH * dtype.itemsize


def test_a_result_that_was_written_is_kept_itself() -> None:
    (gate, up), make = mlp(1, torch.float32)
    weight, (a, b) = torch.randn(OUT, WIDTH), adapters(torch.float32)
    found = []
    for written in (True, False):
        x = make(gate, up)
        x = x.mul_(3.0) if written else x * 3.0
        y = ts_kernels.lora_linear(x, weight, a, b, 0.5)
        found.append([y, *torch.autograd.grad(y.square().sum(), [gate, up, a, b])])
    for mine, plain in zip(*found, strict=True):
        assert torch.equal(mine, plain)


def test_inputs_that_are_written_before_backward_are_noticed() -> None:
    (gate, up), make = mlp(2, torch.float32)
    weight, (a, b) = torch.randn(OUT, WIDTH), adapters(torch.float32)
    y = ts_kernels.lora_linear(make(gate * 1.0, kept := up * 1.0), weight, a, b, 0.5)
    with torch.no_grad():
        kept.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_without_gradients_nothing_is_noted() -> None:
    (gate, up), make = mlp(3, torch.float32)
    with torch.no_grad():
        assert not hasattr(make(gate, up), "_ts_kernels_recipe")
