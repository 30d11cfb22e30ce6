"""The registered operators: schema, fakes and dispatch, by torch's own checker."""

from __future__ import annotations

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("n", "block_size"), [(960, 64), (963, 64), (100, 62), (0, 64)])
def test_opcheck(codec: str, device: str, n: int, block_size: int) -> None:
    encode = getattr(torch.ops.ts_quant, f"{codec}_encode").default
    decode = getattr(torch.ops.ts_quant, f"{codec}_decode").default
    decode_out = getattr(torch.ops.ts_quant, f"{codec}_decode_out").default
    w = torch.randn(n, device=device)
    torch.library.opcheck(encode, (w, block_size))
    codes, absmax = encode(w, block_size)
    for dtype in (torch.bfloat16, torch.float32):
        torch.library.opcheck(decode, (codes, absmax, block_size, [n], dtype))
        out = torch.empty(n, dtype=dtype, device=device)
        torch.library.opcheck(decode_out, (codes, absmax, block_size, out))


@pytest.mark.parametrize("device", DEVICES)
def test_the_two_decoders_agree(codec: str, device: str) -> None:
    ops = torch.ops.ts_quant
    w = torch.randn(7, 131, device=device)
    buffers = getattr(ops, f"{codec}_encode")(w, 64)
    dense = getattr(ops, f"{codec}_decode")(*buffers, 64, [7, 131], torch.bfloat16)
    out = torch.empty(7, 131, dtype=torch.bfloat16, device=device)
    assert getattr(ops, f"{codec}_decode_out")(*buffers, 64, out) is None
    assert torch.equal(dense, out)
