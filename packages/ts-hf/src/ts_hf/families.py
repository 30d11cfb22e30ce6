"""Where each model family keeps its stack of decoder layers. The only place that knows.

A family is found by the shape of the module tree, not by its name, so new models that follow a
known layout need no entry. A package can add one of its own: entry point group
`trainstream.models`, name = the config's `model_type`, an object with `API_VERSION = 1` and
`find_blocks(model) -> list of modules`; with `find_experts(model)` it tells of stacked experts that
`ts_hf.experts` does not find.
"""

from __future__ import annotations

from typing import Any

from torch import nn

LAYER_PATHS = (
    "model.layers",  # Llama, Mistral, Mixtral, Qwen2/3, Gemma, Phi-3, OLMo, Granite, SmolLM, ...
    "model.language_model.layers",  # text part of vision-language models (transformers 5)
    "language_model.model.layers",
    "model.decoder.layers",  # OPT
    "transformer.h",  # GPT-2, GPT-J, Falcon, Bloom
    "gpt_neox.layers",  # GPT-NeoX, Pythia
    "transformer.blocks",  # MPT, DBRX
    "backbone.layers",  # Mamba
)

DECODER_PATHS = ("layers", "decoder.layers", "h", "blocks")  # of what a model names its decoder


def base_causal_lm(model: nn.Module) -> nn.Module:
    """The transformers model inside a PEFT wrapper, or `model` itself."""
    get_base = getattr(model, "get_base_model", None)
    return get_base() if callable(get_base) else model


def text_decoder(inner: Any) -> Any:
    """The module whose output is the last hidden state, or None.

    Of a vision-language model, the language model without its head.
    """
    if hasattr(inner, "get_decoder"):
        found = inner.get_decoder()
        if found is not None and found is not inner:
            return found
    found = getattr(inner, "base_model", None)
    return None if found is inner else found


def find_decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of `model`, in order of execution.

    Args:
        model: a transformers model, in a PEFT wrapper or not, on any device (meta too).

    Returns:
        The layers; by the installed family plug-in, else by the layouts known here, else those of
        what the model names its decoder, else the largest uniform stack (`ts_core.find_blocks`),
        which may be empty.
    """
    from ts_core.registry import models

    inner = base_causal_lm(model)
    model_type = getattr(getattr(inner, "config", None), "model_type", None)
    if model_type and models.has(model_type):
        return list(models.get(model_type).find_blocks(inner))
    decoder = text_decoder(inner)
    for start, paths in ((inner, LAYER_PATHS), (decoder, DECODER_PATHS)):
        for path in paths:
            found = _at(start, path)
            if isinstance(found, nn.ModuleList) and len(found) > 0:
                return list(found)
    from ts_core import find_blocks

    return list(find_blocks(inner))


def _at(model: nn.Module, path: str) -> Any:
    current: Any = model
    for name in path.split("."):
        current = getattr(current, name, None)
        if current is None:
            return None
    return current
