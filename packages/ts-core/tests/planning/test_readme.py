"""The README's commands and example of planning run as they stand."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from ts_core.planning import command
from ts_core.schedule import hardware

README = Path(__file__).resolve().parents[2] / "README.md"


def examples(mark: str) -> list[str]:
    found = re.findall(rf"<!-- {mark} -->\n```\w+\n(.*?)```", README.read_text(), re.DOTALL)
    assert found
    return found


def test_commands(
    tiny_reader: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("matplotlib", reason="one of them draws")
    monkeypatch.chdir(tmp_path)
    parser = argparse.ArgumentParser()
    command.configure(parser)
    lines = [line for text in examples("plan") for line in text.splitlines()]
    assert len(lines) == 3
    for line in lines:
        words = shlex.split(line)
        assert words[:3] == ["trainstream", "plan", "MODEL"]
        assert command.run(parser.parse_args(["small", *words[3:]])) == 0
    assert (tmp_path / "plan.svg").exists()
    assert '"fits": true' in capsys.readouterr().out


def test_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRAINSTREAM_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(hardware, "_MIB", 1 << 12)
    for code in examples("profile"):
        exec(compile(code, str(README), "exec"), {})
    assert "host AdamW" in capsys.readouterr().out
