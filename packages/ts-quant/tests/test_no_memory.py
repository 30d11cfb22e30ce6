"""Requests that reach for a tensor's memory: stored weights have none, their views must not be
written. Each of these crashed the process, or lost what it wrote, in some tensor subclass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ts_quant


def stored() -> ts_quant.QuantTensor:
    return ts_quant.quantize(torch.randn(6, 8), "int8")


def transposed() -> ts_quant.TransposedQuantTensor:
    return ts_quant.TransposedQuantTensor(stored())


def view() -> Tensor:
    return stored()[1:3]


KINDS = [stored, transposed, view]
WEIGHTS = [stored, transposed]


@pytest.mark.parametrize("make", KINDS)
def test_apply_is_refused(make: Callable[[], Tensor]) -> None:
    with pytest.raises(ts_quant.FrozenWeightError):
        make().apply_(lambda value: 0.0)


def test_apply_is_refused_by_its_other_name() -> None:
    with pytest.raises(ts_quant.FrozenWeightError):
        torch.Tensor.apply_(stored(), lambda value: 0.0)


@pytest.mark.parametrize("make", WEIGHTS)
def test_dlpack_is_refused(make: Callable[[], Tensor]) -> None:
    with pytest.raises(ts_quant.FrozenWeightError, match=r"q\.dequantize\(\)"):
        torch.from_dlpack(make())


@pytest.mark.parametrize("make", KINDS)
def test_values_can_be_read(make: Callable[[], Tensor]) -> None:
    weight = make()
    dense = weight + 0
    assert weight.tolist() == dense.tolist()
    numpy = pytest.importorskip("numpy")
    array = weight.numpy()
    assert numpy.array_equal(array, dense.numpy())
    assert numpy.array_equal(numpy.asarray(weight), dense.numpy())
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1.0


@pytest.mark.parametrize("make", WEIGHTS)
def test_they_take_no_gradient(make: Callable[[], Tensor]) -> None:
    weight = make()
    with pytest.raises(ts_quant.FrozenWeightError):
        weight.requires_grad_()
    with pytest.raises(ts_quant.FrozenWeightError):
        weight.requires_grad = True
    with pytest.raises(ts_quant.FrozenWeightError):
        torch.nn.Parameter(weight)
    kept = torch.nn.Parameter(weight.requires_grad_(False), requires_grad=False)
    assert not kept.requires_grad and type(kept) is type(weight)
    layer = torch.nn.Module()
    layer.weight = kept
    with pytest.raises(ts_quant.FrozenWeightError):
        layer.requires_grad_(True)


@pytest.mark.parametrize("make", WEIGHTS)
def test_values_that_need_a_gradient_are_not_copied(make: Callable[[], Tensor]) -> None:
    """The weight would become part of a graph that its products leave out."""
    weight = make()
    source = torch.randn(weight.shape, requires_grad=True)
    for value in (source, source * 2):
        with pytest.raises(ts_quant.FrozenWeightError, match="copy_ needs a gradient"):
            weight.copy_(value)
    with torch.no_grad():
        weight.copy_(source)
    weight.copy_(source.detach())
    assert not weight.requires_grad and weight.is_leaf


def test_loading_by_assignment_says_what_to_do() -> None:
    layer = torch.nn.Linear(8, 6, bias=False)
    q = stored()
    with pytest.raises(RuntimeError, match=r"requires_grad_\(False\) on it before"):
        layer.load_state_dict({"weight": q}, assign=True)
    layer.requires_grad_(False).load_state_dict({"weight": q}, assign=True)
    assert isinstance(layer.weight, ts_quant.QuantTensor)
