"""Turn a GGUF file of a Llama-layout model into a transformers folder.

Only what the demo model needs: architecture "llama", a byte-level BPE tokenizer ("gpt2" model).
The `gguf` package reads the file and decodes its blocks; this maps names, undoes the row
permutation of the query and key projections, and writes config, tokenizer and weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from ts_core.errors import DataError
from ts_hf.checkpoints.atomic import atomic_directory

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_NORMAL_TOKEN = 1


def convert_gguf(file: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json, tokenizer and model.safetensors for the GGUF `file` into `folder`.

    `folder` appears complete or not at all. The weights are the file's own (already quantized)
    values in `dtype`.

    Raises:
        DataError: the file cannot be read, or is not of a layout this knows.
    """
    reader = _open(file)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    architecture = fields.get("general.architecture")
    if architecture != "llama" or fields.get("tokenizer.ggml.model") != "gpt2":
        raise DataError(
            f"{file}: architecture {architecture!r} with tokenizer "
            f"{fields.get('tokenizer.ggml.model')!r}; only 'llama' with a 'gpt2' tokenizer can be "
            f"converted. Use a safetensors checkpoint."
        )
    from safetensors.torch import save_file

    tensors = dict(_tensors(reader, fields, dtype))
    config = _config(file, fields, tied="lm_head.weight" not in tensors, dtype=dtype)
    with atomic_directory(folder) as aside:
        save_file(tensors, aside / "model.safetensors", metadata={"format": "pt"})
        (aside / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        _save_tokenizer(fields, aside)


def undo_rope_permutation(weight: Tensor, heads: int) -> Tensor:
    """Rows of a q or k projection [heads * head_dim, hidden] back in transformers' order.

    GGUF interleaves the two halves that rotary embedding rotates together (row pairs 2i, 2i+1);
    transformers keeps them apart (rows i and i + head_dim / 2).
    """
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns).contiguous()


def _open(file: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise DataError(
            "reading a GGUF file needs the gguf package: pip install 'gguf>=0.17'"
        ) from error
    try:
        return GGUFReader(file)
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise DataError(f"{file} cannot be read as a GGUF file: {error}") from error


def _tensors(
    reader: Any, fields: dict[str, Any], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    from gguf.quants import dequantize

    heads = int(fields["llama.attention.head_count"])
    groups = int(fields["llama.attention.head_count_kv"])
    for tensor in reader.tensors:
        values = torch.from_numpy(
            numpy.array(dequantize(tensor.data, tensor.tensor_type), dtype=numpy.float32)
        )
        name = _name(str(tensor.name))
        if name.endswith("q_proj.weight"):
            values = undo_rope_permutation(values, heads)
        elif name.endswith("k_proj.weight"):
            values = undo_rope_permutation(values, groups)
        yield name, values.to(dtype).contiguous()


def _name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    block, _, rest = name.removeprefix("blk.").partition(".")
    part, _, kind = rest.partition(".")
    if not name.startswith("blk.") or part not in _LAYER_NAMES or kind != "weight":
        raise DataError(f"tensor {name!r} of the GGUF file has no place in a Llama model.")
    return f"model.layers.{block}.{_LAYER_NAMES[part]}.weight"


def _config(
    file: Path, fields: dict[str, Any], *, tied: bool, dtype: torch.dtype
) -> dict[str, Any]:
    def read(key: str) -> Any:
        try:
            return fields[key]
        except KeyError:
            raise DataError(f"{file} has no metadata field {key!r}.") from None

    hidden, heads = read("llama.embedding_length"), read("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(read("tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": read("llama.feed_forward_length"),
        "num_hidden_layers": read("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read("llama.attention.head_count_kv"),
        "head_dim": fields.get("llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": read("llama.context_length"),
        "initializer_range": hidden**-0.5,
        # GGUF keeps it in fp32: 9.999999747378752e-06 stands for 1e-05.
        "rms_norm_eps": float(f"{read('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_parameters": {"rope_type": "default", "rope_theta": read("llama.rope.freq_base")},
        "rope_theta": read("llama.rope.freq_base"),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": fields.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id"),
        "dtype": str(dtype).removeprefix("torch."),
    }


def _save_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [str(token) for token in fields["tokenizer.ggml.tokens"]]
    merges: Any = [tuple(str(merge).split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False))
    split: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    if fields.get("tokenizer.ggml.pre") == "smollm":
        split.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        token
        for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
        if kind != _NORMAL_TOKEN
    ]
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special]
    )

    def named(key: str) -> str | None:
        index = fields.get(f"tokenizer.ggml.{key}_token_id")
        return None if index is None else tokens[int(index)]

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=named("bos"),
        eos_token=named("eos"),
        unk_token=named("unknown"),
        pad_token=named("padding"),
        additional_special_tokens=special,
        model_max_length=int(fields["llama.context_length"]),
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = fields.get("tokenizer.chat_template")
    fast.save_pretrained(folder)
