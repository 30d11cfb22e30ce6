"""Settings from flags and YAML files, checked; everything wrong is told at once."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ts_core.config import parse_bytes
from ts_core.errors import DataError, OptionError
from ts_hf.cli.settings import FREE_TO_CHANGE, FinetuneConfig
from ts_hf.cli.streaming import as_texts, check_with_limit, is_option, yaml_words

# Names that other tools use for what is called something else here.
_ALIASES = {
    "learning_rate": "lr",
    "lr_scheduler_type": "schedule",
    "max_seq_length": "seq_length",
    "max_length": "seq_length",
    "max_steps": "steps",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "accumulation",
    "warmup_ratio": "warmup",
    "output_dir": "output",
    "model_name_or_path": "model",
    "dataset": "data",
    "train_file": "data",
    "validation_file": "held_out",
    "save_steps": "save_every",
    "eval_steps": "eval_every",
    "save_total_limit": "keep_checkpoints",
    "r": "lora_rank",
    "lora_r": "lora_rank",
    "target_modules": "lora_targets",
    "beta": "dpo_beta",
}


class YamlSettings(dict[str, Any]):
    """The settings of a YAML file, and the line that each stands on."""

    def __init__(self, values: Mapping[str, Any], lines: Mapping[str, int]) -> None:
        super().__init__(values)
        self.lines = dict(lines)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per setting; what is not given on the command line stays absent."""
    for item in dataclasses.fields(FinetuneConfig):
        flag = f"--{item.name.replace('_', '-')}"
        many = isinstance(item.default, tuple)
        shown = " ".join(item.default) if isinstance(item.default, tuple) else item.default
        told = "" if shown in (None, "") else f" (default: {shown})"
        options: dict[str, Any] = {
            "dest": item.name,
            "default": argparse.SUPPRESS,
            "help": f"{item.metadata['help']}{told}".replace("%", "%%"),
        }
        if isinstance(item.default, bool):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
        elif many:
            parser.add_argument(flag, nargs="+", metavar="NAME", **options)
        else:
            kind = _number_type(item)
            if kind is not None:
                options["type"] = functools.partial(_number, kind)
            parser.add_argument(flag, metavar=(kind or str).__name__.upper(), **options)


def _number_type(item: dataclasses.Field[Any]) -> type[int] | type[float] | None:
    if isinstance(item.default, (int, float)):
        return type(item.default)
    return float if "float" in str(item.type) else None


def _number(kind: type[int] | type[float], text: str) -> int | float | str:
    """The number that `text` is, or `text`, which `make_config` then refuses in its own words."""
    try:
        return kind(text)
    except ValueError:
        return text


def name_unknown_flags(parser: argparse.ArgumentParser) -> None:
    """Let `parser` answer a flag that it does not know with the nearest one that it does.

    argparse hands unknown flags up to the parser of the whole command, which only repeats them.
    """
    parse = parser.parse_known_args

    def parse_known_args(*args: Any, **kwargs: Any) -> Any:
        found, unknown = parse(*args, **kwargs)
        flags = [text.partition("=")[0] for text in unknown if text.startswith("-")]
        if flags:
            raise OptionError(
                "\n".join(f"there is no flag {flag}.{_flag_hint(parser, flag)}" for flag in flags)
            )
        return found, unknown

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def _flag_hint(parser: argparse.ArgumentParser, flag: str) -> str:
    plain = flag.lstrip("-").lower().replace("-", "_")
    if plain in _ALIASES:
        return f" It is called --{_ALIASES[plain].replace('_', '-')} here."
    if is_option(plain):
        return f" It is one of the options: --options {plain}=..."
    known = list(parser._option_string_actions)
    near = difflib.get_close_matches(flag, known, n=1, cutoff=0.4)
    return f" Did you mean {near[0]}?" if near else ""


