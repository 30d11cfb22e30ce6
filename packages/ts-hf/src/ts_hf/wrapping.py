"""wrap_hf: ts_core.wrap with the decoder layers of a transformers model as its blocks."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

import torch
from torch import nn

from ts_hf.families import find_decoder_layers

ModelT = TypeVar("ModelT", bound=nn.Module)


def wrap_hf(
    model: ModelT, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> tuple[ModelT, Any]:
    """Make a transformers model, in a PEFT wrapper or not, and its optimizer stream.

    Args:
        model: a causal language model, adapters already added.
        optimizer: as for `ts_core.wrap`.
        **options: as for `ts_core.wrap`; `blocks` defaults to the model's decoder layers.

    Returns:
        The same model, and the OffloadAdamW to train with.

    Raises:
        What `ts_core.wrap` raises.
    """
    from ts_core import wrap

    if options.get("blocks") is None:
        blocks = find_decoder_layers(model)
        if blocks:
            options["blocks"] = blocks
    wrapped = wrap(model, optimizer, **options)
    _make_no_cache_in_training(model)
    return wrapped


def _make_no_cache_in_training(model: nn.Module) -> None:
    """Training forwards of a wrapped model make no key/value cache unless asked to.

    A cache would keep every layer's keys and values on the device, and layers that fill one cannot
    be computed again in backward.
    """
    unpack: Any = getattr(model, "get_base_model", None)  # PEFT
    base = model if unpack is None else unpack()
    takes_it = "use_cache" in inspect.signature(base.forward).parameters
    if takes_it and _no_cache not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_no_cache, with_kwargs=True)


def _no_cache(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    wrapped = hasattr(model, "_trainstream_session")
    if not (wrapped and model.training and torch.is_grad_enabled()):
        return None
    if kwargs.get("use_cache") is not None or kwargs.get("past_key_values") is not None:
        return None
    return args, {**kwargs, "use_cache": False}
