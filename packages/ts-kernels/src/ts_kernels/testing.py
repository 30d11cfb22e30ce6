"""What tests of kernels compare with; for this package and for packages that use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def assert_rounding_tier(
    actual: Tensor, same_dtype: Tensor, exact: Tensor, what: str = "result"
) -> None:
    """The error of `actual` is at most twice that of the same-dtype computation, plus 1e-6.

    Args:
        actual: what the kernel computed.
        same_dtype: what plain PyTorch computes in the same dtype.
        exact: the float64 result.
        what: named in the message.

    Raises:
        AssertionError: another shape, a NaN, or a larger error (the largest over all elements;
            1e-6 is relative to the largest exact value where that exceeds 1).
    """
    if not actual.shape == same_dtype.shape == exact.shape:
        raise AssertionError(
            f"{what}: shapes {tuple(actual.shape)}, {tuple(same_dtype.shape)} and "
            f"{tuple(exact.shape)} differ"
        )
    if exact.numel() == 0:
        return
    error = (actual.double() - exact).abs().max()
    allowed = 2 * (same_dtype.double() - exact).abs().max() + 1e-6 * exact.abs().max().clamp(min=1)
    if not error <= allowed:  # also refuses NaN
        raise AssertionError(f"{what}: error {error.item():.3e}, allowed {allowed.item():.3e}")


def compare_with_reference(
    function: Callable[..., Any],
    reference: Callable[..., Any],
    inputs: Sequence[Tensor],
    upstream: Sequence[Tensor],
    check: Callable[[Tensor, Tensor, Tensor, str], None] = assert_rounding_tier,
) -> None:
    """Results and gradients of a kernel in the rounding tier of its reference.

    Args:
        function, reference: take the inputs, return a tensor or a tuple of tensors.
        inputs: all require grad; the reference also gets them in float64.
        upstream: one gradient for each result.
        check: as `assert_rounding_tier`.

    Raises:
        AssertionError: a dtype, shape or value is off.
    """
    wide = [t.detach().double().requires_grad_() for t in inputs]
    found: list[list[Tensor]] = []
    ups = list(upstream)
    for run, given in ((function, inputs), (reference, inputs), (reference, wide)):
        out = run(*given)
        outs = out if isinstance(out, tuple) else (out,)
        ups = [u.to(o.dtype) for u, o in zip(ups, outs, strict=True)]  # rounded the first time
        found.append([*outs, *torch.autograd.grad(outs, given, ups)])
    for number, (actual, plain, exact) in enumerate(zip(*found, strict=True)):
        what = f"result {number} of {len(found[0])}"
        if actual.dtype != plain.dtype:
            raise AssertionError(f"{what} is {actual.dtype}, not {plain.dtype}")
        check(actual, plain, exact, what)


class Head(NamedTuple):
    """Inputs of a loss on an output layer; all but the targets require grad."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    bias: Tensor


def random_head(
    dtype: torch.dtype = torch.float32,
    rows: int = 23,
    classes: int = 211,
    width: int = 37,
    masked: float = 0.3,
) -> Head:
    """hidden [rows, width], weight [classes, width], targets [rows] and bias [classes], random.

    Args:
        dtype: of all but the targets.
        rows, classes, width: sizes; odd primes unless given.
        masked: share of targets that are -100.
    """
    targets = torch.randint(0, classes, (rows,))
    targets[torch.rand(rows) < masked] = -100
    return Head(
        torch.randn(rows, width).to(dtype).requires_grad_(),
        torch.randn(classes, width).mul(width**-0.5).to(dtype).requires_grad_(),
        targets,
        torch.randn(classes).to(dtype).requires_grad_(),
    )


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that any operation returns while active.

    Attributes:
        elements: number of elements of that tensor.
    """

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result