def read_yaml(path: Path) -> YamlSettings:
    """The settings of a YAML file.

    Raises:
        OptionError: it cannot be read, is no mapping, or has a key twice; names the line.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8-sig")
        node = yaml.compose(text, yaml.SafeLoader)
        content = yaml.safe_load(text)
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not UTF-8 text: {error}.") from error
    except yaml.YAMLError as error:
        words = yaml_words(error, str(path))
        raise OptionError(f"{path} is not valid YAML: {words}") from error
    except ValueError as error:  # such as a date that does not exist
        raise OptionError(f"{path} has a value that YAML cannot read: {error}") from error
    if content is None:
        return YamlSettings({}, {})
    if not isinstance(content, dict) or not isinstance(node, yaml.MappingNode):
        raise OptionError(
            f"{path} holds a {type(content).__name__}; expected settings such as 'steps: 100'."
        )
    lines: dict[str, int] = {}
    for key, _ in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in lines:
            raise OptionError(
                f"{path}: {name!r} stands on line {lines[name]} and again on line {line}. "
                f"Keep one of them."
            )
        lines[name] = line
    return YamlSettings({str(name): value for name, value in content.items()}, lines)


def make_config(*layers: tuple[str, Mapping[str, Any]]) -> FinetuneConfig:
    """Settings from layers (where they come from, values); later layers win.

    Of steps and epochs, epochs decide within a layer.

    Raises:
        OptionError: unknown settings (with the nearest valid name), values not accepted; all of
            them, each with where it comes from.
    """
    known = {item.name: item for item in dataclasses.fields(FinetuneConfig)}
    values: dict[str, Any] = {}
    wrong: list[str] = []
    for origin, layer in layers:
        lines = layer.lines if isinstance(layer, YamlSettings) else {}
        if "steps" in layer and "epochs" not in layer:
            values.pop("epochs", None)  # of an earlier layer, which the steps replace
        for name, value in layer.items():
            place = f"{origin}, line {lines[name]}" if name in lines else origin
            if name not in known:
                wrong.append(f"{place}: there is no setting {name!r}.{_hint(str(name))}")
                continue
            item = known[name]
            if name == "options" and isinstance(value, Mapping):
                value = as_texts(value)
            value = _coerce(item.default, str(item.type), value)
            if not item.metadata["check"](value):
                wrong.append(f"{place}: {_refusal(item, value)}")
            values[name] = value
    if wrong:
        raise OptionError("\n".join([*wrong, *_missing(values)]))
    config = FinetuneConfig(**values)
    check_with_limit(config.options, config.block_limit)
    return config


def to_yaml(config: FinetuneConfig) -> str:
    """All settings as YAML that reads back the same."""
    import yaml

    values = dataclasses.asdict(config)
    plain = {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
    }
    text: str = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, width=1000)
    return text


def differing_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings in which two runs differ so that one cannot continue the other."""
    keys = {*old, *new} - set(FREE_TO_CHANGE)
    return {
        key: (old.get(key), new.get(key)) for key in sorted(keys) if old.get(key) != new.get(key)
    }


def _missing(values: Mapping[str, Any]) -> list[str]:
    """Data that is not there, to be told with what else is wrong; else the run refuses it."""
    from ts_hf.cli.sources import check_sources  # imports this module

    sources = [values.get("data", ()), (values.get("held_out"),)]
    found = []
    for source in (source for some in sources if isinstance(some, tuple) for source in some):
        try:
            check_sources([source] if isinstance(source, str) and source else [])
        except DataError as error:
            found.append(str(error))
    return found


def _refusal(item: dataclasses.Field[Any], value: Any) -> str:
    """Why a value is not accepted."""
    if item.name == "block_limit" and str(value).strip().isdigit():
        try:
            parse_bytes(item.name, value)
        except OptionError as error:  # it knows what a number without a unit means
            return str(error)
    return f"{item.name}={value!r} is not accepted; expected {item.metadata['accepts']}."


def _hint(name: str) -> str:
    """The setting that was probably meant, in words."""
    plain = name.strip().lower().replace("-", "_")
    if plain in _ALIASES:
        return f" It is called {_ALIASES[plain]!r} here."
    if is_option(plain):
        return f" It stands under 'options': options: {{{plain}: ...}}"
    names = [item.name for item in dataclasses.fields(FinetuneConfig)]
    near = difflib.get_close_matches(plain, names, n=1, cutoff=0.4)
    return f" Did you mean {near[0]!r}?" if near else ""


def _coerce(default: Any, annotation: str, value: Any) -> Any:
    if isinstance(default, tuple):
        return tuple(value) if isinstance(value, (list, tuple)) else (value,)
    number = isinstance(default, float) or "float" in annotation
    whole = isinstance(value, int) and not isinstance(value, bool)
    if number and (whole or isinstance(value, str)):
        try:  # YAML reads 1e-3 as a text
            return float(value)
        except ValueError:
            return value
        except OverflowError:
            return math.inf
    return value
