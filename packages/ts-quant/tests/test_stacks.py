"""Stored stacks of matrices: taken apart, and encoded matrix by matrix, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ts_quant
from ts_quant import stacks
from ts_quant.errors import OptionError
from ts_quant.transposed import TransposedQuantTensor

FORMS: list[tuple[str, dict[str, Any]]] = [
    ("nf4", {}),
    ("nf4", {"block_size": 32}),
    ("nf4", {"double_quant": True}),
    ("int8", {}),
    ("int8", {"double_quant": True}),
    ("fp8", {}),
    ("fp8", {"layout": "tile"}),
    ("nvfp4", {}),
    ("mxfp4", {}),
]


@pytest.mark.parametrize(("codec", "options"), FORMS)
@pytest.mark.parametrize("transposed", [False, True])
def test_parts_are_the_matrices(codec: str, options: dict[str, Any], transposed: bool) -> None:
    # 128 x 128 values: 256 blocks of 64, so that one-byte scales have a group per matrix.
    stored: Any = ts_quant.quantize(torch.randn(3, 128, 128), codec, **options)
    if transposed:
        stored = TransposedQuantTensor(stored)
    dense = stored.dequantize()
    rows = stored.stack_rows()
    assert rows is not None and "codes" in rows
    assert ("global_scale" in rows) is False
    for first, count in ((0, 3), (1, 2), (2, 1)):
        part = stored.stack_part(first, count)
        assert type(part) is type(stored) and part.codec == codec
        assert torch.equal(part.dequantize(), dense[first : first + count])
    assert torch.equal(stored[1], dense[1]) and torch.equal(stored[-1], dense[2])
    with pytest.raises(IndexError):
        stored[3]
    with pytest.raises(OptionError, match="cannot be taken apart"):
        stored.stack_part(2, 2)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((3, 8, 8), {"block_size": 128}),  # a block spans two matrices
        ((3, 128, 64), {"double_quant": True}),  # 128 blocks: a group of 256 spans matrices
        ((64, 64), {}),
    ],
)
def test_codes_that_cannot_be_split(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    stored = ts_quant.quantize(torch.randn(shape), "nf4", **options)
    assert stored.stack_rows() is None
    assert torch.equal(stored[1], stored.dequantize()[1])


@pytest.mark.parametrize(("codec", "options"), FORMS)
def test_encoding_one_matrix_at_a_time_gives_the_same_bytes(
    codec: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(3, 128, 128, dtype=torch.bfloat16)
    whole = ts_quant.quantize(weight, codec, **options)
    calls = []
    plain = stacks.encode_apart
    monkeypatch.setattr(stacks, "LARGE", 1)
    monkeypatch.setattr(stacks, "encode_apart", lambda *a: calls.append(1) or plain(*a))
    apart = ts_quant.quantize(weight, codec, **options)
    assert bool(calls) == (codec != "nvfp4" and options != {"layout": "tile"})
    for mine, theirs in zip(apart.buffers(), whole.buffers(), strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    if calls:
        weight[1, 0, 0] = float("nan")
        with pytest.raises(ValueError, match=r"\[1\]"):
            ts_quant.quantize(weight, codec, name="experts", **options)
