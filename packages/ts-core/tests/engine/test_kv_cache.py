"""PagedKVCache: paged keys and values are those that were put in, in order."""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ts_core import PagedKVCache, pinned_stats
from ts_core.device import HostDevice
from ts_core.engine.kv_cache_pages import Spread
from ts_core.errors import DataError, OptionError, OutOfBudgetError, StateError
from ts_core.testing import inject_delays
from ts_core.transfer import edges

LAYERS = 5


def pair(tokens: int, batch: int = 2, device: str = "cpu", **changes: Any) -> Any:
    heads = changes.get("heads", 3)
    dtype = changes.get("dtype", torch.float32)
    return (
        torch.randn(batch, heads, tokens, 4, device=device).to(dtype),
        torch.randn(batch, heads, tokens, changes.get("value_size", 6), device=device).to(dtype),
    )


def nothing_is_left(seconds: float = 20.0) -> bool:
    """Whether no cache holds host memory any more, once copies still queued have ended."""
    end = time.monotonic() + seconds
    while gc.collect() >= 0 and "kv_cache" in pinned_stats() and time.monotonic() < end:
        time.sleep(0.01)
    return "kv_cache" not in pinned_stats()


class Mirror:
    """A cache beside plain concatenation; every step is compared."""

    def __init__(self, cache: PagedKVCache, device: str = "cpu") -> None:
        self.cache, self.device = cache, device
        self.held: list[Any] = [None] * cache.num_layers
        self.equal = True

    def step(self, tokens: int, batch: int = 2) -> None:
        for layer in range(self.cache.num_layers):
            new = pair(tokens, batch, self.device)
            old = self.held[layer]
            if old is None:
                self.held[layer] = new
            else:
                self.held[layer] = tuple(torch.cat(two, 2) for two in zip(old, new, strict=True))
            found = self.cache.update(layer, *new)
            self.equal &= all(map(torch.equal, found, self.held[layer]))
            assert self.cache.seq_length(layer) == self.held[layer][0].shape[2]

    def crop(self, tokens: int) -> None:
        self.cache.crop(tokens)
        self.held = [
            tuple(part[:, :, : part.shape[2] - tokens] for part in old) for old in self.held
        ]

    def reset(self) -> None:
        self.cache.reset()
        self.held = [None] * self.cache.num_layers


@pytest.mark.parametrize("resident_layers", [0, 2, 3, 4, 5, "auto"])
@pytest.mark.parametrize("page_tokens", [1, 4, 100])
@pytest.mark.parametrize("contiguous", [False, True])
def test_equals_concatenation(resident_layers: Any, page_tokens: int, contiguous: bool) -> None:
    cache = PagedKVCache(
        LAYERS, 40, resident_layers=resident_layers, page_tokens=page_tokens, contiguous=contiguous
    )
    mirror = Mirror(cache)
    with inject_delays(1, max_ms=1.0):
        for tokens in (6, 1, 1, 1, 5, 1, 8, 1, 1):
            mirror.step(tokens)
        mirror.reset()
        for tokens in (3, 1, 13, 1):
            mirror.step(tokens)
        mirror.reset()
        for tokens in (4, 4, 1):
            mirror.step(tokens, batch=1)
    assert mirror.equal
    count = LAYERS if resident_layers == "auto" else resident_layers
    assert len(cache.resident) == count
    assert sorted(cache.resident + cache.offloaded) == list(range(LAYERS))
    cache.close()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("resident_layers", [2, 4])
