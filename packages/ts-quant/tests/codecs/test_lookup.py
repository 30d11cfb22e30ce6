"""The CPU's ways from codes to values agree, for every code and any number of threads."""

from __future__ import annotations

import pytest
import torch

import ts_quant
from ts_quant.codecs import lookup, tables


@pytest.fixture
def many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)


def test_every_e4m3_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = lookup.e4m3_values(codes)
    table = tables.e4m3(torch.device("cpu"))
    assert torch.equal(values.isnan(), table.isnan()) and int(values.isnan().sum()) == 2
    assert torch.equal(values.nan_to_num(1.0), table.nan_to_num(1.0))
    assert torch.equal(values.signbit()[:127], table.signbit()[:127])
    assert torch.equal(values, codes.view(torch.float8_e4m3fn).float()) or bool(
        values.isnan().any()
    )
    finite = codes[codes & 127 != 127]
    assert torch.equal(lookup.e4m3_values(finite), finite.view(torch.float8_e4m3fn).float())
    assert lookup.e4m3_values(codes[:0]).shape == (0,)


@pytest.mark.usefixtures("many_threads")
def test_pairs_by_indexing() -> None:
    pairs = tables.e2m1_pairs(torch.device("cpu"))
    codes = torch.randint(0, 256, (4098,), dtype=torch.uint8)
    for part in (codes, codes[:-1], codes[1:], codes[2:], codes[:0], codes[1:-1]):
        by_select = torch.index_select(pairs, 0, part.to(torch.int32)).view(torch.float32)
        assert torch.equal(lookup.pair_values(part, pairs), by_select)


@pytest.mark.parametrize("codec", ["nf4", "nvfp4", "mxfp4"])
def test_decoding_does_not_depend_on_the_number_of_threads(
    codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = ts_quant.quantize(torch.randn(37, 101), codec)
    few = q.dequantize()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert torch.equal(q.dequantize(), few)
