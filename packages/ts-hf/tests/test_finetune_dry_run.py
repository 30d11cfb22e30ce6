"""`trainstream finetune --dry-run`: everything is checked and told, nothing is read or written."""

from __future__ import annotations

import argparse
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ts_core.errors import DataError, OptionError, OutOfBudgetError
from ts_hf.cli import run as run_module
from ts_hf.cli.config import make_config, read_yaml
from ts_hf.cli.dry_run import dry_run
from ts_hf.cli.finetune import command
from ts_hf.cli.run import run_finetune
from ts_hf.cli.settings import FinetuneConfig

pytest.importorskip("peft", reason="the optional package peft is not installed")
pytestmark = pytest.mark.usefixtures("no_page")


@pytest.fixture
def begin(tiny_llm: Path, tmp_path: Path, codec: str) -> Callable[..., FinetuneConfig]:
    """begin(**changes): settings on a few texts."""
    (tmp_path / "a.txt").write_text("some words to learn from. " * 100)

    def make(**changes: Any) -> FinetuneConfig:
        values: dict[str, Any] = {
            "model": str(tiny_llm),
            "data": (str(tmp_path / "a.txt"),),
            "output": str(tmp_path / "out"),
            "quantize": codec,
            "seq_length": 32,
            "steps": 2,
            "samples": 0,
            "eval_rows": 2,
            "device": "cpu",
            "dtype": "float32",
        }
        return FinetuneConfig(**{**values, **changes})

    return make


def _told(config: FinetuneConfig) -> str:
    text = io.StringIO()
    assert dry_run(config, Console(file=text, width=80)) == 0
    return text.getvalue()


def test_plan_is_that_of_the_run(
    begin: Callable[..., FinetuneConfig], tiny_llm: Path, tmp_path: Path
) -> None:
    config = begin(block_limit="60KiB")
    weights = tiny_llm / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()  # no weight is needed
    before = sorted(tmp_path.rglob("*"))
    told = _told(config)
    assert sorted(tmp_path.rglob("*")) == before
    weights.write_bytes(content)
    assert run_finetune(config, Console(file=io.StringIO())) == 0
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    paged = len(results["memory"]["paged_blocks"])
    assert f"{6 - paged} layers stay on the device, {paged} stream through" in told
    notes = json.loads((tmp_path / "out" / "run.json").read_text())
    assert f"{notes['model']['trained']:,} trained values" in told
    count, tokens = notes["rows"]["train"], notes["rows"]["train_tokens"]
    assert re.search(rf"\b{count} of about [\d,]+ rows to train on \({tokens:,} tokens\)", told)
    assert "a new run" in told and "finished; the command would do nothing" in _told(config)


def test_settings_it_prints_make_the_same_run(
    begin: Callable[..., FinetuneConfig], tmp_path: Path
) -> None:
    config = begin(prompts=("a: [b]",), lr=3e-5)
    told = _told(config)
    lines = told.split("settings:\n")[1].split("data:\n  1 documents")[0].splitlines()
    (tmp_path / "c.yaml").write_text("\n".join(line[2:] for line in lines if line[:2] == "  "))
    assert make_config(("c.yaml", read_yaml(tmp_path / "c.yaml"))) == config


def test_a_run_that_was_stopped(
    begin: Callable[..., FinetuneConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(self: Any, *args: Any) -> None:
        raise KeyboardInterrupt

    config = begin(save_every=1)
    with monkeypatch.context() as patch:
        patch.setattr(run_module._Run, "_finish", dies)
        run_finetune(config, Console(file=io.StringIO()))
    assert "would go on from checkpoint-2" in _told(config)
    with pytest.raises(OptionError, match=r"other settings \(lr:"):
        _told(begin(save_every=1, lr=9.0))


def test_what_would_stop_the_run(begin: Callable[..., FinetuneConfig], tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": 1}\n')
    for changes, error, words in (
        ({"block_limit": "8KiB"}, OutOfBudgetError, "too small"),
        ({"block_limit": "8KiB", "method": "full"}, OutOfBudgetError, "too small"),
        ({"data": (str(tmp_path / "bad.jsonl"),)}, DataError, "line 1"),
        ({"seq_length": 4096}, OptionError, "2048 positions"),
        ({"lora_targets": ("nothing",)}, OptionError, "lora_targets"),
        ({"model": "/no/such"}, DataError, "no folder"),
        ({"method": "full", "merge": "original"}, OptionError, "nothing to merge"),
    ):
        with pytest.raises(error, match=words):
            _told(begin(**changes))
    assert not (tmp_path / "out").exists()


def test_the_flag(begin: Callable[..., FinetuneConfig], capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    config = begin()
    flags = ["--model", config.model, "--data", *config.data, "--output", config.output]
    flags += ["--seq-length", "32", "--device", "cpu", "--steps", "1", "--method", "full"]
    assert command.run(parser.parse_args([*flags, "--dry-run"])) == 0
    printed = capsys.readouterr().out
    assert "6 layers of up to" in printed and "in full precision; computed in" in printed
    assert not Path(config.output).exists()
