"""The settings of a fine-tune: one table for flags, YAML keys, defaults and checks.

docs/finetune.md lists every one of them with its default; a test compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ts_core.config import parse_bytes
from ts_core.errors import OptionError


def _setting(default: Any, help: str, check: Callable[[Any], bool], accepts: str) -> Any:
    return field(default=default, metadata={"help": help, "check": check, "accepts": accepts})


def _int(least: int) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= least


def _number(low: float, high: float = float("inf")) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and math.isfinite(value) and low <= value <= high

    return check


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda v: any(v == value and type(v) is type(value) for value in values)


def _text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _texts(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) > 0 and all(_text(item) for item in value)


def _size(value: Any) -> bool:
    try:
        parse_bytes("size", value)
    except OptionError:
        return False
    return True


@dataclass(frozen=True)
class FinetuneConfig:
    """One fine-tune. Every field is a flag (`--seq-length`) and a YAML key (`seq_length`)."""

    model: str = _setting(
        "smollm2-135m-instruct",
        "folder or hub id of a safetensors checkpoint, a .gguf file, or 'smollm2-135m-instruct' "
        "(the demo model)",
        _text,
        "a folder, a hub id, a .gguf file or 'smollm2-135m-instruct'",
    )
    random_weights: bool = _setting(
        False,
        "draw the weights at random instead of reading them; 'model' needs only a config.json then",
        _one_of(True, False),
        "true or false",
    )
    tokenizer: str | None = _setting(
        None,
        "folder or hub id of the tokenizer, where it is not the model's own",
        lambda v: v is None or _text(v),
        "a folder or a hub id",
    )
    data: tuple[str, ...] = _setting(
        ("stdlib",),
        "text files, .jsonl files, folders of them, or 'stdlib' (Python's standard library)",
        _texts,
        "a list of paths, or 'stdlib'",
    )
    held_out: str | None = _setting(
        None,
        "file or folder to measure the held-out loss on, instead of a share of the data",
        lambda v: v is None or _text(v),
        "a path",
    )
    held_out_share: float = _setting(
        0.1,
        "share of the data to hold out where held_out is not given",
        lambda v: _number(0, 0.5)(v) and v > 0,
        "more than 0, up to 0.5",
    )
    output: str = _setting("finetune-run", "folder of the run", _text, "a folder")
    method: str = _setting(
        "lora",
        "train adapters (lora), every weight (full), or adapters on pairs of answers (dpo)",
        _one_of("lora", "full", "dpo"),
        "'lora', 'full' or 'dpo'",
    )
    lora_rank: int = _setting(8, "rank of the adapters", _int(1), "an int >= 1")
    lora_alpha: float = _setting(
        16.0, "scale of the adapters (alpha / rank)", _number(0), "a number"
    )
    lora_dropout: float = _setting(0.0, "dropout in the adapters", _number(0, 1), "0 to 1")
    lora_targets: tuple[str, ...] = _setting(
        ("all-linear",),
        "modules that get adapters, such as q_proj v_proj, or all-linear",
        _texts,
        "a list of module names, or 'all-linear'",
    )
    assistant_only: bool = _setting(
        False,
        "of conversations, learn only what the assistant says",
        _one_of(True, False),
        "true or false",
    )
    packing: bool = _setting(
        False,
        "put several short records into one row; they do not see each other",
        _one_of(True, False),
        "true or false",
    )
    dpo_beta: float = _setting(
        0.1, "dpo: pull towards the model as it was", lambda v: _number(0)(v) and v > 0, "above 0"
    )
    dpo_label_smoothing: float = _setting(
        0.0,
        "dpo: chance that a pair is labelled the wrong way round",
        lambda v: _number(0, 0.5)(v) and v < 0.5,
        "0 up to, not including, 0.5",
    )
    quantize: str = _setting(
        "nf4",
        "codec of the frozen weights, or 'none' (full always uses none)",
        _text,
        "'none', 'auto' or an installed codec",
    )
    block_limit: str | None = _setting(
        None,
        "most device memory that decoder-layer weights may take, e.g. 24MiB; the rest streams",
        _size,
        "bytes, or a text like '24MiB'",
    )
    options: tuple[str, ...] = _setting(
        (),
        "further options of trainstream.wrap and load_model (docs/options.md), as name=value; in "
        "YAML a mapping",
        lambda v: isinstance(v, tuple) and all(_text(item) for item in v),
        "name=value texts, or a mapping of names to values",
    )
    seq_length: int = _setting(512, "tokens per row", _int(2), "an int >= 2")
    batch_size: int = _setting(1, "rows per micro-batch", _int(1), "an int >= 1")
    accumulation: int = _setting(1, "micro-batches per step", _int(1), "an int >= 1")
    steps: int = _setting(100, "optimizer steps", _int(1), "an int >= 1")
    epochs: float | None = _setting(
        None,
        "passes over the data; decides in place of steps",
        lambda v: v is None or (_number(0)(v) and v > 0),
        "a number above 0",
    )
    lr: float = _setting(2e-4, "peak learning rate", _number(0), "a number >= 0")
    warmup: float = _setting(0.05, "share of the steps that warm up", _number(0, 1), "0 to 1")
    schedule: str = _setting(
        "cosine",
        "learning-rate schedule",
        _one_of("cosine", "linear", "constant"),
        "'cosine', 'linear' or 'constant'",
    )
    weight_decay: float = _setting(0.0, "decoupled weight decay", _number(0), "a number >= 0")
    max_grad_norm: float = _setting(
        1.0, "clip the gradient norm to this", _number(0), "a number >= 0"
    )
    gradient_checkpointing: bool = _setting(
        False, "recompute activations in backward", _one_of(True, False), "true or false"
    )
    eval_rows: int = _setting(16, "rows the held-out loss is measured on", _int(1), "an int >= 1")
    eval_every: int = _setting(
        0, "steps between held-out losses; 0: before and after only", _int(0), "an int >= 0"
    )
    samples: int = _setting(
        2, "texts generated before and after, from held-out beginnings", _int(0), "an int >= 0"
    )
    prompts: tuple[str, ...] = _setting(
        (),
        "texts to go on from instead of held-out ones; of a model with a chat template a user's "
        "turn, unless it learns from plain prompts and completions",
        lambda v: isinstance(v, tuple) and all(_text(item) for item in v),
        "a list of texts",
    )
    sample_tokens: int = _setting(48, "tokens generated per sample", _int(1), "an int >= 1")
    merge: str = _setting(
        "none",
        "also save the whole model with the adapters merged in: into the 'original' weights or "
        "the 'dequantized' ones",
        _one_of("none", "original", "dequantized"),
        "'none', 'original' or 'dequantized'",
    )
    save_every: int = _setting(50, "steps between checkpoints", _int(1), "an int >= 1")
    keep_checkpoints: int = _setting(2, "checkpoints to keep", _int(1), "an int >= 1")
    seed: int = _setting(
        0,
        "seed of everything random, below 2**32",
        lambda v: _int(0)(v) and v < 2**32,
        "0 up to 2**32 - 1",
    )
    dtype: str = _setting(
        "auto",
        "dtype to compute in; auto takes the fastest of bf16 and fp32",
        _one_of("auto", "bfloat16", "float32"),
        "'auto', 'bfloat16' or 'float32'",
    )
    device: str = _setting(
        "auto",
        "auto takes the GPU if there is one",
        _one_of("auto", "cuda", "cpu"),
        "'auto', 'cuda' or 'cpu'",
    )

    @property
    def block_limit_bytes(self) -> int | None:
        """The block limit in bytes, or None."""
        return parse_bytes("block_limit", self.block_limit)


# What --demo changes among the defaults: small enough for three minutes on two CPU cores.
DEMO: dict[str, Any] = {
    "model": "smollm2-135m-instruct",
    "data": ("stdlib",),
    "output": "finetune-demo",
    "quantize": "nf4",
    "block_limit": "24MiB",
    "seq_length": 256,
    "batch_size": 4,
    "steps": 12,
    "lr": 2e-3,
    "warmup": 0.0,
    "eval_rows": 8,
    "save_every": 4,
    "samples": 1,
    "sample_tokens": 12,
}

# A changed value of these does not make another run.
FREE_TO_CHANGE = ("output", "save_every", "keep_checkpoints", "merge")
