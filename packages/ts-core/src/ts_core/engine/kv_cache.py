"""PagedKVCache: keys and values of long contexts in host memory, a layer ahead on the device."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from ts_core.device import Device, resolve_device
from ts_core.engine.kv_cache_memory import CacheMemory, device_bytes
from ts_core.engine.kv_cache_pages import CacheStats, PageLayout, Spread
from ts_core.errors import DataError, OptionError, OutOfBudgetError, StateError


class PagedKVCache:
    """Keys and values of every layer of a model while it generates, most of them on the host.

    Some layers stay on the device. Each other layer keeps its full pages of `page_tokens` tokens in
    (page-locked) host memory and the page being filled on the device. While one layer attends, the
    pages of the next paged layer are copied to the device; a page goes to the host when it is full,
    so most steps copy nothing back. All memory is taken at the first `update`: later ones allocate
    nothing and never make the host wait.

    `update` returns tensors that hold until the next layer's `update`: use them for attention at
    once. For inference only: no gradient flows through.

    Args:
        num_layers: layers of the model.
        max_tokens: the most tokens of a sequence, prompt included.
        resident_layers: layers that stay on the device; "auto" for as many as fit in
            `vram_fraction` of what is free at the first update (all on the host device without a
            limit).
        page_tokens: tokens of a page.
        vram_fraction: share of free device memory that "auto" may use.
        contiguous: hand out resident layers contiguous too, as concatenation does, for one copy of
            the layer at each update and the memory of one more layer. Attention kernels are chosen
            by strides, so the bits of an attention may depend on it.
        device: None for that of the first keys, else as for `wrap`.

    Raises:
        OptionError: a value that is not accepted.
    """

    def __init__(
        self,
        num_layers: int,
        max_tokens: int,
        *,
        resident_layers: int | str = "auto",
        page_tokens: int = 256,
        vram_fraction: float = 0.5,
        contiguous: bool = False,
        device: str | torch.device | Device | None = None,
    ) -> None:
        for name, value in (
            ("num_layers", num_layers),
            ("max_tokens", max_tokens),
            ("page_tokens", page_tokens),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"{name}={value!r}: expected an int >= 1.")
        if resident_layers != "auto" and (
            isinstance(resident_layers, bool)
            or not isinstance(resident_layers, int)
            or not 0 <= resident_layers <= num_layers
        ):
            raise OptionError(
                f"resident_layers={resident_layers!r}: expected 'auto' or an int from 0 to "
                f"num_layers={num_layers}."
            )
        if isinstance(vram_fraction, bool) or not 0 < vram_fraction <= 1:
            raise OptionError(f"vram_fraction={vram_fraction!r}: expected a number in (0, 1].")
        self.num_layers = num_layers
        self.max_tokens = max_tokens
        self.page_tokens = min(page_tokens, max_tokens)
        self.vram_fraction = vram_fraction
        self.contiguous = bool(contiguous)
        self._resident_layers = resident_layers
        self._device: Device | None = (
            device if isinstance(device, Device) or device is None else resolve_device(device)
        )
        self._lengths = [0] * num_layers
        self._stats = CacheStats()
        self._memory: CacheMemory | None = None

    def update(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the keys and values of new tokens to one layer.

        Args:
            layer: index of the layer. Layers are used in order; any order works, but only the next
                one is loaded ahead.
            keys: [B, H, new tokens, K], on the device.
            values: [B, H, new tokens, V], same dtype and device.

        Returns:
            Keys [B, H, all tokens, K] and values [B, H, all tokens, V] on the device, valid until
            the next `update`. Contiguous where the layer is paged; where it is resident, a view of
            `max_tokens` tokens, or contiguous too if the cache was made so.

        Raises:
            DataError: more than `max_tokens` tokens, or another shape, dtype or device than before;
                the cache is as it was.
            OutOfBudgetError: the first update finds too little memory.
            StateError: the keys require a gradient.
        """
        if not 0 <= layer < self.num_layers:
            raise DataError(f"layer={layer}: this cache has layers 0 to {self.num_layers - 1}.")
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise StateError(
                "keys or values require a gradient, and none flows through a PagedKVCache. "
                "Generate under torch.no_grad(), and train without a cache."
            )
        length = self._lengths[layer]
        new_tokens = self._checked(layer, keys, values)
        memory = self._memory or self._allocate(keys, values)
        with torch.no_grad():
            result = memory.append(layer, length, (keys, values), self._lengths)
        self._lengths[layer] = length + new_tokens
        self._stats.updates += 1
        return result

    def seq_length(self, layer: int = 0) -> int:
        """Tokens that `layer` holds."""
        return self._lengths[layer]

    def reset(self) -> None:
        """Forget every token; memory is kept for the next sequence of the same shape."""
        self._lengths = [0] * self.num_layers
        if self._memory is not None:
            self._memory.forget()

    def crop(self, tokens: int) -> None:
        """Forget the last `tokens` tokens of every layer.

        Raises:
            DataError: a layer holds fewer.
        """
        if tokens < 0 or tokens > min(self._lengths):
            raise DataError(
                f"crop({tokens}): expected a number from 0 to the tokens held, "
                f"{min(self._lengths)}."
            )
        for layer, length in enumerate(self._lengths):
            if self._memory is not None and layer not in self._memory.resident:
                self._memory.crop(layer, length, length - tokens)
            self._lengths[layer] = length - tokens

    @property
    def resident(self) -> tuple[int, ...]:
        """Layers whose keys and values stay on the device ("auto": empty before the first)."""
        return () if self._memory is None else tuple(sorted(self._memory.resident))

    @property
    def offloaded(self) -> tuple[int, ...]:
        """Layers whose pages are in host memory ("auto": empty before the first update)."""
        return () if self._memory is None else tuple(self._memory.order)

    def memory(self) -> dict[str, Any]:
        """Bytes taken on the device and on the host, per token of one layer, and what is pinned."""
        held = self._memory
        return {
            "device_bytes": 0 if held is None else held.device_bytes,
            "host_bytes": 0 if held is None else held.host_bytes,
            "token_bytes": 0 if held is None else held.layout.token_bytes,
            "pinned": held is not None and held.pinned,
        }

    def stats(self) -> dict[str, int]:
        """Counters: updates, loads, load_bytes, demand_loads, stored_pages, store_bytes."""
        return asdict(self._stats)

    def close(self) -> None:
        """Forget every token and free all memory; the next `update` takes it again."""
        self._lengths = [0] * self.num_layers
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _checked(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> int:
        """The number of new tokens, after all checks."""
        if keys.dim() != 4 or values.dim() != 4 or keys.shape[:3] != values.shape[:3]:
            raise DataError(
                f"keys {tuple(keys.shape)} and values {tuple(values.shape)}: expected "
                f"[batch, heads, tokens, head size], alike but for the last."
            )
        new_tokens, length = keys.shape[2], self._lengths[layer]
        if length + new_tokens > self.max_tokens:
            raise DataError(
                f"layer {layer} holds {length} tokens and {new_tokens} more were given, but the "
                f"cache was made for max_tokens={self.max_tokens}. Generate fewer tokens, reset() "
                f"it for a new sequence, or make one with a larger max_tokens."
            )
        memory = self._memory
        if memory is not None and not memory.layout.fits(keys, values):
            if any(self._lengths):
                raise DataError(
                    f"layer {layer} was given keys {tuple(keys.shape)} and values "
                    f"{tuple(values.shape)} of {keys.dtype} on {keys.device}, while the cache "
                    f"holds {memory.layout}. Every layer and step has one shape; reset() before "
                    f"another batch."
                )
            self.close()
        return new_tokens

    def _allocate(self, keys: torch.Tensor, values: torch.Tensor) -> CacheMemory:
        layout = PageLayout(
            keys.shape[0],
            keys.shape[1],
            keys.shape[3],
            values.shape[3],
            self.page_tokens,
            keys.dtype,
            keys.device,
        )
        device = self._device or resolve_device(keys.device)
        if device.torch_device.type != keys.device.type:
            raise DataError(
                f"keys are on {keys.device}, and the cache was made for {device.torch_device}. "
                f"Leave device=None to take that of the keys."
            )
        count = self._resident_layers
        if not isinstance(count, int):
            count = self._as_many_as_fit(layout, device)
        # Never inference tensors, whatever mode the first update runs in.
        with torch.inference_mode(False):
            self._memory = CacheMemory(
                layout,
                device,
                Spread(self.num_layers, count),
                self.max_tokens,
                self._stats,
                self.contiguous,
            )
        return self._memory

    def _as_many_as_fit(self, layout: PageLayout, device: Device) -> int:
        usable = device.usable_bytes()
        if usable is None:
            return self.num_layers
        free = int((usable - device.memory()["allocated"]) * self.vram_fraction)

        def needed(count: int) -> int:
            return device_bytes(layout, self.num_layers, count, self.max_tokens, self.contiguous)

        for count in range(self.num_layers, -1, -1):
            if needed(count) <= free:
                return count
        least = needed(0)
        raise OutOfBudgetError(
            f"a cache of {self.max_tokens} tokens needs {least} bytes of device memory even with "
            f"every layer paged, and {self.vram_fraction:.0%} of what is free are {free}: short by "
            f"{least - free}. Lower max_tokens or the batch, or raise vram_fraction."
        )
