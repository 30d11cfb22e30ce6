"""Writes into views of stored weights: refused with the way out, never lost."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import ts_quant
from ts_quant import FrozenWeightError, QuantTensor
from ts_quant.frozen_view import FrozenView
from ts_quant.transposed import TransposedQuantTensor

VIEWS: dict[str, Callable[[Any], Any]] = {
    "index": lambda w: w[0],
    "negative index": lambda w: w[-1],
    "slice": lambda w: w[1:3],
    "ellipsis": lambda w: w[..., 2],
    "none": lambda w: w[None],
    "narrow": lambda w: w.narrow(1, 2, 5),
    "select": lambda w: w.select(1, 3),
    "transpose": lambda w: w.transpose(-1, -2),
    "permute": lambda w: w.permute(*reversed(range(w.dim()))),
    "movedim": lambda w: w.movedim(0, -1),
    "swapaxes": lambda w: w.swapaxes(0, 1),
    "mT": lambda w: w.mT,
    "view": lambda w: w.view(-1),
    "view dtype": lambda w: w.view(torch.uint8),
    "view_as": lambda w: w.view_as(w),
    "reshape": lambda w: w.reshape(-1),
    "flatten": lambda w: w.flatten(),
    "unflatten": lambda w: w.unflatten(-1, (4, -1)),
    "unsqueeze": lambda w: w.unsqueeze(0),
    "squeeze": lambda w: w.squeeze(),
    "expand": lambda w: w.expand(2, *w.shape),
    "diagonal": lambda w: w.diagonal(),
    "unfold": lambda w: w.unfold(1, 4, 4),
    "as_strided": lambda w: w.as_strided((3,), (1,)),
    "chunk": lambda w: w.chunk(2)[1],
    "split": lambda w: w.split(2)[0],
    "tensor_split": lambda w: w.tensor_split(3)[1],
    "unbind": lambda w: w.unbind()[1],
    "iteration": lambda w: next(iter(w)),
    "view of a view": lambda w: w[1:][0],
    "data of a view": lambda w: w[0].data,
    "detached view": lambda w: w[0].detach(),
}

WRITES: dict[str, Callable[[Any], Any]] = {
    "fill_": lambda v: v.fill_(1),
    "copy_": lambda v: v.copy_(torch.zeros(v.shape)),
    "zero_": lambda v: v.zero_(),
    "add_": lambda v: v.add_(1),
    "mul_": lambda v: v.mul_(2.0),
    "setitem": lambda v: v.__setitem__(0, 1.0),
    "iadd": lambda v: v.__iadd__(1),
    "clamp_": lambda v: v.clamp_(0, 1),
    "masked_fill_": lambda v: v.masked_fill_(torch.ones(v.shape, dtype=torch.bool), 0),
    "index_fill_": lambda v: v.index_fill_(0, torch.tensor([0]), 1),
    "normal_": lambda v: v.normal_(),
    "out": lambda v: torch.neg(torch.ones(v.shape), out=v),
    "foreach": lambda v: torch._foreach_add_([v], 1),
    "data": lambda v: setattr(v, "data", torch.zeros(v.shape)),
}


@pytest.fixture(params=["nf4", "stack", "transposed", "parameter"])
def weight(request: pytest.FixtureRequest) -> Any:
    """Each kind of stored weight, three to four matrices' worth of rows."""
    if request.param in ("nf4", "parameter"):
        q = ts_quant.quantize(torch.randn(6, 8), "nf4", block_size=8)
        return q if request.param == "nf4" else nn.Parameter(q, requires_grad=False)
    q = ts_quant.quantize(torch.randn(4, 8, 16), "nf4", block_size=16)
    return TransposedQuantTensor(q) if request.param == "transposed" else q


def _bytes(weight: Any) -> list[Tensor]:
    return [buffer.clone() for buffer in weight.buffers()]


def test_a_view_shows_the_values_and_refuses_every_write(weight: Any) -> None:
    before, dense = _bytes(weight), weight.dequantize()
    for name, take in VIEWS.items():
        view = take(weight)
        shown = view.clone()
        assert torch.equal(view, take(dense)), name
        for what, write in WRITES.items():
            if name in ("view dtype", "expand") and what == "normal_":
                continue  # PyTorch refuses it for any tensor of that kind
            try:
                write(view)
            except FrozenWeightError as error:
                assert "dequantize()" in str(error) and "copy_" in str(error), (name, what)
            else:
                raise AssertionError(f"{what} into {name} was not refused")
        assert torch.equal(view, shown), name
    assert all(torch.equal(a, b) for a, b in zip(weight.buffers(), before, strict=True))


