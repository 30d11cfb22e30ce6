"""Comparing a kernel with a module's own code, on random input and stand-ins for its weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

FORMULA_TOLERANCE = 2e-5
"""Of float32 results, relative to their scale: tells formulas apart, not roundings."""
ROUNDINGS = 4
"""Units in the last place by which results of one formula may differ."""


class Differs(Exception):
    """The module's own code and the kernel do not agree; the message says how."""


def stand_in(module: nn.Module, **parts: Any) -> nn.Module:
    """A copy of the module's attributes without hooks, with these parameters and children.

    The module itself is not touched.
    """
    double = copy.copy(module)
    own = double.__dict__
    for name in [name for name in own if name.endswith("_hooks")]:
        own[name] = type(own[name])()
    own["_parameters"] = {k: v for k, v in parts.items() if isinstance(v, nn.Parameter)}
    own["_modules"] = {k: v for k, v in parts.items() if isinstance(v, nn.Module)}
    return double


def own_code(module: nn.Module, *args: Any) -> Any:
    """The module's class's forward.

    Raises:
        Differs: it fails on this input.
    """
    try:
        return type(module).forward(module, *args)
    except Exception as error:  # whatever another library's code raises; it is reported
        raise failed(error) from error


def failed(error: Exception) -> Differs:
    """What to raise where another library's code raised this."""
    return Differs(f"its own code fails in the check ({type(error).__name__}: {error})")


def check_values(ours: Tensor, theirs: Any, scale: Tensor, tolerance: float) -> None:
    """Both within `tolerance` of each other, relative to `scale`.

    Raises:
        Differs: another type, shape or dtype, or other values.
    """
    if not isinstance(theirs, Tensor):
        raise Differs(f"its own code returns a {type(theirs).__name__}, not a tensor")
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        raise Differs(
            f"its own code returns {tuple(theirs.shape)} in {theirs.dtype}, the kernel "
            f"{tuple(ours.shape)} in {ours.dtype}"
        )
    wide = torch.promote_types(ours.dtype, torch.float32)
    difference = (ours.to(wide) - theirs.to(wide)).abs() / scale.to(wide).clamp(min=1e-30)
    largest = float(difference.max())
    if not largest <= tolerance:  # also refuses NaN
        raise Differs(f"its own code gives other values (relative difference {largest:.1e})")


def first_that_agrees(candidates: list[Any], check: Callable[[Any], None]) -> Any:
    """The first candidate whose check passes.

    Raises:
        Differs: none does; the message is that of the first.
    """
    first: Differs | None = None
    for candidate in candidates:
        try:
            check(candidate)
        except Differs as error:
            first = first or error
        else:
            return candidate
    raise first or Differs("no kernel has this form")


def unit(dtype: torch.dtype) -> float:
    """Distance between neighbouring values at 1."""
    return torch.finfo(dtype).eps


def random(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """Normal values of a generator of their own; the global one is left alone."""
    generator = torch.Generator().manual_seed(seed + 7919)
    return torch.randn(shape, generator=generator).to(device, dtype)


class Pick(nn.Module):
    """Stands in for a linear layer: picks and scales input channels, at no cost in memory."""

    def __init__(self, inputs: int, outputs: int, device: torch.device, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        index = torch.randint(0, inputs, (outputs,), generator=generator)
        self.index = index.to(device)
        self.scale = (torch.rand(outputs, generator=generator) + 0.5).to(device)
        self.in_features, self.out_features = inputs, outputs

    def forward(self, x: Tensor) -> Tensor:
        return x[..., self.index] * self.scale.to(x.dtype)


def likeness(module: nn.Module) -> tuple[Any, ...]:
    """Equal for modules of one class that differ in nothing but parameters' values.

    Attributes that are objects count as the same only if they are one object.
    """
    attributes = []
    for name, value in sorted(module.__dict__.items()):
        if name.startswith("_") or name in ("training", "forward", "layer_idx"):
            continue
        simple = value is None or isinstance(value, (bool, int, float, str, torch.dtype))
        attributes.append((name, value if simple else id(value)))
    parameters = [
        (name, None if p is None else (type(p), tuple(p.shape), p.dtype))
        for name, p in module._parameters.items()
    ]
    children = [
        (name, None if child is None else likeness(child))
        for name, child in module._modules.items()
    ]
    return type(module), tuple(attributes), tuple(parameters), tuple(children)
