"""ts_quant and ts_hf each read safetensors files, as neither may import the other: they agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ts_core.errors import DataError
from ts_hf.checkpoints import safetensors_file as hf
from ts_quant import CheckpointError
from ts_quant import safetensors_file as quant

TENSORS = {
    "a": torch.arange(4.0),
    "b": torch.ones(2, 3, dtype=torch.bfloat16),
    "c": torch.empty(0, 5, dtype=torch.uint8),
}


def outcomes(file: Path) -> tuple[Any, Any]:
    """What each of the two finds in a file; None where it refuses it."""
    found: list[Any] = []
    for read, refusal in (
        (lambda: hf.read_header(file), DataError),
        (lambda: quant.read_header(file)[0], CheckpointError),
    ):
        try:
            entries = read()
        except refusal:
            found.append(None)
        else:
            found.append(
                {n: (e.dtype, e.shape, e.offset, e.size_bytes) for n, e in entries.items()}
            )
    return found[0], found[1]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x.safetensors"
    save_file(TENSORS, path)
    return path


def test_both_read_a_file_alike(file: Path) -> None:
    ours, theirs = outcomes(file)
    assert ours == theirs and set(ours) == set(TENSORS)
    for name, value in TENSORS.items():
        assert torch.equal(hf.read_tensor(hf.read_header(file)[name]), value)
        assert torch.equal(quant.read_tensor(quant.read_header(file)[0][name]), value)
    assert set(quant.DTYPES.items()) - set(hf.DTYPES.items()) == {("C64", torch.complex64)}
    assert hf.DTYPES.items() <= quant.DTYPES.items()


def test_both_refuse_the_same_damage(file: Path) -> None:
    """Any byte of the header exchanged for another, and any length."""
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    damaged = [
        whole[:at] + other + whole[at + 1 :]
        for at in range(header)
        for other in (b"0", b"9", b'"', b",", b"-", b"\x00", b"\xff")
        if whole[at : at + 1] != other
    ]
    damaged += [whole[:length] for length in range(len(whole))]
    damaged += [whole + b"\x00"]
    refused = 0
    for raw in damaged:
        file.write_bytes(raw)
        ours, theirs = outcomes(file)
        assert ours == theirs, raw
        refused += ours is None
    assert 0 < refused < len(damaged)