def test_how_what_is_handed_out_lies_in_memory(
    resident_layers: int, contiguous: bool, device: str
) -> None:
    """Attention kernels are chosen by strides: paged layers are what concatenation gives.

    Resident ones are too, or are views of memory that never moves, so that an update copies its own
    tokens only; a head's tokens lie back to back, one head `max_tokens` behind the other.
    """
    most = 40
    cache = PagedKVCache(
        4, most, resident_layers=resident_layers, page_tokens=4, contiguous=contiguous
    )
    held: dict[int, Any] = {}
    where: dict[int, tuple[int, ...]] = {}
    for tokens in (6, 1, 1, 5, 1, 8, 1):
        for layer in range(4):
            new = pair(tokens, device=device)
            old = held.get(layer)
            both = new if old is None else tuple(map(torch.cat, zip(old, new, strict=True), [2, 2]))
            held[layer] = both
            found = cache.update(layer, *new)
            for part, expected in zip(found, both, strict=True):
                assert torch.equal(part, expected)
                assert part.shape == expected.shape and part.dtype is expected.dtype
                assert part.device == expected.device
                _, heads, _, size = expected.shape
                if layer in cache.resident and not contiguous:
                    assert part.stride() == (heads * most * size, most * size, size, 1)
                    assert part.data_ptr() % 16 == 0
                else:
                    assert part.is_contiguous() and part.stride() == expected.stride()
            if layer in cache.resident and not contiguous:
                addresses = tuple(part.data_ptr() for part in found)
                assert where.setdefault(layer, addresses) == addresses
    assert len(cache.resident) == resident_layers
    assert len(where) == (0 if contiguous else resident_layers)
    token = 2 * 3 * (4 + 6) * 4  # batch 2, 3 heads, fp32
    paged = 4 - resident_layers
    layers = resident_layers + (contiguous or paged > 0) + min(2, paged)
    assert cache.memory()["device_bytes"] == token * (layers * most + paged * 4)


def test_missing_wait_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edges, "wait", lambda device, stream, event: None)
    mirror = Mirror(PagedKVCache(LAYERS, 64, resident_layers=0, page_tokens=4))
    with inject_delays(1):
        for tokens in (9, 1, 1, 7, 1, 1, 1, 8):
            mirror.step(tokens)
    assert not mirror.equal


@pytest.mark.parametrize("resident_layers", [0, 3, 4])
def test_crop(resident_layers: int) -> None:
    cache = PagedKVCache(LAYERS, 64, resident_layers=resident_layers, page_tokens=4)
    mirror = Mirror(cache)
    with inject_delays(2, max_ms=1.0):
        mirror.step(11)
        for tokens in (0, 1, 6, 3):
            mirror.crop(tokens)
            mirror.step(3)
            mirror.step(1)
        mirror.crop(cache.seq_length())
        mirror.step(9)
    assert mirror.equal
    with pytest.raises(DataError, match=r"crop\(10\): .* tokens held, 9"):
        cache.crop(10)


@pytest.mark.parametrize("seed", range(6))
def test_random_sequences(seed: int) -> None:
    """Prompts, steps, crops and resets in random order, for random shapes."""
    choose = random.Random(seed)
    layers, most = choose.randint(1, 6), choose.randint(8, 60)
    cache = PagedKVCache(
        layers,
        most,
        resident_layers=choose.randint(0, layers),
        page_tokens=choose.choice([1, 2, 3, 5, 8, 100]),
    )
    mirror, batch = Mirror(cache), 2
    with inject_delays(seed, max_ms=1.0):
        for _ in range(25):
            held, action = cache.seq_length(), choose.random()
            tokens = choose.choice([1, 1, 1, 2, choose.randint(1, 20)])
            if action < 0.1:
                mirror.reset()
                batch = choose.choice([1, 2])
            elif action < 0.2 and held:
                mirror.crop(choose.randint(0, held))
            elif held + tokens <= most:
                mirror.step(tokens, batch)
    assert mirror.equal


def test_reset_while_copies_are_in_flight() -> None:
    """A load for the sequence before must not land in what the next one writes."""
    cache = PagedKVCache(LAYERS, 64, resident_layers=0, page_tokens=4)
    mirror = Mirror(cache)
    with inject_delays(3, max_ms=4.0, share=1.0):
        for _ in range(3):
            mirror.step(17)
            mirror.step(1)
            mirror.reset()
            mirror.step(16)
            mirror.reset()
    assert mirror.equal


