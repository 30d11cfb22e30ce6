"""LoRA layers as PEFT builds them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ts_kernels import reference
from ts_kernels._heads import is_plain
from ts_kernels._lora_linear import lora_linear
from ts_kernels.patching._check import Differs, check_values, own_code, random, stand_in
from ts_kernels.patching._handle import PatchHandle, Replacement, has_other_forward


class LoraReplacement(Replacement):
    """Runs `lora_linear` while the layer is a plain LoRA with one active adapter, else its own."""

    kind = "LoRA linear"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer: Any = self.module
        if len(args) == 1 and not kwargs and self.active:
            parts = _fusable(layer, args[0])
            if parts is not None:
                down, up, scaling = parts
                base = layer.base_layer
                return lora_linear(args[0], base.weight, down, up, scaling, base.bias)
        return self.own(*args, **kwargs)


def _fusable(layer: Any, x: Any) -> tuple[Tensor, Tensor, float] | None:
    """(A, B, scaling) if the layer now computes what `lora_linear` does, else None.

    Runs at every call: children are looked up in `_modules`, where that is quicker.
    """
    if layer.disable_adapters or layer.merged:
        return None
    children = layer._modules
    downs = children["lora_A"]._modules
    active = [name for name in layer.active_adapters if name in downs]
    if len(active) != 1 or not isinstance(x, Tensor) or not is_plain(x):
        return None
    name = active[0]
    down, up, base = downs[name], children["lora_B"]._modules[name], children["base_layer"]
    if not (_is_linear(down) and _is_linear(up) and _is_linear(base)):
        return None
    if _has_extras(layer, name):
        return None
    parameters, other = down._parameters, up._parameters
    a, b = parameters["weight"], other["weight"]
    if parameters["bias"] is not None or other["bias"] is not None:
        return None
    if a is None or b is None or not (is_plain(a) and is_plain(b)):
        return None
    dtype = x.dtype
    if a.dtype != b.dtype or not dtype.is_floating_point or not x.device == a.device == b.device:
        return None
    if not torch.is_autocast_enabled(x.device.type):
        weight = base._parameters["weight"]
        if weight is None or (is_plain(weight) and weight.dtype != dtype):
            return None  # let torch say so
        if a.dtype != dtype and not getattr(layer, "cast_input_dtype_enabled", True):
            return None
    scaling = layer.scaling[name]
    return (a, b, scaling) if isinstance(scaling, (int, float)) else None


def _has_extras(layer: Any, name: str) -> bool:
    """Whether this adapter drops out values now, or is a variant of LoRA."""
    dropouts = layer._modules.get("lora_dropout")
    dropout = None if dropouts is None else dropouts._modules.get(name)
    if dropout is not None and type(dropout) is not nn.Identity:
        if type(dropout) is not nn.Dropout or (dropout.p > 0 and dropout.training):
            return True
    state = layer.__dict__
    return name in state.get("lora_variant", ()) or bool(state.get("use_dora", {}).get(name))


def _is_linear(module: Any) -> bool:
    """An `nn.Linear` that runs its own forward with nothing hooked onto it."""
    state = module.__dict__
    return (
        type(module).forward is nn.Linear.forward
        and "forward" not in state
        and not (
            state["_forward_hooks"]
            or state["_forward_pre_hooks"]
            or state["_backward_hooks"]
            or state["_backward_pre_hooks"]
        )
    )


def patch_lora(model: nn.Module, *, on_event: Callable[[str], None] | None = None) -> PatchHandle:
    """Lets PEFT's LoRA linear layers run as `lora_linear`.

    Every call looks at the layer's state: one active adapter, not disabled, not merged, no dropout
    (or evaluation), no DoRA or other variant, no adapter bias, an `nn.Linear` underneath with any
    weight. Where that does not hold the layer's own forward runs, so that switching, disabling,
    merging and unmerging adapters, mixed batches and hooks behave as ever. Each class of layers is
    compared with `lora_linear` once, on small random matrices, before any of its layers is
    touched.

    Args:
        model: any module that contains such layers.
        on_event: called with each event in plain words.

    Returns:
        A handle: `undo()` gives every layer its own code back, `replaced` counts them.
    """
    handle = PatchHandle()
    agreed: dict[type, str] = {}
    left: Counter[tuple[str, str]] = Counter()
    for layer in model.modules():
        if not _looks_like_lora(layer):
            continue
        kind = type(layer)
        if has_other_forward(layer):
            left[kind.__name__, "its forward has been replaced already"] += 1
            continue
        if kind not in agreed:
            agreed[kind] = _disagreement(layer)
        if agreed[kind]:
            left[kind.__name__, agreed[kind]] += 1
            continue
        handle.install(LoraReplacement(layer))
    if on_event is not None:
        if handle.replaced:
            on_event(f"fused LoRA: {handle.replaced[LoraReplacement.kind]} layers")
        for (name, reason), n in left.items():
            on_event(f"fused LoRA: {n} of {name} keep their own code: {reason}")
    return handle


def _looks_like_lora(module: Any) -> bool:
    return (
        all(isinstance(getattr(module, n, None), nn.ModuleDict) for n in ("lora_A", "lora_B"))
        and isinstance(getattr(module, "base_layer", None), nn.Linear)
        and isinstance(getattr(module, "scaling", None), dict)
        and all(hasattr(module, n) for n in ("active_adapters", "disable_adapters", "merged"))
    )


def _disagreement(layer: Any) -> str:
    """Why this class of layers cannot be replaced; empty if a small one of it agrees."""
    name = next((n for n in layer.active_adapters if n in layer.lora_A), None)
    if name is None:
        name = next(iter(layer.lora_A), None)
    if name is None:
        return "it has no adapter"
    cpu = torch.device("cpu")
    sizes = {"base": (6, 10), "a": (3, 10), "b": (6, 3)}
    made = {}
    for seed, (part, (outputs, inputs)) in enumerate(sizes.items()):
        linear = nn.Linear(inputs, outputs, bias=part == "base", device="meta")  # draws nothing
        for parameter_name, parameter in list(linear.named_parameters()):
            values = random(*parameter.shape, dtype=torch.float32, device=cpu, seed=seed)
            setattr(linear, parameter_name, nn.Parameter(values, requires_grad=False))
        made[part] = linear
    double: Any = stand_in(
        layer,
        base_layer=made["base"],
        lora_A=nn.ModuleDict({name: made["a"]}),
        lora_B=nn.ModuleDict({name: made["b"]}),
        lora_dropout=nn.ModuleDict({name: nn.Identity()}),
    )
    state = {"scaling": {name: 0.5}, "_active_adapter": [name], "_disable_adapters": False}
    state |= {"merged_adapters": [], "lora_variant": {}, "use_dora": {}}
    double.__dict__.update({k: v for k, v in state.items() if k in double.__dict__})
    x = random(2, 5, 10, dtype=torch.float32, device=cpu, seed=9)
    args = (made["base"].weight, made["a"].weight, made["b"].weight, 0.5, made["base"].bias)
    try:
        with torch.no_grad():
            expected = reference.lora_linear(x, *args)
            check_values(lora_linear(x, *args), own_code(double, x), expected.abs() + 1, 1e-5)
    except Differs as error:
        return str(error)
    return ""
