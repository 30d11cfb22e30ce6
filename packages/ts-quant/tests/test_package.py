"""What importing the package does, and what it offers."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

import ts_quant

PROBE = """
import sys
import torch
before = set(sys.modules)
import ts_quant
q = ts_quant.quantize(torch.randn(8, 64), "nf4")
q.dequantize()
torch.nn.functional.linear(torch.randn(2, 64, requires_grad=True), q).sum().backward()
assert not torch.cuda.is_initialized()
loaded = {name.split(".")[0] for name in set(sys.modules) - before}
for other in ("triton", "ts_core", "ts_kernels", "ts_hf", "ts_bench", "bitsandbytes", "peft"):
    assert other not in loaded, other
print("clean")
"""


def test_import_and_use_on_a_cpu_load_neither_triton_nor_siblings_nor_cuda() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "clean"


def test_all_names_what_is_exported() -> None:
    public = {
        name
        for name, value in vars(ts_quant).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("ts_quant")
    }
    assert public == set(ts_quant.__all__)
    for name in ts_quant.__all__:
        assert getattr(ts_quant, name).__doc__


def test_errors_are_one_tree() -> None:
    for name in ts_quant.__all__:
        value = getattr(ts_quant, name)
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, ts_quant.QuantError)
    assert issubclass(ts_quant.NotAvailableError, ValueError)
    assert not issubclass(ts_quant.NotAvailableError, NotImplementedError)
    assert issubclass(ts_quant.FrozenWeightError, RuntimeError)


def readme() -> str:
    """The README of the checkout, or of the installed wheel."""
    path = Path(__file__).resolve().parent.parent / "README.md"
    if path.exists():
        return path.read_text(encoding="utf-8")
    payload = metadata("ts-quant").get_payload()  # type: ignore[attr-defined]
    return str(payload)


def test_the_readmes_examples(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", readme(), re.DOTALL)
    assert len(blocks) == 4
    space: dict[str, Any] = {}
    for block in blocks:
        alone: dict[str, Any] = {}
        exec(block, alone)
        space |= alone
    printed = capsys.readouterr().out
    assert "ErrorStats(relative=0.0" in printed
    assert "nf4 497664 torch.Size([576, 1536])" in printed and "\nTrue\n" in printed
    assert all(type(space["served"][i].weight) is ts_quant.QuantTensor for i in (0, 2))
    again, start = space["again"], space["start"]
    assert torch.equal(again["w"].dequantize(), start.weight.dequantize())
    assert torch.equal(again["a"], space["a"].detach()) and again["b"].shape == (96, 8)
    untrained = ts_quant.loftq(space["weight"], "nf4", rank=8)
    assert not torch.equal(again["b"], untrained.b)
    assert space["kept"].spec.outliers >= 1 and "outlier channel" in space["row"].reason
