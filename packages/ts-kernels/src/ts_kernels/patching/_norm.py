"""RMSNorm modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ts_kernels import reference
from ts_kernels._heads import is_plain, settled
from ts_kernels._rms_norm import rms_norm
from ts_kernels.patching._check import (
    FORMULA_TOLERANCE,
    ROUNDINGS,
    Differs,
    check_values,
    first_that_agrees,
    own_code,
    random,
    stand_in,
    unit,
)
from ts_kernels.patching._handle import Replacement

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon")
_FORMS = [(0.0, True), (1.0, False), (0.0, False), (1.0, True)]


class NormReplacement(Replacement):
    kind = "RMSNorm"

    def __init__(self, module: nn.Module, eps_name: str, offset: float, round_first: bool) -> None:
        super().__init__(module)
        self.eps_name, self.offset, self.round_first = eps_name, offset, round_first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        weight: Any = self.module.weight
        if len(args) != 1 or kwargs or not (self.active and is_plain(args[0]) and is_plain(weight)):
            return self.own(*args, **kwargs)
        eps: float = getattr(self.module, self.eps_name)
        weight = settled(weight)
        return rms_norm(args[0], weight, eps, offset=self.offset, round_first=self.round_first)


def looks_like_norm(module: nn.Module) -> bool:
    """One vector of weights, an epsilon, nothing else."""
    weight = module._parameters.get("weight")
    return (
        list(module._parameters) == ["weight"]
        and weight is not None
        and weight.dim() == 1
        and not module._modules
        and not module._buffers
        and _eps_name(module) is not None
    )


def replace_norm(module: nn.Module, device: torch.device) -> NormReplacement:
    """The replacement, having compared it with the module's own code on `device`.

    Raises:
        Differs: no form of `rms_norm` agrees.
    """
    eps_name = _eps_name(module)
    weight: Any = module.weight
    if eps_name is None or not is_plain(weight):
        raise Differs("its weight is not an ordinary tensor")
    eps: float = getattr(module, eps_name)
    width: int = weight.shape[0]
    scales = torch.tensor([1.0, 30.0, 2e-3, 2e-4], device=device)[None, :, None]
    wide_x = random(1, 4, width, dtype=torch.float32, device=device) * scales
    wide_weight = random(width, dtype=torch.float32, device=device, seed=1)
    fp32 = stand_in(module, weight=nn.Parameter(wide_weight, requires_grad=False))

    def same_formula(form: tuple[float, bool]) -> None:
        expected = reference.rms_norm(wide_x, wide_weight, eps, offset=form[0])
        # relative to the normed x: in 1 + weight digits cancel
        scale = reference.rms_norm(wide_x, torch.ones_like(wide_weight), eps).abs()
        check_values(expected, own_code(fp32, wide_x), scale + expected.abs(), FORMULA_TOLERANCE)

    dtypes = [weight.dtype] if weight.dtype.itemsize == 2 else [weight.dtype, torch.bfloat16]
    stored = wide_weight.to(weight.dtype)
    double = stand_in(module, weight=nn.Parameter(stored, requires_grad=False))

    def same_rounding(form: tuple[float, bool], units: float) -> None:
        for dtype in dtypes:
            x = wide_x.to(dtype)
            offset, round_first = form
            ours = rms_norm(x, stored, eps, offset=offset, round_first=round_first)
            scale = ours.abs() + 1e-3 * ours.abs().amax(-1, keepdim=True)
            check_values(ours, own_code(double, x), scale, units * unit(dtype))

    def same(form: tuple[float, bool], units: float) -> None:
        same_formula(form)
        same_rounding(form, units)

    try:  # the form whose roundings are the module's own
        form = first_that_agrees(_FORMS, lambda form: same(form, 0.0))
    except Differs:  # one whose last bit may differ, as on CUDA for odd widths
        form = first_that_agrees(_FORMS, lambda form: same(form, ROUNDINGS))
    return NormReplacement(module, eps_name, *form)


def _eps_name(module: nn.Module) -> str | None:
    for name in _EPS_NAMES:
        value = getattr(module, name, None)
        if isinstance(value, float):
            return name
    return None
