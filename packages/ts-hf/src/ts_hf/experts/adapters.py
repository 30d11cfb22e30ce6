"""PEFT's adapters of stacked parameters (`target_parameters`), added to picked experts only.

PEFT adds scale * B A to the whole stack before each forward, which needs the whole stack on the
device. Here the low-rank factors go to whoever has the picked experts, and PEFT's own wrappers pass
their calls on.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ts_core.engine.experts_layer import StackAdapter


def adapters_around(model: nn.Module) -> dict[int, list[Any]]:
    """PEFT's wrappers around each module with adapted parameters, by its `id`, outermost first."""
    found: dict[int, list[Any]] = {}
    for wrapper in model.modules():
        if hasattr(wrapper, "parameter_name") and hasattr(wrapper, "base_layer"):
            inner: Any = wrapper
            while hasattr(inner, "base_layer"):
                inner = inner.base_layer
            found.setdefault(id(inner), []).append(wrapper)
    return found


def why_not(wrappers: list[Any]) -> str:
    """Why these adapters cannot be added to picked experts, or ""."""
    for wrapper in wrappers:
        if not hasattr(wrapper, "get_delta_factors"):
            return (
                f"an adapter of type {type(wrapper).__name__} on its {wrapper.parameter_name!r} "
                f"does not show its low-rank factors. Use LoRA of a current PEFT, or adapt other "
                f"modules (target_modules)."
            )
    return ""


def active_adapters(wrappers: list[Any]) -> dict[str, list[StackAdapter]]:
    """What PEFT would add now, by the name of the stacked parameter."""
    found: dict[str, list[StackAdapter]] = {}
    for wrapper in wrappers:
        if wrapper.disable_adapters or wrapper.merged:
            continue
        for name in wrapper.active_adapters:
            if name in wrapper.lora_A:
                left, right, scale = wrapper.get_delta_factors(name)
                found.setdefault(wrapper.parameter_name, []).append(
                    StackAdapter(left, right, scale)
                )
    return found


def pass_on(wrapper: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """The forward of a wrapper whose adapters are added elsewhere.

    Raises:
        ValueError: what PEFT does not support either (adapters by sample).
    """
    wrapper._check_forward_args(x, *args, **kwargs)
    if kwargs.pop("adapter_names", None) is not None:
        raise ValueError(f"{type(wrapper).__name__} does not support mixed batch inference")
    if wrapper.disable_adapters and wrapper.merged:
        wrapper.unmerge()
    return wrapper.base_layer(x, *args, **kwargs)
