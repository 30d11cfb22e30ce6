"""The README's example runs as it stands, and the public names are what the package says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ts_hf
from ts_core.registry import commands

README = Path(__file__).resolve().parent.parent / "README.md"


@pytest.fixture
def blocks() -> list[str]:
    """The examples of the README that are marked as tested: the first, and the one of TRL."""
    found = re.findall(r"<!-- tested -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(found) == 2
    return found


def test_example(
    blocks: list[str],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    codec: str,
) -> None:
    pytest.importorskip("peft", reason="the optional package peft is not installed")
    folder = checkpoint("llama")
    monkeypatch.chdir(tmp_path)
    code = blocks[0].replace("path/to/checkpoint", str(folder))
    code = code.replace("report_to=[],", "report_to=[], use_cpu=True, disable_tqdm=True,")
    exec(compile(code, str(README), "exec"), {})
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").is_file()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "adapter",
        "checkpoint-4",
        "checkpoint-8",
    ]


@pytest.mark.filterwarnings("ignore::FutureWarning:trl")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:(datasets|multiprocess|dill|trl)")
def test_example_of_trl(
    blocks: list[str],
    checkpoint: Callable[..., Path],
    byte_tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    codec: str,
) -> None:
    pytest.importorskip("peft", reason="the optional package peft is not installed")
    pytest.importorskip("trl", reason="the package trl is not installed")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = checkpoint("llama", vocab_size=len(byte_tokenizer))
    byte_tokenizer.save_pretrained(folder)
    lines = (json.dumps({"text": f"row {number}"}) for number in range(8))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    code = blocks[1].replace("path/to/checkpoint", str(folder))
    more = "max_steps=2, report_to=[], use_cpu=True, bf16=False, disable_tqdm=True, "
    code = code.replace("SFTConfig(", f"SFTConfig({more}")
    space: dict[str, Any] = {}
    exec(compile(code, str(README), "exec"), space)
    assert space["trainer"].state.global_step == 2
    assert space["trainer"].model._trainstream_session.config.blocks is not None


def test_example_of_paged_experts(
    checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str], codec: str
) -> None:
    pytest.importorskip("peft", reason="the optional package peft is not installed")
    (code,) = re.findall(r"<!-- experts -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    code = code.replace("path/to/checkpoint", str(checkpoint("mixtral")))
    code = code.replace("moe_paging=True", "moe_paging=True, device='cpu'")
    exec(compile(code, str(README), "exec"), {})
    assert "'load_bytes'" in capsys.readouterr().out


def test_public_names() -> None:
    assert set(ts_hf.__all__) == set(ts_hf._HOMES)
    for name in ts_hf.__all__:
        assert getattr(ts_hf, name) is not None
        assert name in dir(ts_hf)
    with pytest.raises(AttributeError, match="no attribute 'load_modle'"):
        ts_hf.load_modle  # noqa: B018


def test_the_command_is_found_by_its_entry_point() -> None:
    command = commands.get("finetune")
    assert command.API_VERSION == 1 and "fine-tune" in command.help
