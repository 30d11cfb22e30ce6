"""Decoding with a long context: TrainStreamCache beside transformers' own caches.

    python packages/ts-hf/benchmarks/kv_cache.py [--context 65536] [--layers 12]

A Qwen2-shaped model with random weights (the width and heads of 14B) decodes tokens after a cache
of random keys and values. Times are medians per token; memory is what the cache adds on the device.
Without a GPU it runs small, on the host, to check that it runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, Qwen2Config

from ts_hf import TrainStreamCache


def main() -> None:
    """Measure and print one table."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser()
    parser.add_argument("--context", type=int, default=65536 if cuda else 512)
    parser.add_argument("--layers", type=int, default=12 if cuda else 4)
    parser.add_argument("--tokens", type=int, default=12 if cuda else 3)
    asked = parser.parse_args()
    device = torch.device("cuda" if cuda else "cpu")
    config = Qwen2Config(
        vocab_size=32000,
        hidden_size=5120 if cuda else 64,
        intermediate_size=13824 if cuda else 128,
        num_hidden_layers=asked.layers,
        num_attention_heads=40 if cuda else 4,
        num_key_value_heads=8 if cuda else 2,
        max_position_embeddings=asked.context + 4096,
        use_sliding_window=False,
    )
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    room = asked.context + asked.tokens + 8
    makers: list[tuple[str, Any]] = [
        ("transformers, on the device", lambda: DynamicCache(config=config)),
        *(
            (f"trainstream, {count} of {asked.layers} resident", _ours(model, room, count))
            for count in (0, asked.layers // 2, asked.layers)
        ),
    ]
    if cuda:
        offloaded = (
            "transformers, offloaded",
            lambda: DynamicCache(config=config, offloading=True),
        )
        makers.insert(1, offloaded)
    print(f"{asked.layers} layers, context {asked.context}, batch 1, {config.dtype or 'bf16'}")
    print(f"{'cache':34}{'ms per token':>14}{'device GB':>11}{'GB/s loaded':>13}")
    for name, make in makers:
        seconds, held, loaded = decode(model, make(), config, asked, device)
        rate = f"{loaded / seconds / 1e9:13.1f}" if loaded else ""
        print(f"{name:34}{seconds * 1e3:14.1f}{held / 1e9:11.2f}{rate}", flush=True)


def _ours(model: Any, room: int, count: int) -> Any:
    return lambda: TrainStreamCache(model, room, resident_layers=count)


def decode(
    model: Any, cache: Any, config: Qwen2Config, asked: argparse.Namespace, device: torch.device
) -> tuple[float, int, float]:
    """Median seconds per token, device bytes of the cache, bytes loaded per token."""
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    size = config.hidden_size // config.num_attention_heads
    shape = (1, config.num_key_value_heads, asked.context, size)
    with torch.no_grad():
        for layer in range(asked.layers):
            keys = torch.randn(shape, device=device, dtype=torch.bfloat16)
            cache.update(keys, torch.randn_like(keys), layer)
        del keys
        times = []
        token = torch.ones(1, 1, dtype=torch.long, device=device)
        paged = getattr(cache, "paged", None)
        loaded = 0.0
        for step in range(asked.tokens):
            if paged is not None and step == 3:
                loaded = -paged.stats()["load_bytes"]
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    held = torch.cuda.memory_allocated() - before if cuda else 0
    if paged is not None:
        loaded = (loaded + paged.stats()["load_bytes"]) / max(len(times) - 3, 1)
        paged.close()
    return statistics.median(times[3:] or times), held, loaded


if __name__ == "__main__":
    main()