def test_layers_in_any_order() -> None:
    cache = PagedKVCache(3, 64, resident_layers=0, page_tokens=4)
    held: dict[int, Any] = {}
    with inject_delays(4, max_ms=1.0):
        for layer in (0, 2, 2, 1, 0, 1, 1, 2, 0, 0):
            new = pair(5)
            held[layer] = (
                tuple(torch.cat(two, 2) for two in zip(held[layer], new, strict=True))
                if layer in held
                else new
            )
            assert all(map(torch.equal, cache.update(layer, *new), held[layer]))


def test_counters_and_memory() -> None:
    cache = PagedKVCache(LAYERS, 32, resident_layers=1, page_tokens=4)
    assert cache.memory()["device_bytes"] == 0
    assert cache.resident == () == cache.offloaded
    assert nothing_is_left()  # of earlier tests
    mirror = Mirror(cache)
    mirror.step(10)
    token = 2 * 3 * (4 + 6) * 4
    memory = cache.memory()
    assert memory["token_bytes"] == token
    assert memory["host_bytes"] == 4 * 32 * token
    assert memory["device_bytes"] == (1 + 1 + 2) * 32 * token + 4 * 4 * token
    assert pinned_stats()["kv_cache"] == memory["host_bytes"]
    stats = cache.stats()
    assert stats["stored_pages"] == 4 * 2
    assert stats["store_bytes"] == 4 * 2 * 4 * token
    calls = pinned_stats()["host_alloc_calls"]
    for _ in range(6):
        mirror.step(1)
    stats = cache.stats()
    assert stats["updates"] == 7 * LAYERS
    # The last layer's prefetch brings the first: nothing is ever loaded on demand.
    assert stats["demand_loads"] == 0
    # After the prompt the last two are still there, so the first step loads 2 and the rest 4 ...
    assert stats["loads"] == 7 * 4 - 3
    assert stats["stored_pages"] == 4 * 4
    assert pinned_stats()["host_alloc_calls"] == calls
    cache.close()
    assert cache.memory()["device_bytes"] == 0
    del mirror
    assert nothing_is_left()


def test_auto_fills_the_share_of_free_memory() -> None:
    token = 2 * 3 * (4 + 6) * 4
    device = HostDevice()
    whole, page = 32 * token, 4 * token
    need = (2 + 1) * whole + 8 * page + 2 * whole  # 2 of 10 layers resident
    for limit, count in [(2 * need, 2), (2 * need - 2, 1), (100 * need, 10)]:
        device.set_limit(limit)
        cache = PagedKVCache(10, 32, page_tokens=4, device=device)
        cache.update(0, *pair(3))
        assert len(cache.resident) == count
        assert device.pool.used == cache.memory()["device_bytes"]
        cache.close()
        assert device.pool.used == 0
    device.set_limit(3 * whole)
    cache = PagedKVCache(10, 32, page_tokens=4, device=device)
    with pytest.raises(OutOfBudgetError, match="short by"):
        cache.update(0, *pair(3))
    device.set_limit(None)
    Mirror(cache).step(3)


def test_a_limit_too_small_leaves_nothing_behind() -> None:
    device = HostDevice()
    device.set_limit(1000)
    cache = PagedKVCache(LAYERS, 32, resident_layers=1, device=device)
    with pytest.raises(OutOfBudgetError):
        cache.update(0, *pair(3))
    assert device.pool.used == 0
    assert cache.seq_length() == 0


def test_too_little_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    from ts_core.engine import kv_cache_memory

    monkeypatch.setattr(kv_cache_memory, "ram_available_bytes", lambda: 1000)
    cache = PagedKVCache(LAYERS, 32, resident_layers=1)
    with pytest.raises(OutOfBudgetError, match="host memory, and 900"):
        cache.update(0, *pair(3))


