"""Attention modules that rotate queries and keys with a function of their module's namespace."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ts_kernels import reference
from ts_kernels._heads import is_plain
from ts_kernels._rotary import rotary
from ts_kernels.patching._check import (
    FORMULA_TOLERANCE,
    ROUNDINGS,
    Differs,
    check_values,
    failed,
    first_that_agrees,
    random,
    unit,
)
from ts_kernels.patching._handle import Replacement


class Layout(NamedTuple):
    """`half_table`: only the first half of the tables is used, each value for two neighbours."""

    interleaved: bool
    half_table: bool


_LAYOUTS = [Layout(False, False), Layout(True, False), Layout(True, True)]


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    cos: Tensor
    sin: Tensor


class FusedRotary:
    """Called in place of an `apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)`.

    Args:
        own: that function, which is called for anything the kernel was not compared for.
        layout: what it does.
        partial: whether tables may be narrower than the heads.
        returns_input_dtype: whether its results have q's dtype, whatever that of the tables.
    """

    def __init__(
        self,
        own: Callable[..., Any],
        layout: Layout,
        partial: bool = False,
        returns_input_dtype: bool = False,
    ) -> None:
        self.own, self.layout = own, layout
        self.partial, self.returns_input_dtype = partial, returns_input_dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        heads_dim = kwargs.get("unsqueeze_dim", 1)
        if len(args) == 4 and not set(kwargs) - {"unsqueeze_dim"} and heads_dim in (1, 2):
            q, k, cos, sin = args
            if self._takes(q, k, cos, sin, heads_dim):
                return self.run(rotary, q, k, cos, sin, heads_dim)
        return self.own(*args, **kwargs)

    def run(
        self,
        function: Callable[..., Any],
        q: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        heads_dim: int = 1,
    ) -> Any:
        if self.layout.half_table:
            half = cos.shape[-1] // 2
            cos, sin = (t[..., :half].repeat_interleave(2, dim=-1) for t in (cos, sin))
        return function(q, k, cos, sin, interleaved=self.layout.interleaved, heads_dim=heads_dim)

    def _takes(self, q: Any, k: Any, cos: Any, sin: Any, heads_dim: int) -> bool:
        if not all(isinstance(t, Tensor) and is_plain(t) for t in (q, k, cos, sin)):
            return False
        tokens = 3 - heads_dim
        return bool(
            q.dim() == k.dim() == 4
            and cos.dim() == 3
            and cos.shape == sin.shape
            and cos.shape[0] in (1, q.shape[0])
            and cos.shape[1] == q.shape[tokens] == k.shape[tokens]
            and (q.shape[0], q.shape[-1]) == (k.shape[0], k.shape[-1])
            and q.is_floating_point()
            and q.dtype == k.dtype
            and cos.dtype == sin.dtype
            and cos.is_floating_point()
            and (self.returns_input_dtype or cos.dtype == q.dtype)
            and (cos.shape[-1] == q.shape[-1] or (self.partial and cos.shape[-1] < q.shape[-1]))
            and cos.shape[-1] % 2 == 0
            and not (cos.requires_grad or sin.requires_grad)
        )


class RotaryReplacement(Replacement):
    """The attention's own forward over a copy of its namespace in which one function differs."""

    kind = "rotary"

    def __init__(self, module: nn.Module, name: str, fused: FusedRotary) -> None:
        super().__init__(module)
        self.name, self.fused = name, fused
        self._forward = _with_global(type(module).forward, name, fused)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.active:
            return self.own(*args, **kwargs)
        return self._forward(self.module, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k != "_forward"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forward = _with_global(type(self.module).forward, self.name, self.fused)


def rotary_name(module: nn.Module) -> str | None:
    """The global of the module's forward that rotates q and k, if it calls one."""
    forward = type(module).forward
    if not isinstance(forward, FunctionType):
        return None
    for name in forward.__code__.co_names:
        if "rotary" in name and _takes_q_k_cos_sin(forward.__globals__.get(name)):
            return name
    return None


def replace_rotary(
    module: nn.Module, name: str, dtype: torch.dtype, device: torch.device
) -> RotaryReplacement:
    """The replacement, having compared it with the module's own function on `device`.

    Raises:
        Differs: it rotates in no known layout, or its forward cannot be given another function.
    """
    forward: Any = type(module).forward
    if hasattr(forward, "__wrapped__"):
        raise Differs("its forward is decorated")
    own = forward.__globals__[name]
    size = _head_size(module)
    inputs = _inputs(size, size, device)

    def same(layout: Layout) -> None:
        _check(FusedRotary(own, layout), own, inputs, dtype)

    layout = first_that_agrees(_LAYOUTS, same)
    partial = False
    if size >= 4:
        narrow = _inputs(size, size // 4 * 2, device)
        try:
            _check(FusedRotary(own, layout, partial=True), own, narrow, dtype)
            partial = True
        except Differs:
            pass  # then the kernel never gets such tables
    low = torch.bfloat16
    mixed = _call(own, inputs.q.to(low), inputs.k.to(low), inputs.cos, inputs.sin)
    fused = FusedRotary(own, layout, partial, mixed[0].dtype == low)
    return RotaryReplacement(module, name, fused)


def _check(
    fused: FusedRotary,
    own: Callable[..., Any],
    inputs: Inputs,
    dtype: torch.dtype,
) -> None:
    q, k, cos, sin = inputs
    expected = fused.run(reference.rotary, q, k, cos, sin)
    scales = [x.abs() + x.abs().amax(-1, keepdim=True) for x in (q, k)]
    for a, b, scale in zip(expected, _call(own, q, k, cos, sin), scales, strict=True):
        check_values(a, b, scale, FORMULA_TOLERANCE)
    given = Inputs(*(x.to(dtype) for x in inputs))
    ours = fused.run(rotary, given.q, given.k, given.cos, given.sin)
    for a, b, scale in zip(ours, _call(own, *given), scales, strict=True):
        check_values(a, b, scale, ROUNDINGS * unit(dtype))


def _call(own: Callable[..., Any], *args: Tensor) -> Any:
    try:
        results = own(*args)
    except Exception as error:  # whatever another library's code raises; it is reported
        raise failed(error) from error
    if not isinstance(results, tuple) or len(results) != 2:
        raise Differs("its rotary function does not return (q, k)")
    return results


def _inputs(size: int, rotary_size: int, device: torch.device) -> Inputs:
    kw: dict[str, Any] = {"dtype": torch.float32, "device": device}
    q, k = random(2, 3, 5, size, **kw), random(2, 1, 5, size, **kw, seed=1)
    # not the same value for both of a pair: the formula must hold for any table
    cos, sin = (random(2, 5, rotary_size, **kw, seed=seed) for seed in (2, 3))
    return Inputs(q, k, cos, sin)


def _head_size(module: nn.Module) -> int:
    for name in ("head_dim", "head_size"):
        size = getattr(module, name, None)
        if isinstance(size, int) and size > 0 and size % 2 == 0:
            return size
    return 64


def _takes_q_k_cos_sin(function: Any) -> bool:
    if not callable(function):
        return False
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False
    return names[:4] == ["q", "k", "cos", "sin"]


def _with_global(function: Any, name: str, value: Any) -> Any:
    """The function over a copy of its namespace in which one name means something else.

    The copy has no `__name__`: by that torch.compile would find the original namespace.
    """
    namespace = {**function.__globals__, name: value}
    namespace.pop("__name__", None)
    copy = FunctionType(
        function.__code__,
        namespace,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__module__ = function.__module__
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
