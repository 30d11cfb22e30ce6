"""The model without its weights: parameters on the meta device, buffers already right."""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ts_core.errors import DataError, OptionError

# Options of from_config that are no fields of a config.
_CONSTRUCTION_OPTIONS = ("attn_implementation", "experts_implementation")

# What constructors raise at architectures that are no causal language model, and at numbers that
# make no model (RuntimeError and TypeError: of torch, at sizes below zero and None).
BUILD_ERRORS = (ValueError, KeyError, OSError, RuntimeError, TypeError, ZeroDivisionError)


def load_config(
    source: str | Path | Any, *, trust_remote_code: bool, overrides: dict[str, Any]
) -> Any:
    """The config of a folder, or a copy of the config given, with overrides applied.

    Raises:
        DataError: no readable config.json, or an architecture that transformers does not know.
        OptionError: an override names no field of this config.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, PretrainedConfig

    if isinstance(source, PretrainedConfig):
        config = copy.deepcopy(source)
    else:
        if not (Path(source) / "config.json").is_file():
            raise DataError(f"{source} has no config.json, so the architecture is unknown.")
        try:
            config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        except StrictDataclassError as error:
            told = " ".join(str(error).split())
            raise DataError(f"{source}/config.json has values that do not fit: {told}") from error
        except (ValueError, KeyError, TypeError, OSError, AttributeError) as error:
            raise DataError(_unknown_architecture(Path(source), error)) from error
    text = config.get_text_config(decoder=True)  # its own, or that of a vision-language model
    for name, value in overrides.items():
        if name in _CONSTRUCTION_OPTIONS:
            continue
        if not hasattr(config, name) and hasattr(text, name):
            setattr(text, name, value)
            continue
        if not hasattr(config, name):
            fields = [*config.to_dict(), *text.to_dict(), *_CONSTRUCTION_OPTIONS]
            near = difflib.get_close_matches(name, fields, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise OptionError(
                f"{name!r} is neither an option of load_model nor a field of "
                f"{type(config).__name__}.{hint}"
            )
        setattr(config, name, value)
    return config


def take_quantization_config(config: Any) -> Any:
    """Remove and return the config's `quantization_config`; None when there is none.

    The weights are this package's to read, so transformers is not to see it.
    """
    stored = getattr(config, "quantization_config", None)
    if stored is not None:
        del config.quantization_config
    return stored


def build_skeleton(
    config: Any, dtype: torch.dtype, *, trust_remote_code: bool, options: dict[str, Any]
) -> nn.Module:
    """The model of a config with parameters on meta and buffers computed, on the CPU.

    Args:
        config: a transformers config.
        dtype: dtype of the parameters, but for those the architecture keeps in another.
        trust_remote_code: whether code that the checkpoint ships may run.
        options: `attn_implementation` / `experts_implementation`; other entries are ignored.

    Raises:
        DataError: the architecture has no causal language model.
    """
    build = partial(
        auto_class(config).from_config,
        config,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        **{name: options[name] for name in _CONSTRUCTION_OPTIONS if name in options},
    )
    try:
        with torch.device("meta"):
            model: nn.Module = build()
    except BUILD_ERRORS as error:
        raise DataError(cannot_build(config, error)) from error
    left = [name for module in model.modules() for name in _compute_buffers(model, module)]
    if left:
        _take_buffers_from_construction(model, build)
    _apply_fp32_rules(model, dtype)
    return model


def auto_class(config: Any) -> Any:
    """The auto class of transformers that makes the model of a config.

    AutoModelForImageTextToText where the config names such a model in `architectures`, or where
    its type has no causal language model alone; else AutoModelForCausalLM.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kinds = (AutoModelForCausalLM, AutoModelForImageTextToText)
    fitting = [kind for kind in kinds if type(config) in kind._model_mapping]
    named = set(getattr(config, "architectures", None) or ())
    for kind in fitting:
        made = kind._model_mapping[type(config)]
        if named & {cls.__name__ for cls in (made if isinstance(made, tuple) else (made,))}:
            return kind
    own_code = getattr(config, "auto_map", None) or {}
    return next(
        (kind for kind in kinds if kind.__name__ in own_code),
        fitting[0] if fitting else AutoModelForCausalLM,
    )


