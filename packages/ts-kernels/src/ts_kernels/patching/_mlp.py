"""Gated MLP modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ts_kernels import reference
from ts_kernels._gated_mlp import ACTIVATIONS, gated_mlp
from ts_kernels._heads import is_plain
from ts_kernels.patching._check import (
    FORMULA_TOLERANCE,
    ROUNDINGS,
    Differs,
    Pick,
    check_values,
    first_that_agrees,
    own_code,
    random,
    stand_in,
    unit,
)
from ts_kernels.patching._handle import Replacement

_NAMES = [
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("gate_up_proj", None, "down_proj"),
]


class MLPReplacement(Replacement):
    kind = "gated MLP"

    def __init__(self, module: nn.Module, gate: str, up: str | None, down: str, act: str) -> None:
        super().__init__(module)
        self.gate, self.up, self.down, self.activation = gate, up, down, act

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not (self.active and is_plain(args[0])):
            return self.own(*args, **kwargs)
        return self.run(self.module, args[0])

    def run(
        self,
        module: nn.Module,
        x: Tensor,
        middle: Callable[[Tensor, Tensor, str], Tensor] = gated_mlp,
    ) -> Any:
        """The MLP with these projections, whatever they are now (adapters included)."""
        gate = getattr(module, self.gate)(x)
        if self.up is None:
            gate, up = gate.chunk(2, dim=-1)
        else:
            up = getattr(module, self.up)(x)
        return getattr(module, self.down)(middle(gate, up, self.activation))


def mlp_names(module: nn.Module) -> tuple[str, str | None, str] | None:
    """Names of (gate, up, down); up is None where gate and up are one layer. None: no such MLP."""
    for names in _NAMES:
        wanted = {name for name in names if name is not None}
        if wanted <= set(module._modules):
            rest = [child for n, child in module._modules.items() if n not in wanted]
            plain = all(child is None or not list(child.parameters()) for child in rest)
            if plain and not module._parameters and not module._buffers:
                return names
    return None


def replace_mlp(
    module: nn.Module, names: tuple[str, str | None, str], dtype: torch.dtype, device: torch.device
) -> MLPReplacement:
    """The replacement, having compared it with the module's own code on `device`.

    The projections are replaced by stand-ins of the same sizes for that.

    Raises:
        Differs: it computes something else.
    """
    parts: dict[str, Any] = {
        name: child for name, child in module._modules.items() if name not in names
    }
    for seed, name in enumerate(names):
        if name is not None:
            parts[name] = _pick_like(getattr(module, name), device, seed)
    double = stand_in(module, **parts)
    width = getattr(double, names[0]).in_features
    x = 2 * random(1, 4, width, dtype=torch.float32, device=device)

    def same(activation: str) -> None:
        replacement = MLPReplacement(module, *names, activation)
        expected = replacement.run(double, x, reference.gated_mlp)
        floor = 1e-2 * expected.abs().mean()
        theirs = own_code(double, x)
        check_values(expected, theirs, expected.abs() + floor, FORMULA_TOLERANCE)
        if dtype != torch.float32:
            ours, theirs = replacement.run(double, x.to(dtype)), own_code(double, x.to(dtype))
            check_values(ours, theirs, ours.abs() + floor, ROUNDINGS * unit(dtype))

    return MLPReplacement(module, *names, first_that_agrees(list(ACTIVATIONS), same))


def _pick_like(projection: Any, device: torch.device, seed: int) -> Pick:
    inputs = getattr(projection, "in_features", None)
    outputs = getattr(projection, "out_features", None)
    if not isinstance(inputs, int) or not isinstance(outputs, int):
        raise Differs(f"a {type(projection).__name__} does not tell its in_features, out_features")
    return Pick(inputs, outputs, device, seed)
