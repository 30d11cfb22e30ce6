"""docs/finetune.md: its settings are the code's, and its examples run."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from ts_hf.cli.config import make_config, read_yaml
from ts_hf.cli.dry_run import dry_run
from ts_hf.cli.run import run_finetune
from ts_hf.cli.settings import FREE_TO_CHANGE, FinetuneConfig

PAGE = Path(__file__).resolve().parent.parent / "docs" / "finetune.md"
TEXT = PAGE.read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"<!-- example: (\w+) -->\n```yaml\n(.*?)```", TEXT, re.DOTALL))


def _shown(default: Any) -> str:
    if default is None or default == ():
        return ""
    if isinstance(default, tuple):
        return ", ".join(f"`{item}`" for item in default)
    return f"`{str(default).lower()}`" if isinstance(default, bool) else f"`{default}`"


def test_the_table_of_settings_is_the_codes() -> None:
    rows = [
        f"| `{item.name}` | {_shown(item.default)} | {item.metadata['help']} |"
        for item in dataclasses.fields(FinetuneConfig)
    ]
    table = "| key | default | meaning |\n|---|---|---|\n" + "\n".join(rows)
    found = TEXT.split("<!-- settings -->\n")[1].split("\n<!-- settings end -->")[0]
    assert found == table


def test_what_may_change_is_named() -> None:
    listed = re.search(r"\n(`output`.*?) may change when", TEXT, re.DOTALL)
    assert listed is not None
    assert set(re.findall(r"`(\w+)`", listed.group(1))) == set(FREE_TO_CHANGE)


def test_the_page_tells_every_kind_of_line() -> None:
    from ts_hf.cli import history

    kinds = re.findall(r"^- (\w+):", history.__doc__ or "", re.MULTILINE)
    assert len(kinds) == 8
    for kind in kinds:
        assert f"\n| `{kind}` | " in TEXT


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    """A tiny model with a tokenizer of bytes and a chat template, and data beside it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    letters = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '<end>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    fast.save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(letters),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=0,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    texts = tmp_path / "texts"
    texts.mkdir()
    for index in range(24):
        (texts / f"{index}.txt").write_text(f"a text about number {index}. " * 6)
    records: dict[str, Callable[[int], Any]] = {
        "more": lambda i: {"text": f"and one more text, number {i}. " * 4},
        "chats": lambda i: {
            "messages": [
                {"role": "user", "content": f"{i}?"},
                {"role": "assistant", "content": f"{i}!"},
            ]
        },
        "pairs": lambda i: {"prompt": f"{i}? ", "chosen": f"{i}!", "rejected": "no"},
    }
    for name, make in records.items():
        lines = [json.dumps(make(i)) for i in range(24)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_example(name: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands, on a tiny model; only sizes and lengths are smaller."""
    monkeypatch.chdir(tiny_folder)
    (tiny_folder / "settings.yaml").write_text(
        EXAMPLES[name].replace("path/to/model", "model"), encoding="utf-8"
    )
    given = read_yaml(tiny_folder / "settings.yaml")
    smaller = {
        "seq_length": 40,
        "eval_rows": 2,
        "sample_tokens": 2,
        "device": "cpu",
        "dtype": "float32",
        "accumulation": 1,
        "steps": 2,
        "epochs": None,
    }
    config = make_config(("settings.yaml", given), ("command line", smaller))
    printed = io.StringIO()
    assert dry_run(config, Console(file=printed, width=200)) == 0
    assert "a new run" in printed.getvalue() and not Path(config.output).exists()
    assert run_finetune(config, Console(file=printed, width=200)) == 0
    made = {path.name for path in Path(config.output).iterdir()}
    assert {"results.json", "report.html", "history.jsonl", "run.json"} <= made
    assert ("model" if name == "full" else "adapter") in made
    assert ("merged" in made) == (name == "chat")
    assert ("reference.safetensors" in made) == (name == "dpo")
    last = printed.getvalue().strip().splitlines()[-1]
    assert last == f"report: {config.output}/report.html"
    for file in made - {"run.lock"}:
        assert f"| `{file}" in TEXT, file  # the page lists what is left