def test_views_in_inference_mode(weight: Any) -> None:
    dense = weight.dequantize()
    with torch.inference_mode():
        for name, take in VIEWS.items():
            view = take(weight)
            assert torch.equal(view, take(dense)), name
            with pytest.raises(FrozenWeightError):
                view.fill_(0)


def test_the_weight_itself_refuses_all_writes_but_copy_(weight: Any) -> None:
    before = _bytes(weight)
    for what, write in WRITES.items():
        if what in ("copy_", "data"):
            continue
        with pytest.raises(FrozenWeightError, match="copy_"):
            write(weight)
    assert all(torch.equal(a, b) for a, b in zip(weight.buffers(), before, strict=True))


def test_an_index_assignment_is_refused_by_any_key(weight: Any) -> None:
    before = weight.dequantize()
    mask = before > 0
    for key in (0, slice(1), (..., 1), mask, torch.tensor([0, 1]), ([0, 1], [1, 0]), None):
        with pytest.raises(FrozenWeightError):
            weight[key] = 0.0
    assert torch.equal(weight.dequantize(), before)


def test_copy_and_data_write_into_the_weight_itself(weight: Any) -> None:
    new = torch.randn(weight.shape)
    for target in (weight, weight.data, weight.detach()):
        with torch.no_grad():
            target.copy_(new)
        expected = weight.clone()
        with torch.no_grad():
            expected.copy_(new)
        assert torch.equal(weight.dequantize(), expected.dequantize())
        new = -new
    other = weight.clone()
    with torch.no_grad():
        other.copy_(new)
    weight.data = other
    assert torch.equal(weight.dequantize(), other.dequantize())
    for plain in (torch.zeros(weight.shape), weight.dequantize()):
        with pytest.raises(FrozenWeightError, match=r"\.data cannot become a plain"):
            weight.data = plain
    assert torch.equal(weight.dequantize(), other.dequantize())


def test_a_view_computes_like_an_ordinary_tensor() -> None:
    q = ts_quant.quantize(torch.randn(24, 40), "nf4")
    dense = q.dequantize()
    view, plain = q[2:5], dense[2:5]
    assert isinstance(view, FrozenView) and view.data_ptr() and view.is_contiguous()
    for made in (view + 1, view.clone(), view.contiguous() * 2, view.float().sum(), q[[1, 2]]):
        assert type(made) is Tensor
    gradients = []
    for w in (view, plain):
        x = torch.linspace(-1, 1, 120).view(3, 40).requires_grad_()
        y = torch.nn.functional.linear(x, w) + x @ w.t()
        y.square().sum().backward()
        assert x.grad is not None
        gradients.append(x.grad)
    assert torch.equal(*gradients)
    with torch.inference_mode():
        assert torch.equal(q.t() @ torch.ones(24), dense.t() @ torch.ones(24))
        with pytest.raises(FrozenWeightError):
            q.t().zero_()
    target = torch.empty(40)
    assert torch.equal(target.copy_(q[0]), dense[0])
    assert torch.equal(torch.cat([q[0], torch.ones(1)]), torch.cat([dense[0], torch.ones(1)]))


def test_what_reads_a_views_memory() -> None:
    q = ts_quant.quantize(torch.randn(6, 8), "nf4", block_size=8)
    view, plain = q[1], q.dequantize()[1]
    assert view.tolist() == plain.tolist() and float(view[0]) == float(plain[0])
    array = numpy.asarray(view)
    assert (array == plain.numpy()).all()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1.0
    saved = io.BytesIO()
    torch.save(view, saved)
    saved.seek(0)
    for made in (copy.deepcopy(view), torch.load(saved, weights_only=True)):
        assert type(made) is Tensor and torch.equal(made, plain)
    assert repr(view).startswith("FrozenView(tensor(")


def test_an_edit_through_an_alias_between_forward_and_backward_is_noticed() -> None:
    q = ts_quant.quantize(torch.randn(16, 32), "nf4")
    for alias in (q.detach(), q.data, nn.Parameter(q, requires_grad=False)):
        x = torch.randn(4, 32, requires_grad=True)
        y = torch.nn.functional.linear(x, q)
        with torch.no_grad():
            alias.copy_(torch.randn(16, 32))
        with pytest.raises(RuntimeError, match="modified in place"):
            y.sum().backward()
    copied: QuantTensor = q.clone()  # type: ignore[assignment]
    x = torch.randn(4, 32, requires_grad=True)
    y = torch.nn.functional.linear(x, q)
    copied.copy_(torch.randn(16, 32))
    y.sum().backward()
