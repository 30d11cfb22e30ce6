"""What stored weights look like from outside: decoded in state dicts, and starts for adapters."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from ts_core.config import WrapOptions
from ts_core.errors import OptionError
from ts_core.registry import codecs
from ts_core.store.leaves import is_wrapper


def init_lora_from_error(model: nn.Module, *, overwrite: bool = True) -> int:
    """Let LoRA adapters start at what quantization lost, scaled for their alpha and rank.

    Call it after adding adapters to a model quantized with `error_rank`. `wrap()` does it for
    adapters that are still as PEFT made them.

    Args:
        model: a PEFT model; the adapters of layers that hold factors are changed in place.
        overwrite: whether adapters whose B is no longer zero are started anew.

    Returns:
        How many layers were started; 0 when the model holds no factors.

    Raises:
        OptionError: an adapter that cannot start there (DoRA; several active at once).
    """
    for module in model.modules():
        start = getattr(module, "error_start", None)
        if start is not None:
            try:
                return int(start.init_lora(model, overwrite=overwrite))
            except ValueError as error:
                raise OptionError(str(error)) from error
    return 0


def serve_decoded(module: nn.Module) -> None:
    """Let `state_dict()` hold the ordinary tensor that `module`'s stored weight stands for.

    Without it a state dict would hold tensors of the codec's class, which other code cannot save.
    Called again, it does nothing.
    """
    if not any(hook is _decode_weight for hook in module._state_dict_hooks.values()):
        module._register_state_dict_hook(_decode_weight)


def _decode_weight(
    module: nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    for name, parameter in module._parameters.items():
        key = prefix + name
        if parameter is not None and is_wrapper(parameter) and key in state:
            decode = getattr(parameter, "dequantize", None)
            if decode is not None:
                state[key] = decode()


def holds_stored(blocks: Iterable[nn.Module]) -> bool:
    """Whether some frozen weight of the blocks is stored by a codec."""
    return bool(stored_codecs(blocks))


def stored_codecs(blocks: Iterable[nn.Module]) -> dict[str, int]:
    """How many weights of the blocks are stored in which codec, as the weights themselves say."""
    stored = {id(p): p for block in blocks for p in block.parameters() if is_wrapper(p)}
    found = Counter(name for p in stored.values() for name in _codecs_of([p]))
    return dict(sorted(found.items()))


def log_stored(
    before: dict[str, int], codec: str | None, count: int, log: Callable[[str], None]
) -> None:
    """Say what `quantize_model` stored, and what it left as it was.

    Args:
        before: `stored_codecs` before it.
        codec: that it was called with; None when it was not.
        count: weights that it stored.
        log: where to say it.
    """
    if before:
        there = f"{sum(before.values())} weights of the blocks are stored as {'+'.join(before)}"
        if codec is None:
            log(f"quantize: {there}")
        else:
            log(f"quantize: {there} already and stay so ({count} others stored as {codec})")
    elif codec is not None:
        log(f"quantize: {count} weights stored as {codec}")


def serve_stored(model: nn.Module) -> None:
    """`serve_decoded` for every module that holds a stored weight."""
    for module in model.modules():
        if any(p is not None and is_wrapper(p) for p in module._parameters.values()):
            serve_decoded(module)


def start_adapters(model: nn.Module, log: Callable[[str], None]) -> None:
    """Start the adapters that are as PEFT made them at what quantization lost, and say so."""
    count = init_lora_from_error(model, overwrite=False)
    if count:
        log(f"error_rank: {count} adapters start at what quantization lost")
    unused = [
        name
        for name, module in model.named_modules()
        if getattr(getattr(module, "error_start", None), "rounds", 1) > 1
        and module.error_start.started is None
    ]
    if unused:
        text = (
            f"error_iters: {len(unused)} weights were stored for adapters to start at what "
            f"quantization lost, and their layers have none ({unused[0]}, for one): they are "
            f"further from the original than plain quantization. Add adapters to those layers, or "
            f"load with error_iters=1."
        )
        log(text)
        warnings.warn(text, UserWarning, stacklevel=4)


# What outliers="auto" and True stand for in every codec.
OUTLIER_SHARE = 0.01


def configure_products(model: nn.Module, config: WrapOptions, log: Callable[[str], None]) -> float:
    """Hand `outliers` and `nvfp4_backward` to the codecs of the stored weights.

    Returns:
        The share of input channels that stored weights were told to treat as outliers; 0.0 where
        none was.
    """
    wanted = {"outliers": config.outliers, "nvfp4_backward": config.nvfp4_backward}
    if not any(wanted.values()):
        return 0.0
    told = ", ".join(f"{name}={value!r}" for name, value in wanted.items() if value)
    configure = _offered(model, "configure_matmul")
    if configure is None:
        log(f"{told}: nothing to do, no stored weight has such products")
        return 0.0
    try:
        count = configure(model, **wanted)
    except ValueError as error:
        raise OptionError(str(error)) from error
    log(f"{told}: given to {count} stored weights; formats without such products ignore it")
    if config.outliers is True or config.outliers == "auto":
        return OUTLIER_SHARE
    return float(config.outliers or 0.0)


def log_products(model: nn.Module, device: torch.device, log: Callable[[str], None]) -> None:
    """Say how many stored weights are multiplied in their own format, where a codec can tell."""
    summarize = _offered(model, "tensor_core_summary")
    said = None if summarize is None else summarize(model, device)
    if said is not None:
        log(said)


def _offered(model: nn.Module, name: str) -> Callable[..., Any] | None:
    """What the codecs of the stored weights have by that name: of the first that has it."""
    stored = [p for p in model.parameters() if is_wrapper(p)]
    offered = (getattr(codecs.get(codec), name, None) for codec in _codecs_of(stored))
    return next((offer for offer in offered if offer is not None), None)


def _codecs_of(stored: list[nn.Parameter]) -> list[str]:
    """Names of the installed codecs that the weights are stored in."""
    names = {getattr(parameter, "codec", None) for parameter in stored}
    return sorted(name for name in names if isinstance(name, str) and codecs.has(name))
