"""TrainStreamCache: generate() of transformers with most keys and values in host memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin

from ts_core import PagedKVCache
from ts_core.errors import NotAvailableError, OptionError
from ts_hf.families import base_causal_lm

FULL_ATTENTION = "full_attention"


class TrainStreamCache(Cache):  # type: ignore[misc]
    """A cache for `generate(past_key_values=...)` whose keys and values live in host memory.

    Tokens are those of transformers' own cache: greedy or sampled, any batch, left padding, several
    prompts one after another, a prompt that goes on where the last one ended. Attention gets the
    same keys and values bit for bit, in the same strides, so torch takes the same kernel for them.
    Full attention only.
    Call `reset()` before an unrelated prompt; a longer text than `max_tokens` raises `DataError`
    before anything is written.

    Args:
        model: a causal language model of transformers, in a PEFT wrapper or wrapped by trainstream
            or neither. When wrapped, the cache uses its device and respects its limit.
        max_tokens: the most tokens of a sequence, prompt and padding included.
        resident_layers: as for `PagedKVCache`.
        page_tokens: as for `PagedKVCache`.
        vram_fraction: as for `PagedKVCache`.
        contiguous: hand resident layers to attention as transformers' cache does, for a copy of the
            layer per token. False gives views with gaps instead: on a GPU, torch may take another
            attention kernel for those (a faster one, at times), whose rounding decides otherwise
            between tokens that are close.

    Attributes:
        paged: the `PagedKVCache`, with its stats and memory.

    Raises:
        NotAvailableError: a model with sliding-window, chunked or linear attention, with layers
            that share keys, or with an encoder.
        OptionError: a value that is not accepted.
    """

    def __init__(
        self,
        model: nn.Module,
        max_tokens: int,
        *,
        resident_layers: int | str = "auto",
        page_tokens: int = 256,
        vram_fraction: float = 0.5,
        contiguous: bool = True,
    ) -> None:
        inner = base_causal_lm(model)
        session = _session(model, inner)
        self.paged = PagedKVCache(
            _layer_count(inner),
            max_tokens,
            resident_layers=resident_layers,
            page_tokens=page_tokens,
            vram_fraction=vram_fraction,
            contiguous=contiguous,
            device=None if session is None else session.device,
        )
        super().__init__(
            layers=[_Layer(self.paged, index) for index in range(self.paged.num_layers)]
        )

    def reset(self) -> None:
        """Forget every token; memory is kept for the next prompt."""
        self.paged.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens: a negative number is how many (or, positive, how many to keep).

        Raises:
            DataError: fewer are held.
        """
        held = self.paged.seq_length()
        remove = -tokens_to_remove if tokens_to_remove <= 0 else max(held - tokens_to_remove, 0)
        self.paged.crop(remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Refused: beam search moves whole sequences between samples at every step."""
        raise _refused("beam search", "num_beams=1")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused: the batch has one size."""
        raise _refused("repeating the samples of a cache", "generate with the final batch")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Refused: the batch has one size."""
        raise _refused("selecting samples of a cache", "generate with the final batch")


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of the cache, as transformers asks for it."""

    is_compileable = False
    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, paged: PagedKVCache, index: int) -> None:
        super().__init__()
        self._paged = paged
        self._index = index

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Memory is taken at the first update."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append, and return every key and value of the layer."""
        return self._paged.update(self._index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask covers."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self._paged.seq_length(self._index)

    def get_max_length(self) -> int:
        """The most tokens."""
        return self._paged.max_tokens

    def get_max_cache_shape(self) -> int:
        """The same, by the name that transformers used before 5.15."""
        return self._paged.max_tokens


def _session(*models: nn.Module) -> Any:
    for model in models:
        session = getattr(model, "_trainstream_session", None)
        if session is not None:
            return session
    return None


def _layer_count(model: nn.Module) -> int:
    """Layers that keep keys and values, after checking that the cache can serve them."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise OptionError(
            f"model={type(model).__name__}: expected a causal language model of transformers."
        )
    if config.is_encoder_decoder:
        raise _refused(f"{type(model).__name__}, which has an encoder,", "a decoder-only model")
    text = config.get_text_config(decoder=True)
    kinds = getattr(text, "layer_types", None)
    if kinds is None:
        windows = ("sliding_window", "attention_chunk_size")
        kinds = [name for name in windows if getattr(text, name, None) is not None]
        kinds = kinds or [FULL_ATTENTION]
    others = sorted(set(kinds) - {FULL_ATTENTION})
    if others or not getattr(model, "_supports_default_dynamic_cache", lambda: True)():
        what = ", ".join(others) or "a cache of its own"
        raise _refused(f"{type(model).__name__} with {what}", "a model with full attention")
    if getattr(text, "num_kv_shared_layers", None):
        raise _refused(f"{type(model).__name__}, whose layers share keys,", "another model")
    return int(text.num_hidden_layers)


def _refused(what: str, instead: str) -> NotAvailableError:
    return NotAvailableError(
        f"TrainStreamCache does not serve {what}. Use {instead}, or transformers' own cache."
    )
