"""The README's example runs as it stands, and the public names are what the package says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import ts_hf
from ts_core.registry import commands

README = Path(__file__).resolve().parent.parent / "README.md"


def test_example(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    pytest.importorskip("peft", reason="the optional package peft is not installed")
    blocks = re.findall(r"<!-- tested -->\n```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 1
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
