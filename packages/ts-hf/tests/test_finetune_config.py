"""Settings: flags, YAML, checks, and what makes another run."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from ts_core.errors import OptionError
from ts_hf.cli.config import differing_keys, make_config, read_yaml, to_yaml
from ts_hf.cli.finetune import command
from ts_hf.cli.settings import DEMO, FinetuneConfig
from ts_hf.cli.streaming import for_loading, parse_options


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
        elif item.name in ("lora_dropout", "warmup", "held_out_share", "dpo_label_smoothing"):
            changed[item.name] = 0.25
        elif isinstance(default, int | float):
            changed[item.name] = default + 2
        elif item.name == "options":
            changed[item.name] = ("eager=true", "kernels=false")
        elif isinstance(default, tuple):
            changed[item.name] = ("one", "two")
        else:
            changed[item.name] = {
                "method": "full",
                "schedule": "linear",
                "dtype": "float32",
                "device": "cpu",
                "block_limit": "3MiB",
                "merge": "original",
                "epochs": 1.5,
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


def test_steps_on_the_command_line_replace_epochs_of_a_file() -> None:
    file = ("yaml", {"epochs": 2.0, "steps": 50})
    assert make_config(file).epochs == 2.0
    assert make_config(file, ("flags", {"steps": 7})).epochs is None
    assert make_config(("yaml", {"steps": 7}), ("flags", {"epochs": 1})).epochs == 1.0


def test_flags_not_given_are_absent() -> None:
    assert "steps" not in vars(_parse("--demo")) and vars(_parse("--steps", "3"))["steps"] == 3


@pytest.mark.parametrize(
    ("flag", "text", "words"),
    [
        ("--steps", "2.5", "steps='2.5' is not accepted; expected an int >= 1"),
        ("--lr", "fast", "lr='fast' is not accepted; expected a number >= 0"),
        ("--epochs", "all", "epochs='all' is not accepted"),
    ],
)
def test_a_flag_that_is_no_number_is_refused_as_in_a_file(flag: str, text: str, words: str) -> None:
    with pytest.raises(OptionError) as caught:
        command.run(_parse(flag, text))
    assert str(caught.value).startswith("command line: ") and words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("seq_lenght", 3, "there is no setting 'seq_lenght'. Did you mean 'seq_length'?"),
        ("learning_rate", 3, "there is no setting 'learning_rate'. It is called 'lr' here."),
        ("vram_limit", 3, "It stands under 'options': options: {vram_limit: ...}"),
        ("warm-up", 3, "there is no setting 'warm-up'. Did you mean 'warmup'?"),
        ("xyzzy", 3, "there is no setting 'xyzzy'."),
        ("steps", 0, "steps=0 is not accepted; expected an int >= 1"),
        ("steps", "many", "steps='many'"),
        ("steps", True, "steps=True"),
        ("lr", -1, "lr=-1"),
        ("lr", "fast", "lr='fast'"),
        ("lr", float("nan"), "lr=nan"),
        ("lr", float("inf"), "lr=inf"),
        ("lr", "nan", "lr=nan"),
        ("lr", 10**400, "lr=inf"),
        ("seed", 2**32, "seed=4294967296 is not accepted; expected 0 up to 2**32 - 1"),
        ("warmup", 1.5, "warmup=1.5"),
        ("epochs", 0, "epochs=0"),
        ("held_out_share", 0, "held_out_share=0.0 is not accepted; expected more than 0"),
        ("method", "dora", "method='dora' is not accepted; expected 'lora', 'full' or 'dpo'"),
        ("merge", "nf4", "merge='nf4' is not accepted"),
        ("prompts", [""], "prompts=('',)"),
        ("block_limit", "lots", "block_limit='lots'"),
        ("block_limit", 0, "block_limit=0"),
        ("block_limit", "24", "block_limit='24' is 24 bytes: did you mean 24GiB?"),
        ("block_limit", 24, "block_limit=24 is 24 bytes: did you mean 24GiB?"),
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


def test_everything_wrong_is_told_at_once_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("steps: 3\nlr: fast\n\nseq_lenght: 5\ndata: [nowhere/, stdlib]\n")
    with pytest.raises(OptionError) as caught:
        make_config(
            (str(file), read_yaml(file)), ("command line", {"seed": -1, "held_out": "none.txt"})
        )
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    assert "no file or folder 'nowhere/'" in lines[3] and "'none.txt'" in lines[4]
    assert lines[0].startswith(f"{file}, line 2: lr='fast'")
    assert lines[1].startswith(f"{file}, line 4: there is no setting 'seq_lenght'")
    assert lines[2].startswith("command line: seed=-1")


def test_settings_as_yaml_read_back_the_same(tmp_path: Path) -> None:
    config = make_config(("demo", DEMO), ("yaml", {"epochs": 2, "prompts": ["a: b", "é"]}))
    (tmp_path / "c.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert make_config(("c.yaml", read_yaml(tmp_path / "c.yaml"))) == config


def test_yaml_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        read_yaml(tmp_path / "none.yaml")
    file = tmp_path / "c.yaml"
    file.write_text("steps: [1")
    with pytest.raises(
        OptionError, match=r'c\.yaml is not valid YAML[\s\S]*in ".*c\.yaml", line 1'
    ):
        read_yaml(file)
    file.write_text("- steps")
    with pytest.raises(OptionError, match="holds a list; expected settings"):
        read_yaml(file)
    file.write_text("steps: 3\nseed: 1\nsteps: 4\n")
    with pytest.raises(OptionError, match="'steps' stands on line 1 and again on line 3"):
        read_yaml(file)
    file.write_bytes(b"data: caf\xe9")
    with pytest.raises(OptionError, match="not UTF-8"):
        read_yaml(file)
    file.write_text("a: 2020-99-99")
    with pytest.raises(OptionError, match="a value that YAML cannot read"):
        read_yaml(file)
    file.write_text("")
    assert read_yaml(file) == {}


def test_yaml_runs_no_code(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("a: !!python/object/apply:os.system ['true']")
    with pytest.raises(OptionError, match="not valid YAML"):
        read_yaml(tmp_path / "c.yaml")


def test_options_of_wrap_as_mapping_and_as_texts(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "options:\n  activation_offload: 0.5\n  optimizer_mode: hybrid\n  eager: null\n"
    )
    config = make_config(("c.yaml", read_yaml(file)))
    assert config.options == ("activation_offload=0.5", "optimizer_mode=hybrid", "eager=null")
    wanted = {"activation_offload": 0.5, "optimizer_mode": "hybrid", "eager": None}
    assert parse_options(config.options) == wanted
    texts = ["error_rank=4", "keep_precise=0.1", "param_offload=[0, 2]", "disk_offload=/tmp/x"]
    config = make_config(("flags", {"options": texts}))
    assert parse_options(config.options)["param_offload"] == [0, 2]
    assert for_loading(config.options) == {
        "error_rank": 4,
        "keep_precise": 0.1,
        "disk_offload": "/tmp/x",
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("eager", "'eager' is not accepted; expected name=value"),
        ("=3", "'=3' is not accepted"),
        ("egaer=true", "has no option 'egaer'. Did you mean 'eager'?"),
        ("eager=sometimes", "eager='sometimes' is not accepted"),
        ("quantize=nf4", "quantize is a setting of its own: 'quantize'"),
        ("accumulation_steps=2", "is a setting of its own: 'accumulation'"),
        ("blocks=[1]", "blocks can only be given from Python"),
        ("threads=[", "the value is not valid YAML"),
        ("vram_limit=12", "12 bytes: did you mean 12GiB"),
        ("vram_limit=1GiB", "block_limit decides vram_limit"),
    ],
)
def test_options_not_accepted(text: str, words: str) -> None:
    with pytest.raises(OptionError, match=r"^options: ") as caught:
        make_config(("flags", {"options": [text], "block_limit": "1GiB"}))
    assert words in str(caught.value)
    with pytest.raises(OptionError, match="eager is given twice"):
        make_config(("flags", {"options": ["eager=true", "eager=false"]}))


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--seq-lenght", "Did you mean --seq-length?"),
        ("--optimizer-mode", "It is one of the options: --options optimizer_mode=..."),
        ("--chunked-loss=false", "It is one of the options: --options chunked_loss=..."),
        ("--learning-rate=3", "It is called --lr here."),
    ],
)
def test_unknown_flags_are_answered_with_the_nearest(flag: str, words: str) -> None:
    with pytest.raises(OptionError) as caught:
        _parse(flag)
    assert str(caught.value) == f"there is no flag {flag.partition('=')[0]}. {words}"


def test_differing_keys() -> None:
    old = dataclasses.asdict(make_config(("demo", DEMO)))
    assert differing_keys(old, {**old, "save_every": 99, "output": "x", "merge": "original"}) == {}
    assert differing_keys(old, {**old, "lr": 1.0}) == {"lr": (old["lr"], 1.0)}


def test_nothing_given() -> None:
    with pytest.raises(OptionError, match="nothing to do"):
        command.run(_parse())
