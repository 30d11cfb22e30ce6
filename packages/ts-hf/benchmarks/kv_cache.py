"""generate() with a long context: TrainStreamCache beside transformers' own caches.

    python packages/ts-hf/benchmarks/kv_cache.py [--context 65536] [--layers 12]

A Qwen2-shaped model with random weights (the width and heads of 14B) goes on from a context whose
keys and values are random, the same ones in each cache. Times are medians per token of generate();
"peak GB" is the most device memory allocated meanwhile, "without weights" the same less the model;
"tokens" says whether they, and the logits bit for bit, are those of transformers' cache on the
device, and otherwise from which on they differ and by how many standard deviations of the logits.
That cache is tried twice: the second time shows what is the kernel's own doing, and what the first
call with new lengths or strides costs (`contiguous=False` hands out views with gaps). `--kernel
flash` (or math, efficient, cudnn) has every cache attend with that one. Without a GPU it runs
small, on the host, to check that it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, DynamicCache, Qwen2Config, StoppingCriteria

from ts_hf import TrainStreamCache

WARM_UP = 3
KERNELS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


@dataclass
class Decoded:
    """What one cache gave: tokens, median seconds per token, device bytes, bytes loaded a token.

    `logits` are [tokens, words], fp32 on the host.
    """

    tokens: list[int]
    logits: torch.Tensor
    token_s: float
    peak_bytes: int
    added_bytes: int
    load_bytes: float


class Clock(StoppingCriteria):  # type: ignore[misc]
    """Takes the time after every token of generate(), and stops nothing."""

    def __init__(self, paged: Any) -> None:
        self.times: list[float] = []
        self.loaded: list[int] = []
        self._paged = paged

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Called by generate() after each token."""
        _synchronize()
        self.times.append(time.perf_counter())
        self.loaded.append(0 if self._paged is None else self._paged.stats()["load_bytes"])
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def main() -> None:
    """Measure and print one table."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser()
    parser.add_argument("--context", type=int, default=65536 if cuda else 512)
    parser.add_argument("--layers", type=int, default=12 if cuda else 4)
    parser.add_argument("--tokens", type=int, default=16 if cuda else 6)
    parser.add_argument("--kernel", choices=list(KERNELS), help="attention kernel of every cache")
    asked = parser.parse_args()
    if asked.tokens < WARM_UP + 2:
        parser.error(f"--tokens {asked.tokens}: at least {WARM_UP + 2} are needed")
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
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    room = asked.context + asked.tokens + 8
    makers: list[tuple[str, Any]] = [
        ("transformers, on the device", lambda: DynamicCache(config=config)),
        ("the same again", lambda: DynamicCache(config=config)),
        *(
            (f"trainstream, {count} of {asked.layers} resident", _ours(model, room, count))
            for count in (0, asked.layers // 2, asked.layers)
        ),
        ("the same, as views with gaps", _ours(model, room, asked.layers, contiguous=False)),
    ]
    if cuda:
        offloaded = (
            "transformers, offloaded",
            lambda: DynamicCache(config=config, offloading=True),
        )
        makers.insert(2, offloaded)
    print(f"{asked.layers} layers, context {asked.context}, batch 1, bf16")
    print(
        f"{'cache':34}{'ms/token':>10}{'tokens/s':>10}{'peak GB':>9}{'without weights':>17}"
        f"{'GB/s loaded':>13}  tokens"
    )
    wanted: Decoded | None = None
    for name, make in makers:
        chosen = (
            contextlib.nullcontext() if asked.kernel is None else sdpa_kernel(KERNELS[asked.kernel])
        )
        with chosen:
            found = decode(model, make(), config, asked, device)
        wanted = wanted or found
        memory = f"{'':26}"
        if cuda:
            memory = f"{found.peak_bytes / 1e9:9.2f}{found.added_bytes / 1e9:17.2f}"
        rate = f"{found.load_bytes / found.token_s / 1e9:13.1f}" if found.load_bytes else f"{'':13}"
        times = f"{found.token_s * 1e3:10.1f}{1 / found.token_s:10.1f}"
        print(f"{name:34}{times}{memory}{rate}  {_beside(found, wanted)}", flush=True)


def _beside(found: Decoded, wanted: Decoded) -> str:
    """How tokens, and the logits up to the first that differs, compare."""
    differ = [a != b for a, b in zip(found.tokens, wanted.tokens, strict=True)]
    until = differ.index(True) + 1 if any(differ) else len(differ)
    apart = (found.logits - wanted.logits)[:until].abs().amax(1) / wanted.logits.std()
    bits = apart.nonzero().flatten().tolist()
    if not bits:
        return "the same, bit for bit"
    said = f"logits within {apart.max():.1e}, from number {bits[0] + 1} on"
    return f"the same; {said}" if not any(differ) else f"others from number {until} on; {said}"


def _ours(model: Any, room: int, count: int, contiguous: bool = True) -> Any:
    return lambda: TrainStreamCache(model, room, resident_layers=count, contiguous=contiguous)


def decode(
    model: Any, cache: Any, config: Qwen2Config, asked: argparse.Namespace, device: torch.device
) -> Decoded:
    """Fill the cache, generate tokens, and close the cache."""
    cuda = device.type == "cuda"
    before = 0
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
    size = config.hidden_size // config.num_attention_heads
    shape = (1, config.num_key_value_heads, asked.context, size)
    generator = torch.Generator(device).manual_seed(1)
    options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "generator": generator}
    for layer in range(asked.layers):
        keys = torch.randn(shape, **options)
        cache.update(keys, torch.randn(shape, **options), layer)
        del keys
    _synchronize()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    paged = getattr(cache, "paged", None)
    clock = Clock(paged)
    prompt = torch.ones(1, asked.context + 1, dtype=torch.long, device=device)
    made = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        past_key_values=cache,
        max_new_tokens=asked.tokens,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=[clock],
        return_dict_in_generate=True,
        output_logits=True,
    )
    peak = torch.cuda.max_memory_allocated() if cuda else 0
    if paged is not None:
        paged.close()
    times, loaded = clock.times[WARM_UP:], clock.loaded[WARM_UP:]
    each = [after - before for before, after in itertools.pairwise(times)]
    return Decoded(
        tokens=made.sequences[0, asked.context + 1 :].tolist(),
        logits=torch.stack([each[0] for each in made.logits]).float().cpu(),
        token_s=statistics.median(each),
        peak_bytes=peak,
        added_bytes=peak - before,
        load_bytes=(loaded[-1] - loaded[0]) / len(each),
    )


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