def test_full_and_mismatched_updates_leave_the_cache_as_it_was() -> None:
    cache = PagedKVCache(2, 8, resident_layers=0, page_tokens=4)
    mirror = Mirror(cache)
    mirror.step(6)
    with pytest.raises(DataError, match=r"holds 6 tokens and 3 more .* max_tokens=8"):
        cache.update(0, *pair(3))
    for wrong in ({"batch": 1}, {"heads": 2}, {"value_size": 5}, {"dtype": torch.float64}):
        with pytest.raises(DataError, match="one shape"):
            cache.update(0, *pair(1, **wrong))
    with pytest.raises(DataError, match="expected"):
        cache.update(0, torch.zeros(2, 3, 1, 4), torch.zeros(2, 3, 2, 6))
    with pytest.raises(DataError, match="layer=2"):
        cache.update(2, *pair(1))
    mirror.step(2)
    assert mirror.equal


def test_gradients_are_refused_and_inference_mode_works() -> None:
    cache = PagedKVCache(2, 16, resident_layers=1, page_tokens=4)
    keys, values = pair(3)
    with pytest.raises(StateError, match="require a gradient"):
        cache.update(0, keys.requires_grad_(), values)
    mirror = Mirror(cache)
    with torch.inference_mode():
        mirror.step(6)
    with torch.no_grad():
        mirror.held = [tuple(part.clone() for part in old) for old in mirror.held]
        mirror.step(2)
    mirror.step(3)
    assert mirror.equal


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 0}, "num_layers=0"),
        ({"max_tokens": 1.5}, "max_tokens=1.5"),
        ({"page_tokens": True}, "page_tokens=True"),
        ({"resident_layers": 4}, "resident_layers=4"),
        ({"resident_layers": "all"}, "resident_layers='all'"),
        ({"vram_fraction": 0}, "vram_fraction=0"),
        ({"vram_fraction": 1.5}, "vram_fraction=1.5"),
        ({"device": "tpu"}, "device='tpu'"),
    ],
)
def test_bad_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        PagedKVCache(**{"num_layers": 3, "max_tokens": 8, **options})


def test_paged_layers_are_spread() -> None:
    assert Spread(6, 3).paged == [0, 2, 4]
    assert Spread(5, 0).paged == [0, 1, 2, 3, 4]
    assert Spread(5, 5).paged == []
    assert Spread(7, 5).paged == [0, 3]


@pytest.mark.gpu
@pytest.mark.parametrize("resident_layers", [0, 2, 4])
@pytest.mark.parametrize("delays", [None, 1])
def test_gpu_equals_concatenation(resident_layers: int, delays: int | None) -> None:
    cache = PagedKVCache(LAYERS, 64, resident_layers=resident_layers, page_tokens=4)
    mirror = Mirror(cache, "cuda")
    with contextlib.nullcontext() if delays is None else inject_delays(delays):
        for tokens in (17, 1, 1, 1, 5, 1, 8, 1, 1):
            mirror.step(tokens)
        mirror.crop(7)
        for tokens in (1, 9, 1):
            mirror.step(tokens)
        mirror.reset()
        for tokens in (4, 4, 1):
            mirror.step(tokens, batch=1)
    assert mirror.equal
    assert cache.memory()["pinned"]
    cache.close()


@pytest.mark.gpu
def test_gpu_decoding_does_not_wait_for_the_device(no_host_waits: Callable[[], None]) -> None:
    """With the device kept busy, steps return at once: nothing synchronizes the host."""
    cache = PagedKVCache(4, 256, resident_layers=0, page_tokens=16)
    mirror = Mirror(cache, "cuda")
    mirror.step(40)
    new = [pair(1, device="cuda") for _ in range(4)]
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    no_host_waits()
    torch.cuda._sleep(int(2e9))
    for _ in range(20):
        for layer in range(4):
            cache.update(layer, *new[layer])
    assert not torch.cuda.current_stream().query()
    assert torch.cuda.memory_allocated() == allocated
