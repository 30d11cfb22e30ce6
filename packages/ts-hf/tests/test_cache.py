"""TrainStreamCache: generate() gives the tokens of transformers' own cache."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ts_hf
from ts_core import TrainStreamError
from ts_core.errors import DataError, NotAvailableError, OptionError
from ts_core.testing import inject_delays

VOCABULARY = 256
PAGING: dict[str, Any] = {"resident_layers": 1, "page_tokens": 4}
LIKE_DEFAULT: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}


def prompt(batch: int, length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (batch, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def left_padded(batch: int, length: int, seed: int = 0) -> dict[str, torch.Tensor]:
    inputs = prompt(batch, length, seed)
    for row in range(batch):
        inputs["input_ids"][row, : 2 * row] = 0
        inputs["attention_mask"][row, : 2 * row] = 0
    return inputs


def generate(model: Any, inputs: dict[str, torch.Tensor], cache: Any = None, **options: Any) -> Any:
    torch.manual_seed(7)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, **options}
    return model.eval().generate(**inputs, past_key_values=cache, **LIKE_DEFAULT, **options)


def same(found: Any, expected: Any) -> bool:
    logits = zip(found.logits, expected.logits, strict=True)
    return torch.equal(found.sequences, expected.sequences) and all(
        torch.equal(a, b) for a, b in logits
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("sample", [False, True])
def test_tokens_and_logits_of_the_default_cache(
    family: str, attention: str, sample: bool, tiny_model: Callable[..., Any]
) -> None:
    model = tiny_model(family, attn_implementation=attention)
    options = {"do_sample": sample, **({"top_k": 20, "temperature": 1.5} if sample else {})}
    resident = 0 if family == "gpt2" else 1
    cache = ts_hf.TrainStreamCache(model, 64, resident_layers=resident, page_tokens=4)
    with inject_delays(1, max_ms=0.5):
        for inputs in (prompt(3, 9), left_padded(3, 8, 1), prompt(1, 5, 2)):
            expected = generate(model, inputs, **options)
            cache.reset()
            assert same(generate(model, inputs, cache, **options), expected)
    assert cache.paged.stats()["loads"] > 0
    assert len(cache.paged.offloaded) == 3


def test_mixture_of_experts(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("mixtral")
    cache = ts_hf.TrainStreamCache(model, 64, resident_layers=0, page_tokens=4)
    inputs = left_padded(2, 9)
    assert same(generate(model, inputs, cache), generate(model, inputs))


def test_a_conversation_goes_on_in_the_cache(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    from transformers import DynamicCache

    ours, theirs = ts_hf.TrainStreamCache(model, 64, **PAGING), DynamicCache(config=model.config)
    text = prompt(2, 7)
    for turn in range(3):
        found, expected = generate(model, text, ours), generate(model, text, theirs)
        assert same(found, expected)
        ids = torch.cat([found.sequences, prompt(2, 3, 10 + turn)["input_ids"]], 1)
        text = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    ours.crop(-5)
    theirs.crop(-5)
    assert ours.get_seq_length() == theirs.get_seq_length()
    shorter = {name: value[:, :-8] for name, value in text.items()}
    found, expected = generate(model, shorter, ours), generate(model, shorter, theirs)
    assert same(found, expected)


def test_prefill_in_chunks(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    cache = ts_hf.TrainStreamCache(model, 64, **PAGING)
    inputs = prompt(2, 23)
    expected = generate(model, inputs, prefill_chunk_size=5)
    assert same(generate(model, inputs, cache, prefill_chunk_size=5), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"prompt_lookup_num_tokens": 3},
        {"num_return_sequences": 3, "do_sample": True},
        {"repetition_penalty": 1.3},
    ],
)
def test_other_ways_to_generate(options: dict[str, Any], tiny_model: Callable[..., Any]) -> None:
    """Prompt lookup writes guesses and crops the cache back."""
    model = tiny_model("llama").eval()
    inputs = prompt(1, 20)
    inputs["input_ids"] %= 7
    options = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0, **options}
    found = []
    for cache in (None, ts_hf.TrainStreamCache(model, 64, **PAGING)):
        torch.manual_seed(3)
        found.append(model.generate(**inputs, past_key_values=cache, **options))
    assert torch.equal(*found)


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_with_paged_weights(
    quantize: str, tiny_model: Callable[..., Any], lora: Callable[..., Any]
) -> None:
    model = lora(tiny_model("llama"))
    inputs = left_padded(2, 9)
    wrapped, _ = ts_hf.wrap_hf(model, device="cpu", quantize=quantize, param_offload=True)
    expected = generate(wrapped, inputs)
    with inject_delays(2, max_ms=0.5):
        cache = ts_hf.TrainStreamCache(wrapped, 64, **PAGING)
        assert same(generate(wrapped, inputs, cache), expected)


def test_too_long_a_text_is_refused_and_the_cache_still_works(
    tiny_model: Callable[..., Any],
) -> None:
    model = tiny_model("llama")
    cache = ts_hf.TrainStreamCache(model, 16, **PAGING)
    with pytest.raises(DataError, match="max_tokens=16"):
        generate(model, prompt(1, 17), cache)
    assert cache.get_seq_length() == 0
    with pytest.raises(DataError, match="max_tokens=16"):
        generate(model, prompt(1, 10), cache)
    assert cache.get_seq_length() == 16
    cache.reset()
    inputs = prompt(1, 10, 3)
    assert same(
        generate(model, inputs, cache, max_new_tokens=7), generate(model, inputs, max_new_tokens=7)
    )


def test_memory_is_that_of_the_pages(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    cache = ts_hf.TrainStreamCache(model, 64, **PAGING)
    generate(model, prompt(2, 9), cache)
    memory = cache.paged.memory()
    assert memory["token_bytes"] == 2 * 2 * (16 + 16) * 4
    assert memory["host_bytes"] == 3 * 64 * memory["token_bytes"]
    assert cache.get_max_length() == 64


def test_beam_search_is_refused(tiny_model: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    with pytest.raises(NotAvailableError, match="beam search"):
        generate(model, prompt(1, 5), ts_hf.TrainStreamCache(model, 64), num_beams=2)


@pytest.mark.parametrize("family", ["gemma2", "mistral", "t5", "mamba"])
def test_other_attention_is_refused(family: str, tiny_model: Callable[..., Any]) -> None:
    import transformers

    if family == "gemma2":
        model = tiny_model("gemma2")
    elif family == "mistral":
        model = tiny_model("llama")
        model.config = transformers.MistralConfig(sliding_window=8)
    elif family == "t5":
        model = torch.nn.Module()
        model.config = transformers.T5Config()
    else:
        model = torch.nn.Module()
        model.config = transformers.MambaConfig(num_hidden_layers=2)
        model._supports_default_dynamic_cache = lambda: False
    with pytest.raises(NotAvailableError, match="does not serve"):
        ts_hf.TrainStreamCache(model, 64)


def test_bad_arguments(tiny_model: Callable[..., Any]) -> None:
    with pytest.raises(OptionError, match="expected a causal language model"):
        ts_hf.TrainStreamCache(torch.nn.Linear(2, 2), 64)
    with pytest.raises(TrainStreamError, match="resident_layers=9"):
        ts_hf.TrainStreamCache(tiny_model("llama"), 64, resident_layers=9)


def test_the_readme_example(tiny_model: Callable[..., Any]) -> None:
    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (code,) = [block for block in blocks if "TrainStreamCache" in block]
    code = code.replace("65536", "64").replace("200", "9")
    names: dict[str, Any] = {"model": tiny_model("llama").eval(), **prompt(2, 5)}
    exec(compile(code, "README.md", "exec"), names)
    assert names["tokens"].shape == (2, 14)


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_gpu_tokens_and_logits_of_the_default_cache(
    attention: str, tiny_model: Callable[..., Any]
) -> None:
    model = tiny_model("llama", attn_implementation=attention).to("cuda", torch.bfloat16)
    cache = ts_hf.TrainStreamCache(model, 128, resident_layers=1, page_tokens=16)
    for inputs in (left_padded(3, 40), prompt(1, 70)):
        inputs = {name: value.cuda() for name, value in inputs.items()}
        expected = generate(model, inputs, max_new_tokens=40)
        cache.reset()
        found = generate(model, inputs, cache, max_new_tokens=40)
        assert torch.equal(found.sequences, expected.sequences)
        assert same(found, expected)
    assert cache.paged.stats()["stored_pages"] > 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("resident", [0, 2, 4])
@pytest.mark.parametrize("contiguous", [True, False])
def test_a_long_context(
    device: str, resident: int, contiguous: bool, tiny_model: Callable[..., Any]
) -> None:
    """Bit for bit, wherever layers are; views with gaps need one kernel to be named.

    cuDNN's is left out: with it, transformers' own cache differed from itself on an H200.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from transformers import DynamicCache

    model = tiny_model("llama", attn_implementation="sdpa").to(device, torch.bfloat16)
    context = 3000 if device == "cpu" else 65_000
    ours = ts_hf.TrainStreamCache(
        model, context + 40, resident_layers=resident, contiguous=contiguous
    )
    theirs = DynamicCache(config=model.config)
    heads = model.config.num_key_value_heads
    size = model.config.hidden_size // model.config.num_attention_heads
    generator = torch.Generator().manual_seed(3)
    for layer in range(model.config.num_hidden_layers):
        shape = (2, 1, heads, context, size)
        pair = torch.randn(shape, generator=generator).to(device, torch.bfloat16)
        ours.update(pair[0], pair[1], layer)
        theirs.update(pair[0], pair[1], layer)
    assert len(ours.paged.resident) == resident
    inputs = {"input_ids": torch.ones(1, context + 1, dtype=torch.long, device=device)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    any_other = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(any_other if contiguous else [SDPBackend.MATH]):
        expected = generate(model, inputs, theirs)
        assert same(generate(model, inputs, ours), expected)
    assert ours.get_seq_length() == context + 12


@pytest.mark.gpu
def test_gpu_with_paged_weights(tiny_model: Callable[..., Any], lora: Callable[..., Any]) -> None:
    model = lora(tiny_model("llama"))
    wrapped, _ = ts_hf.wrap_hf(model, device="cuda", quantize="none", param_offload=True)
    inputs = {name: value.cuda() for name, value in left_padded(2, 20).items()}
    expected = generate(wrapped, inputs, max_new_tokens=30)
    cache = ts_hf.TrainStreamCache(wrapped, 64, resident_layers=0, page_tokens=8)
    assert same(generate(wrapped, inputs, cache, max_new_tokens=30), expected)
