"""A stored weight seen transposed: the values of the transposed tensor, the bytes of the stored."""

from __future__ import annotations

import copy
import io
from pathlib import Path

import pytest
import torch
from torch import nn

import ts_quant
from ts_quant.transposed import TransposedQuantTensor


@pytest.fixture(params=["mxfp4", "nf4", "fp8"])
def pair(request: pytest.FixtureRequest) -> tuple[TransposedQuantTensor, torch.Tensor]:
    """(a stored weight [3, 64, 48], the ordinary tensor it stands for)."""
    stored = ts_quant.quantize(torch.randn(3, 48, 64), request.param)
    return TransposedQuantTensor(stored), stored.dequantize().transpose(-1, -2).contiguous()


def test_values_shape_and_products(pair: tuple[TransposedQuantTensor, torch.Tensor]) -> None:
    q, dense = pair
    assert q.shape == dense.shape and q.dtype is dense.dtype and q.nbytes == q.stored.nbytes
    assert torch.equal(q.dequantize(), dense)
    for index in (0, 2, -1):
        assert torch.equal(q[index], dense[index])
    with pytest.raises(IndexError):
        q[3]
    x = torch.randn(3, 5, 64, requires_grad=True)
    assert torch.equal(x @ q, x @ dense)
    (x[1] @ q[1]).sum().backward()
    assert torch.allclose(x.grad[1], dense[1].sum(dim=1).expand(5, 64))  # type: ignore[index]


def test_copies_and_moves_keep_it_stored(
    pair: tuple[TransposedQuantTensor, torch.Tensor], tmp_path: Path
) -> None:
    q, dense = pair
    saved = ts_quant.save_quantized({"w": q}, tmp_path / "w.safetensors")
    module = nn.Module()
    module.w = nn.Parameter(q, requires_grad=False)
    for other in (
        q.clone(),
        q.detach(),
        copy.deepcopy(q),
        copy.deepcopy(module).w,
        ts_quant.load_quantized(saved)["w"],
    ):
        assert isinstance(other, TransposedQuantTensor)
        assert torch.equal(other.dequantize(), dense)
    half = q.to(torch.bfloat16)
    assert isinstance(half, TransposedQuantTensor) and half.dequantize().dtype is torch.bfloat16


def test_the_protocol_reaches_the_plain_tensors(
    pair: tuple[TransposedQuantTensor, torch.Tensor],
) -> None:
    q, dense = pair
    names, meta = q.__tensor_flatten__()
    inner = {name: getattr(q, name) for name in names}
    again = TransposedQuantTensor.__tensor_unflatten__(inner, meta, q.shape, q.stride())
    assert torch.equal(again.dequantize(), dense)
    for name in q.stored.__tensor_flatten__()[0]:  # as a pager replaces them
        setattr(q.stored, name, getattr(q.stored, name).clone())
    assert torch.equal(q.dequantize(), dense)


def test_copy_encodes_and_other_writes_are_refused(
    pair: tuple[TransposedQuantTensor, torch.Tensor],
) -> None:
    q, _ = pair
    new = torch.randn(q.shape)
    with torch.no_grad():
        q.copy_(new)
    rows = new.transpose(-1, -2).contiguous()
    assert torch.equal(
        q.dequantize(), ts_quant.quantize(rows, q.codec).dequantize().transpose(-1, -2)
    )
    with pytest.raises(ts_quant.FrozenWeightError, match="frozen"):
        q.add_(1)
    with pytest.raises(ts_quant.FrozenWeightError, match="pickled"):
        torch.save(q, io.BytesIO())
    with pytest.raises(ts_quant.OptionError, match="two dimensions"):
        TransposedQuantTensor(ts_quant.quantize(torch.randn(8)))