def cannot_build(config: Any, error: Exception) -> str:
    """What to tell when no model can be made of a config: its first line is enough."""
    first = (str(error).splitlines() or [""])[0]
    return (
        f"no causal language model can be made for architecture "
        f"{getattr(config, 'model_type', '?')!r}: {type(error).__name__}: {first}"
    )


def owner_of(model: nn.Module, module: nn.Module) -> Any:
    """The innermost PreTrainedModel that contains `module`; its `_init_weights` knows it."""
    from transformers import PreTrainedModel

    owner: Any = model
    for candidate in model.modules():  # outer ones come before the ones inside them
        if isinstance(candidate, PreTrainedModel) and any(m is module for m in candidate.modules()):
            owner = candidate
    return owner


def _compute_buffers(model: nn.Module, module: nn.Module) -> list[str]:
    """Compute `module`'s own meta buffers by the model's init rule; names it does not compute.

    The rule is trusted only for what it writes: run over two different fills it must leave the
    same values.
    """
    names = [name for name, buffer in module._buffers.items() if buffer is not None]
    names = [name for name in names if module._buffers[name].is_meta]  # type: ignore[union-attr]
    if not names:
        return []
    owner = owner_of(model, module)
    results: list[dict[str, Tensor]] = []
    for fill in (0, 1):
        for name in names:
            meta: Tensor = module._buffers[name]  # type: ignore[assignment]
            module._buffers[name] = torch.full_like(meta, fill, device="cpu")
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            owner._init_weights(module)
        results.append(
            {name: buffer.clone() for name, buffer in module.named_buffers(recurse=False)}
        )
    return [
        name
        for name in names
        if not torch.equal(results[0][name], results[1][name])
        and name in module._non_persistent_buffers_set
    ]


def _take_buffers_from_construction(model: nn.Module, build: Callable[[], nn.Module]) -> None:
    """For code that computes buffers in __init__ only: build once more with real buffers."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        real = build()
    for name, buffer in real.named_buffers():
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path)._buffers[leaf] = buffer


def _apply_fp32_rules(model: nn.Module, dtype: torch.dtype) -> None:
    """Give fp32 to the parameters that the architecture keeps in fp32 (routers, for example)."""
    patterns = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        patterns |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if dtype not in (torch.float16, torch.bfloat16) or not patterns:
        return
    rule = re.compile("|".join(pattern.replace("*", ".*") for pattern in sorted(patterns)))
    for name, parameter in list(model.named_parameters()):
        if rule.search(name) and parameter.is_floating_point():
            path, _, leaf = name.rpartition(".")
            made = nn.Parameter(torch.empty_like(parameter, dtype=torch.float32))
            model.get_submodule(path)._parameters[leaf] = made


def _unknown_architecture(folder: Path, error: Exception) -> str:
    import transformers

    file = folder / "config.json"
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as broken:
        return f"{file} is not valid JSON: {broken}. Fetch it again."
    if not isinstance(fields, dict):
        return (
            f"{file} holds {type(fields).__name__} where the fields of a config (a JSON object) "
            f"are expected. Fetch it again."
        )
    model_type = fields.get("model_type")
    if not isinstance(model_type, str):
        return (
            f"{file} has {model_type!r} as its model_type, which must name an architecture, as "
            f'"llama". Is it the config of a model?'
        )
    return (
        f"{file}: transformers {transformers.__version__} cannot make a config of architecture "
        f"{model_type!r} ({type(error).__name__}: {str(error).splitlines()[0]}). Use a newer "
        f"transformers, or trust_remote_code=True if the checkpoint ships its own code that you "
        f"trust."
    )
