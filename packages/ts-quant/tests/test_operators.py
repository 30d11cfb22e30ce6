"""The registered operators: schema, fakes and dispatch, by torch's own checker."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ts_quant.codecs.base import codec_named
from ts_quant.codecs.operators import fields

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


LAYOUTS = [
    ("nf4", {}),
    ("nf4", {"double_quant": True}),
    ("int8", {}),
    ("int8", {"double_quant": True}),
    ("fp8", {}),
    ("fp8", {"layout": "row"}),
    ("fp8", {"layout": "tile"}),
    ("nvfp4", {}),
    ("nvfp4", {"layout": "e4m3_div"}),
    ("mxfp4", {}),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "block_size"), [((15, 64), 64), ((963,), 62), ((0,), 64)])
@pytest.mark.parametrize(("name", "options"), LAYOUTS, ids=str)
def test_opcheck(
    name: str, options: dict[str, Any], device: str, shape: tuple[int, ...], block_size: int
) -> None:
    ops = torch.ops.ts_quant
    spec = fields(codec_named(name).spec_for(shape, block_size, **options))
    w = torch.randn(shape, device=device)
    torch.library.opcheck(ops.encode.default, (w, *spec))
    *buffers, _ = ops.encode(w, *spec)
    for dtype in (torch.bfloat16, torch.float32):
        torch.library.opcheck(ops.decode.default, (buffers, *spec, list(shape), dtype))
        out = torch.empty(shape, dtype=dtype, device=device)
        torch.library.opcheck(ops.decode_out.default, (buffers, *spec, out))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "options"), LAYOUTS, ids=str)
def test_the_two_decoders_agree(name: str, options: dict[str, Any], device: str) -> None:
    ops = torch.ops.ts_quant
    spec = fields(codec_named(name).spec_for((7, 131), **options))
    *buffers, _ = ops.encode(torch.randn(7, 131, device=device), *spec)
    dense = ops.decode(buffers, *spec, [7, 131], torch.bfloat16)
    out = torch.empty(7, 131, dtype=torch.bfloat16, device=device)
    assert ops.decode_out(buffers, *spec, out) is None
    assert torch.equal(dense, out)
