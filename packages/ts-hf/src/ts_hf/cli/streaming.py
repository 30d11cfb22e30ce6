"""The setting `options`: options of wrap() and load_model() as name=value."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ts_core.config import WrapOptions, parse_bytes
from ts_core.errors import OptionError

# Options that have a setting of their own, and its name.
_OWN = {
    "quantize": "quantize",
    "max_grad_norm": "max_grad_norm",
    "accumulation_steps": "accumulation",
    "device": "device",
    "lr": "lr",
}
_FOR_PYTHON = ("blocks", "distributed", "loader")  # no texts can give them
_SIZES = ("vram_limit", "host_arena", "peer")
_TRAINER = ("chunked_loss", "loss_chunk_size", "pad_to_multiple_of")


def as_texts(options: Mapping[Any, Any]) -> tuple[str, ...]:
    """A YAML mapping in the form of the flag: name=value, each value as YAML."""
    import yaml

    texts = []
    for name, value in options.items():
        dumped = yaml.safe_dump(value, default_flow_style=True, width=10_000).strip()
        texts.append(f"{name}={dumped.removesuffix('...').strip()}")
    return tuple(texts)


def parse_options(texts: tuple[str, ...]) -> dict[str, Any]:
    """The options, checked as wrap() checks them.

    Raises:
        OptionError: not name=value, an option that has a setting of its own or is not known, one
            given twice, or a value that is not accepted.
        NotAvailableError: a value that this version does not build.
    """
    import yaml

    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name:
            raise OptionError(f"options: {text!r} is not accepted; expected name=value.")
        if name in _OWN:
            raise OptionError(f"options: {name} is a setting of its own: {_OWN[name]!r}.")
        if name in _FOR_PYTHON:
            raise OptionError(f"options: {name} can only be given from Python.")
        if name in found:
            raise OptionError(f"options: {name} is given twice. Keep one of them.")
        try:
            found[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            words = yaml_words(error, name)
            raise OptionError(f"options: {text!r}: the value is not valid YAML: {words}") from error
        if name in _SIZES and type(found[name]) is int:
            parse_bytes(f"options: {name}", str(found[name]))
    try:
        WrapOptions.from_keywords({k: v for k, v in found.items() if k not in _TRAINER})
    except OptionError as error:
        raise type(error)(f"options: {error}") from error
    return found


def is_option(name: str) -> bool:
    """Whether `options` takes it."""
    taken = {item.name for item in fields(WrapOptions) if item.init}
    return name in taken.union(_TRAINER) - set(_OWN) - set(_FOR_PYTHON)


def yaml_words(error: Exception, name: str) -> str:
    """An error of yaml about a text, with the text's name for "<unicode string>"."""
    return str(error).replace("<unicode string>", name)


def for_loading(texts: tuple[str, ...]) -> dict[str, Any]:
    """Those that load_model takes."""
    from ts_hf.loading import load_model

    taken = {
        name
        for name, parameter in inspect.signature(load_model).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    return {name: value for name, value in parse_options(texts).items() if name in taken}


def check_with_limit(texts: tuple[str, ...], block_limit: str | None) -> None:
    """Refuse options that `block_limit` decides.

    Raises:
        OptionError: naming them.
    """
    decided = ("param_offload", "vram_limit", "vram_headroom")
    both = [name for name in decided if name in parse_options(texts)]
    if block_limit is not None and both:
        raise OptionError(f"options: block_limit decides {', '.join(both)}. Give one or the other.")
