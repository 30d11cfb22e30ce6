"""Where keys and values of one layer lie: whole on the device, or in pages on the host.

Shapes: B batch, H key/value heads, T tokens, P tokens of a page, K and V the head sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ts_core.device import Event

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class PageLayout:
    """Shape of what a cache holds, the same for every layer.

    A page is contiguous: keys [B, H, P, K], then values [B, H, P, V].
    """

    batch: int
    heads: int
    key_size: int
    value_size: int
    page_tokens: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_elements(self) -> int:
        """Elements of one token of one layer, all samples."""
        return self.batch * self.heads * (self.key_size + self.value_size)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one layer, all samples."""
        return self.token_elements * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        return self.token_bytes * self.page_tokens

    def whole(self, buffer: torch.Tensor, tokens: int) -> Pair:
        """Contiguous keys [B, H, tokens, K] and values [B, H, tokens, V] at the start of uint8
        `buffer`."""
        flat = buffer[: tokens * self.token_bytes].view(self.dtype)
        cut = self.batch * self.heads * tokens * self.key_size
        return (
            flat[:cut].view(self.batch, self.heads, tokens, self.key_size),
            flat[cut:].view(self.batch, self.heads, tokens, self.value_size),
        )

    def pages(self, buffer: torch.Tensor, first: int, end: int) -> Pair:
        """Pages first..end of uint8 `buffer`: keys [B, H, n, P, K] and values [B, H, n, P, V]."""
        chunk = buffer[first * self.page_bytes : end * self.page_bytes].view(self.dtype)
        chunk = chunk.view(end - first, self.page_tokens * self.token_elements)
        cut = self.batch * self.heads * self.page_tokens * self.key_size
        shape = (self.batch, self.heads, self.page_tokens)
        keys = chunk[:, :cut].unflatten(1, (*shape, self.key_size))
        values = chunk[:, cut:].unflatten(1, (*shape, self.value_size))
        return keys.permute(1, 2, 0, 3, 4), values.permute(1, 2, 0, 3, 4)

    def in_pages(self, pair: Pair, first: int, end: int) -> Pair:
        """Tokens of pages first..end of a whole pair, in the shape `pages` has."""
        start, stop = first * self.page_tokens, end * self.page_tokens
        keys, values = (part[:, :, start:stop] for part in pair)
        shape = (end - first, self.page_tokens)
        return keys.unflatten(2, shape), values.unflatten(2, shape)

    def fits(self, keys: torch.Tensor, values: torch.Tensor) -> bool:
        """Whether new keys and values have this layout."""
        return (
            keys.shape[:2] == values.shape[:2] == (self.batch, self.heads)
            and keys.shape[2] == values.shape[2]
            and (keys.shape[3], values.shape[3]) == (self.key_size, self.value_size)
            and keys.dtype == values.dtype == self.dtype
            and keys.device == values.device == self.device
        )


def copy_pair(target: Pair, source: Pair) -> None:
    """`target <- source`, keys and values, on the compute stream."""
    target[0].copy_(source[0])
    target[1].copy_(source[1])


def tokens_of(pair: Pair, start: int, stop: int) -> Pair:
    """Tokens start..stop of a whole pair (views)."""
    return pair[0][:, :, start:stop], pair[1][:, :, start:stop]


class ResidentLayer:
    """A layer whose keys and values stay on the device."""

    def __init__(self, layout: PageLayout, buffer: torch.Tensor, max_tokens: int) -> None:
        self._all = layout.whole(buffer, max_tokens)

    def append(self, length: int, new: Pair) -> Pair:
        """Write `new` behind `length` tokens; returns views of all tokens."""
        total = length + new[0].shape[2]
        copy_pair(tokens_of(self._all, length, total), new)
        return tokens_of(self._all, 0, total)


@dataclass
class PagedLayer:
    """A layer whose full pages are on the host; the page being filled is on the device.

    Attributes:
        pages_h: uint8, the full pages.
        tail_d: uint8, one page on the device.
        stored: event of the last copy into `pages_h`.
    """

    pages_h: torch.Tensor
    tail_d: torch.Tensor
    stored: Event | None = None


@dataclass
class CacheStats:
    """Counters of a cache."""

    updates: int = 0
    loads: int = 0
    load_bytes: int = 0
    demand_loads: int = 0
    stored_pages: int = 0
    store_bytes: int = 0


@dataclass
class Spread:
    """Which layers stay on the device: `resident` of `count`, spread through the stack."""

    count: int
    resident: int
    paged: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        kept, count = self.resident, self.count
        self.paged = [k for k in range(count) if (k + 1) * kept // count == k * kept // count]


def next_in(order: Sequence[int], layer: int) -> int:
    """The paged layer after `layer`, around the end."""
    return order[(order.index(layer) + 1) % len(order)]
