"""A packed batch has the loss and gradients of its sequences one by one, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from ts_core.errors import OptionError
from ts_hf.packing import PackedCollator, pack_sequences
from ts_hf.packing_layout import Layout, PackedInputs, arrange, find_layout, looks_packed

COMMON = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LLAMA = {
    **COMMON,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
PLAIN = {k: v for k, v in LLAMA.items() if k not in ("head_dim", "num_key_value_heads")}
OPT = {
    **COMMON,
    "pad_token_id": 1,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
ROBERTA = {**PLAIN, "pad_token_id": 1, "is_decoder": True, "max_position_embeddings": 64}
EXPERTS = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}
FALCON = {**PLAIN, "new_decoder_architecture": True, "alibi": False}

# Position ids and nothing else are enough for most; what the others need is found by trying.
FAMILIES: dict[str, tuple[str, dict[str, Any], Layout]] = {
    "llama": ("LlamaConfig", LLAMA, Layout()),
    "mistral, a window": ("MistralConfig", {**LLAMA, "sliding_window": 8}, Layout()),
    "gemma2, windows and caps": ("Gemma2Config", {**LLAMA, "sliding_window": 8}, Layout()),
    "qwen3": ("Qwen3Config", LLAMA, Layout()),
    "gpt2": ("GPT2Config", {**COMMON, "n_embd": 32, "n_layer": 2, "n_head": 4}, Layout()),
    "gpt_neox": ("GPTNeoXConfig", PLAIN, Layout()),
    "mixtral": ("MixtralConfig", EXPERTS, Layout()),
    "opt, an offset": ("OPTConfig", OPT, Layout(own_masks=True)),
    "falcon": ("FalconConfig", FALCON, Layout(own_masks=True)),
    "gpt_oss": ("GptOssConfig", {**EXPERTS, "sliding_window": 8}, Layout(own_masks=True)),
    "roberta, counting from 2": (
        "RobertaConfig",
        ROBERTA,
        Layout(first_position=2, own_masks=True),
    ),
}
LENGTHS = (7, 12, 3, 9, 1, 11)


@pytest.fixture
def make_model() -> Callable[..., Any]:
    """make_model(family, attention): a small model in eval mode, for there is no dropout then."""

    def make(family: str, attention: str, dtype: torch.dtype = torch.float32) -> Any:
        torch.manual_seed(0)
        name, fields, _ = FAMILIES[family]
        return transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, name)(**fields), attn_implementation=attention, dtype=dtype
        ).eval()

    return make


@pytest.fixture
def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 256, (length,), generator=generator) for length in LENGTHS]


def _loss_and_gradients(model: Any, batches: list[dict[str, Any]], items: int) -> Any:
    """Of the sum over `batches`, each divided by `items`."""
    model.zero_grad()
    total = 0.0
    for batch in batches:
        loss = model(**batch, num_items_in_batch=items).loss
        loss.backward()
        total += loss.item()
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_one_by_one(
    family: str,
    attention: str,
    make_model: Callable[..., Any],
    sequences: list[torch.Tensor],
) -> None:
    if family == "gpt_oss" and attention == "sdpa":
        pytest.skip("transformers has no sdpa attention for gpt-oss")
    model = make_model(family, attention)
    layout = find_layout(model)
    assert layout == FAMILIES[family][2]
    items = sum(len(ids) - 1 for ids in sequences)
    singles = [{"input_ids": s[None], "labels": s[None]} for s in sequences if len(s) > 1]
    wanted, gradients = _loss_and_gradients(model, singles, items)
    for collator in (PackedCollator(), PackedCollator(16)):
        batch = arrange(model, collator(sequences), layout)
        assert (batch["labels"][:, 1:] != -100).sum() == items
        loss, found = _loss_and_gradients(model, [batch], items)
        assert loss == pytest.approx(wanted, rel=2e-6)
        assert set(found) == set(gradients)
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                found[name], gradient, rtol=1e-4, atol=2e-6, msg=lambda m, n=name: n + m
            )


def test_a_batch_is_right_as_it_is(
    make_model: Callable[..., Any], sequences: list[torch.Tensor]
) -> None:
    """model(**batch) of a model whose config asks for a cache; with one, sequences would mix."""
    model = make_model("llama", "sdpa")
    assert model.config.use_cache
    items = sum(len(ids) - 1 for ids in sequences)
    losses = [model(input_ids=s[None], labels=s[None]).loss for s in sequences if len(s) > 1]
    weights = [len(s) - 1 for s in sequences if len(s) > 1]
    wanted = sum(n * loss.item() for n, loss in zip(weights, losses, strict=True)) / items
    batch = PackedCollator(16)(sequences)
    assert model(**batch).loss.item() == pytest.approx(wanted, rel=2e-6)
    mixed = model(**{**batch, "use_cache": True}).loss.item()
    assert abs(mixed - wanted) > 1e-4 * wanted
    bare = pack_sequences(sequences, 16)
    assert model(**bare, use_cache=False).loss.item() == pytest.approx(wanted, rel=2e-6)


@pytest.mark.parametrize("family", ["llama", "opt, an offset", "gpt_oss"])
def test_half_precision_is_recognized(family: str, make_model: Callable[..., Any]) -> None:
    """Its rounding is not taken for a crossing, nor a crossing for rounding."""
    model = make_model(family, "eager", torch.bfloat16)
    assert find_layout(model) == FAMILIES[family][2]


def test_the_model_is_left_as_it_was(make_model: Callable[..., Any]) -> None:
    model = make_model("llama", "sdpa").train()
    state = torch.get_rng_state()
    find_layout(model)
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    ("config", "fields", "words"),
    [
        ("BloomConfig", {**COMMON, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "no position_id"),
        ("MambaConfig", {**COMMON, "hidden_size": 32, "num_hidden_layers": 2}, "no position_ids"),
    ],
)
def test_models_without_positions_are_refused(
    config: str, fields: dict[str, Any], words: str
) -> None:
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**fields))
    with pytest.raises(OptionError, match=words):
        find_layout(model)


def test_a_model_that_mixes_whatever_it_is_told_is_refused(make_model: Callable[..., Any]) -> None:
    """A layer that looks at the token before, as a convolution or a recurrence does."""
    model = make_model("llama", "sdpa")
    model.model.layers[0].register_forward_hook(
        lambda module, args, output: output + 0.1 * output.roll(1, dims=1)
    )
    said: list[str] = []
    with pytest.raises(OptionError, match=r"LlamaForCausalLM mixes packed sequences.*off by"):
        PackedInputs(said.append)(model, PackedCollator()([[1, 2, 3]]))
    assert said == []


@pytest.mark.filterwarnings("ignore:Model.*tie_word_embeddings:UserWarning")
@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ],
)
@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_adapters_on_the_embeddings(
    changes: dict[str, Any],
    family: str,
    make_model: Callable[..., Any],
    sequences: list[torch.Tensor],
    lora: Callable[..., Any],
) -> None:
    renamed = {"embed_tokens": "word_embeddings", "q_proj": "query_key_value"}
    if family == "falcon":
        changes = {k: [renamed.get(name, name) for name in v] for k, v in changes.items()}
    model = lora(make_model(family, "sdpa"), **changes).eval()
    layout = find_layout(model)
    assert layout == FAMILIES[family][2]
    batch = arrange(model, PackedCollator(16)(sequences), layout)
    items = int((batch["labels"] != -100).sum())
    wanted = sum(
        model(input_ids=s[None], labels=s[None]).loss.item() * (len(s) - 1)
        for s in sequences
        if len(s) > 1
    )
    assert model(**batch).loss.item() == pytest.approx(wanted / items, rel=2e-6)


def test_prompt_learning_is_refused(make_model: Callable[..., Any]) -> None:
    peft = pytest.importorskip("peft", reason="the optional package peft is not installed")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = peft.get_peft_model(make_model("llama", "sdpa"), config)
    with pytest.raises(OptionError, match="prompt learning"):
        find_layout(model)


def test_the_model_is_tried_once_and_what_it_needs_is_said(make_model: Callable[..., Any]) -> None:
    said: list[str] = []
    packed, model = PackedInputs(said.append), make_model("opt, an offset", "sdpa")
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    batch = packed(model, PackedCollator(8)([[1, 2, 3], [4, 5]]))
    tried = len(calls)
    assert batch["attention_mask"].shape == (1, 1, 8, 8) and batch["use_cache"] is False
    packed(model, PackedCollator(8)([[1, 2, 3]]))
    assert len(calls) == tried > 0
    assert len(said) == 1 and "OPTForCausalLM is given" in said[0] and "own_masks=True" in said[0]


def test_batches_that_look_packed() -> None:
    packed = PackedCollator()([[1, 2], [3]])
    assert looks_packed(packed)
    assert looks_packed(PackedCollator(4)([[1, 2], [3, 4, 5]]))
    positions = packed["position_ids"]
    assert not looks_packed({"input_ids": positions})
    assert not looks_packed({"position_ids": torch.arange(4)[None]})
    assert not looks_packed({"position_ids": torch.tensor([[2, 3, 2, 3]])})
    assert not looks_packed({"position_ids": positions, "attention_mask": positions})
    assert not looks_packed({"position_ids": positions, "cu_seq_lens_q": positions})
    assert not looks_packed({"position_ids": positions[0]})


def test_flash_attention_gets_one_row(make_model: Callable[..., Any]) -> None:
    model = make_model("llama", "sdpa")
    batch = PackedCollator(4)([[1, 2, 3], [4, 5, 6]])
    joined = arrange(model, batch, Layout(one_row=True))
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(joined[name], batch[name].reshape(1, -1))


@pytest.mark.gpu
def test_flash_attention_on_a_gpu(
    make_model: Callable[..., Any], sequences: list[torch.Tensor]
) -> None:
    """With the flash_attn package, in bfloat16: packed is as near to fp32 as one by one is."""
    pytest.importorskip("flash_attn", reason="the optional package flash-attn is not installed")
    exact = make_model("llama", "eager").cuda()
    model = make_model("llama", "flash_attention_2", torch.bfloat16).cuda()
    layout = find_layout(model)
    assert layout == Layout(one_row=True)
    items = sum(len(ids) - 1 for ids in sequences)
    singles = [{"input_ids": s[None].cuda(), "labels": s[None].cuda()} for s in sequences]
    singles = [s for s in singles if s["labels"].shape[1] > 1]
    truth, _ = _loss_and_gradients(exact, singles, items)
    one_by_one, _ = _loss_and_gradients(model, singles, items)
    batch = {k: v.cuda() for k, v in PackedCollator(16)(sequences).items() if torch.is_tensor(v)}
    packed, _ = _loss_and_gradients(model, [arrange(model, batch, layout)], items)
    assert abs(packed - truth) <= 2 * abs(one_by_one - truth) + 2e-3 * truth
