"""From wrap()'s options to `quantize_model`'s, for the codec that was chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ts_core.config import WrapOptions
from ts_core.engine.quantize import make_storer
from ts_core.errors import OptionError
from ts_core.registry import codecs

_UNUSED = (("keep_precise", 0), ("error_rank", 0), ("double_quant", False))


def quantize_options(
    config: WrapOptions, codec_name: str | None, log: Callable[[str], None]
) -> dict[str, Any]:
    """What wrap()'s options say to `quantize_model`; those that do nothing are logged.

    Raises:
        OptionError: an option that the codec asked for does not take.
    """
    if codec_name is None:
        for option, default in _UNUSED:
            if getattr(config, option) not in (default, None):
                value = getattr(config, option)
                log(f"{option}={value!r}: nothing to do, wrap() quantizes no weight")
        return {}
    if config.error_iters != 1 and not config.error_rank:
        log(f"error_iters={config.error_iters}: nothing to do with error_rank=0")
    keep_precise = config.keep_precise
    if keep_precise and config.quantize == "auto":
        # Chosen for the user, so an option for other codecs is no error.
        try:
            make_storer(codecs.get(codec_name), {"keep_precise": keep_precise}, 64, False, None)
        except OptionError as error:
            log(f"keep_precise={keep_precise!r} left out: {error}")
            keep_precise = 0
    return {
        "keep_precise": keep_precise,
        "error_rank": config.error_rank,
        "error_iters": config.error_iters,
        "double_quant": _double_quant(config, codec_name, log),
    }


def bytes_per_weight(codec_name: str, config: WrapOptions) -> float:
    """Stored bytes per weight under wrap()'s options, keep_precise's share included."""
    codec = codecs.get(codec_name)
    share = config.keep_precise or 0.0
    share = 0.05 if share in ("auto", True) else float(share)
    size = codec.bytes_per_weight(
        config.quant_block_size, _double_quant(config, codec_name, lambda text: None)
    )
    return float(size) * (1 + share)


def _double_quant(config: WrapOptions, codec_name: str, log: Callable[[str], None]) -> bool:
    """The option, except under quantize='auto' with a codec that does not take it."""
    if not config.double_quant:
        return False
    try:
        codecs.get(codec_name).bytes_per_weight(config.quant_block_size, True)
    except ValueError as error:
        if config.quantize != "auto":
            raise OptionError(str(error)) from error
        log(f"double_quant=True left out: {error}")
        return False
    return True
