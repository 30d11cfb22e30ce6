"""The settings of a fine-tune: one table for flags, YAML keys, defaults and checks."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ts_core.config import parse_bytes
from ts_core.errors import OptionError


def _setting(default: Any, help: str, check: Callable[[Any], bool], accepts: str) -> Any:
    return field(default=default, metadata={"help": help, "check": check, "accepts": accepts})


def _int(least: int) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= least


def _number(low: float, high: float = float("inf")) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, (int, float)) and not isinstance(v, bool) and low <= v <= high


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
        "folder or hub id of a safetensors checkpoint, or 'smollm2-135m-instruct' (the demo model)",
        _text,
        "a folder, a hub id or 'smollm2-135m-instruct'",
    )
    data: tuple[str, ...] = _setting(
        ("stdlib",),
        "text files, folders of them, .jsonl files, or 'stdlib' (Python's standard library)",
        _texts,
        "a list of paths, or 'stdlib'",
    )
    held_out: str | None = _setting(
        None,
        "file or folder to measure the held-out loss on; without it a tenth of the data",
        lambda v: v is None or _text(v),
        "a path",
    )
    output: str = _setting("finetune-run", "folder of the run", _text, "a folder")
    method: str = _setting(
        "lora",
        "train adapters (lora) or every weight (full)",
        _one_of("lora", "full"),
        "'lora' or 'full'",
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
    seq_length: int = _setting(512, "tokens per row", _int(2), "an int >= 2")
    batch_size: int = _setting(1, "rows per micro-batch", _int(1), "an int >= 1")
    accumulation: int = _setting(1, "micro-batches per step", _int(1), "an int >= 1")
    steps: int = _setting(100, "optimizer steps", _int(1), "an int >= 1")
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
    save_every: int = _setting(50, "steps between checkpoints", _int(1), "an int >= 1")
    keep_checkpoints: int = _setting(2, "checkpoints to keep", _int(1), "an int >= 1")
    seed: int = _setting(0, "seed of everything random", _int(0), "an int >= 0")
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
}

# A changed value of these does not make another run.
FREE_TO_CHANGE = ("output", "save_every", "keep_checkpoints")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per setting; what is not given on the command line stays absent."""
    for item in dataclasses.fields(FinetuneConfig):
        flag = f"--{item.name.replace('_', '-')}"
        many = isinstance(item.default, tuple)
        shown = " ".join(item.default) if isinstance(item.default, tuple) else item.default
        options: dict[str, Any] = {
            "dest": item.name,
            "default": argparse.SUPPRESS,
            "help": f"{item.metadata['help']} (default: {shown})",
        }
        if isinstance(item.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        elif many:
            parser.add_argument(flag, nargs="+", metavar="NAME", **options)
        else:
            kind = type(item.default) if isinstance(item.default, (int, float)) else str
            parser.add_argument(flag, type=kind, metavar=kind.__name__.upper(), **options)


def read_yaml(path: Path) -> dict[str, Any]:
    """The settings of a YAML file.

    Raises:
        OptionError: it cannot be read, or is no mapping; names the line.
    """
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not UTF-8 text: {error}.") from error
    except yaml.YAMLError as error:
        raise OptionError(f"{path} is not valid YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise OptionError(
            f"{path} holds a {type(content).__name__}; expected settings such as 'steps: 100'."
        )
    return content


def make_config(*layers: tuple[str, Mapping[str, Any]]) -> FinetuneConfig:
    """Settings from layers (where they come from, values); later layers win.

    Raises:
        OptionError: an unknown setting (with the nearest valid name) or a value not accepted.
    """
    known = {item.name: item for item in dataclasses.fields(FinetuneConfig)}
    values: dict[str, Any] = {}
    for origin, layer in layers:
        for name, value in layer.items():
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.4)
                hint = f" Did you mean {near[0]!r}?" if near else ""
                raise OptionError(f"{origin}: there is no setting {name!r}.{hint}")
            item = known[name]
            value = _coerce(item.default, value)
            if not item.metadata["check"](value):
                raise OptionError(
                    f"{origin}: {name}={value!r} is not accepted; expected "
                    f"{item.metadata['accepts']}."
                )
            values[name] = value
    return FinetuneConfig(**values)


def differing_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings in which two runs differ so that one cannot continue the other."""
    keys = {*old, *new} - set(FREE_TO_CHANGE)
    return {
        key: (old.get(key), new.get(key)) for key in sorted(keys) if old.get(key) != new.get(key)
    }


def _coerce(default: Any, value: Any) -> Any:
    if isinstance(default, tuple):
        return tuple(value) if isinstance(value, (list, tuple)) else (value,)
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(default, float) and isinstance(value, str):
        try:  # YAML reads 1e-3 as a text
            return float(value)
        except ValueError:
            return value
    return value
