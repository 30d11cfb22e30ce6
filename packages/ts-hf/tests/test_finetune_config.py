"""Settings: flags, YAML, checks, and what makes another run."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from ts_core.errors import OptionError
from ts_hf.cli.config import DEMO, FinetuneConfig, differing_keys, make_config, read_yaml
from ts_hf.cli.finetune import command


def _parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return parser.parse_args(arguments)


def test_defaults_and_demo_are_accepted() -> None:
    assert make_config() == FinetuneConfig()
    demo = make_config(("--demo", DEMO))
    assert demo.block_limit_bytes == 24 << 20 and demo.quantize == "nf4"
    assert FinetuneConfig().block_limit_bytes is None


def test_every_setting_is_a_flag_and_a_yaml_key(tmp_path: Path) -> None:
    changed: dict[str, Any] = {}
    for item in dataclasses.fields(FinetuneConfig):
        default = item.default
        if isinstance(default, bool):
            changed[item.name] = not default
        elif item.name in ("lora_dropout", "warmup"):
            changed[item.name] = 0.25
        elif isinstance(default, int | float):
            changed[item.name] = default + 2
        elif isinstance(default, tuple):
            changed[item.name] = ("one", "two")
        else:
            changed[item.name] = {
                "method": "full",
                "schedule": "linear",
                "dtype": "float32",
                "device": "cpu",
                "block_limit": "3MiB",
            }.get(item.name, "other")
    flags: list[str] = []
    for name, value in changed.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            values = value if isinstance(value, tuple) else (value,)
            flags += [f"--{flag}", *(str(part) for part in values)]
    parsed = vars(_parse(*flags))
    from_flags = make_config(("flags", {name: parsed[name] for name in changed}))
    lines = [
        f"{name}: [{', '.join(value)}]" if isinstance(value, tuple) else f"{name}: {value}"
        for name, value in changed.items()
    ]
    (tmp_path / "c.yaml").write_text("\n".join(lines).replace("True", "true"))
    from_yaml = make_config(("c.yaml", read_yaml(tmp_path / "c.yaml")))
    assert from_flags == from_yaml == FinetuneConfig(**changed)


def test_flags_win_over_yaml_and_yaml_over_the_demo() -> None:
    config = make_config(("demo", DEMO), ("yaml", {"steps": 3, "seed": 4}), ("flags", {"seed": 5}))
    assert (config.steps, config.seed, config.seq_length) == (3, 5, DEMO["seq_length"])


def test_flags_not_given_are_absent() -> None:
    assert "steps" not in vars(_parse("--demo")) and vars(_parse("--steps", "3"))["steps"] == 3


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("seq_lenght", 3, "there is no setting 'seq_lenght'. Did you mean 'seq_length'?"),
        ("learning_rate", 3, "there is no setting 'learning_rate'"),
        ("steps", 0, "steps=0 is not accepted; expected an int >= 1"),
        ("steps", "many", "steps='many'"),
        ("steps", True, "steps=True"),
        ("lr", -1, "lr=-1"),
        ("lr", "fast", "lr='fast'"),
        ("warmup", 1.5, "warmup=1.5"),
        ("method", "dora", "method='dora' is not accepted; expected 'lora' or 'full'"),
        ("block_limit", "lots", "block_limit='lots'"),
        ("block_limit", 0, "block_limit=0"),
        ("data", [], "data="),
        ("gradient_checkpointing", 1, "gradient_checkpointing=1"),
    ],
)
def test_values_not_accepted(name: str, value: Any, words: str) -> None:
    with pytest.raises(OptionError) as caught:
        make_config(("my.yaml", {name: value}))
    assert str(caught.value).startswith("my.yaml: ") and words in str(caught.value)


def test_yaml_numbers_as_people_write_them() -> None:
    config = make_config(("yaml", {"lr": "1e-3", "lora_alpha": 8, "data": "stdlib"}))
    assert config.lr == 1e-3 and config.lora_alpha == 8.0 and config.data == ("stdlib",)


def test_yaml_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        read_yaml(tmp_path / "none.yaml")
    file = tmp_path / "c.yaml"
    file.write_text("steps: [1")
    with pytest.raises(OptionError, match=r"c\.yaml is not valid YAML[\s\S]*line 1"):
        read_yaml(file)
    file.write_text("- steps")
    with pytest.raises(OptionError, match="holds a list; expected settings"):
        read_yaml(file)
    file.write_text("")
    assert read_yaml(file) == {}


def test_yaml_runs_no_code(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("a: !!python/object/apply:os.system ['true']")
    with pytest.raises(OptionError, match="not valid YAML"):
        read_yaml(tmp_path / "c.yaml")


def test_differing_keys() -> None:
    old = dataclasses.asdict(make_config(("demo", DEMO)))
    assert differing_keys(old, {**old, "save_every": 99, "output": "elsewhere"}) == {}
    assert differing_keys(old, {**old, "lr": 1.0}) == {"lr": (old["lr"], 1.0)}


def test_nothing_given() -> None:
    with pytest.raises(OptionError, match="nothing to do"):
        command.run(_parse())
