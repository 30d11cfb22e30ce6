"""Weights without elements, and arguments of another kind than the one asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ts_quant

EMPTY = [(0, 64), (32, 0), (0, 0)]


@pytest.mark.parametrize("shape", EMPTY)
def test_matrices_without_elements(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    start = ts_quant.loftq(weight, rank=4, iters=2)
    assert start.weight.shape == shape and start.error == start.error_with_factors == 0.0
    assert (start.b @ start.a).shape == shape
    assert ts_quant.error(weight) == ts_quant.ErrorStats(0.0, 0.0)
    assert ts_quant.worst_channels(weight, start.weight, 3).numel() == min(3, shape[1])
    merged, row = ts_quant.merge_weight(start.weight, torch.zeros(shape), "int8")
    assert merged.shape == shape and row.survived == 1.0
    for options in ({"joint_budget": 0.2}, {"keep_precise": 0.1}, {"error_rank": 4}):
        storer = ts_quant.Storer("nf4", **options)  # type: ignore[arg-type]
        storer.measure(weight, "w")
        storer.improved()
        assert storer.store(weight, "w").weight.shape == shape
        assert storer.report.table()


def test_outlier_channels_without_memory() -> None:
    q = ts_quant.quantize(torch.empty(8, 64, device="meta"), "nvfp4", outlier_channels=[1, 5])
    assert q.spec.outliers == 2 and q.dequantize().shape == (8, 64)
    held = ts_quant.quantize(torch.randn(8, 64), "nvfp4", outlier_channels=[1, 5])
    assert q.nbytes == held.nbytes


def test_outlier_channels_of_no_rows() -> None:
    q = ts_quant.quantize(torch.randn(0, 64), outlier_channels=[3, 5])
    assert q.dequantize().shape == (0, 64) and q.spec.outliers == 2


def test_channels_are_ranked_for_a_matrix_and_its_stored_self() -> None:
    weight = torch.randn(8, 64)
    q = ts_quant.quantize(weight)
    for one, other in (
        (weight, weight),
        (weight[:4], q),
        (weight[0], ts_quant.quantize(weight[0])),
    ):
        with pytest.raises(ts_quant.OptionError, match="a matrix and its QuantTensor"):
            ts_quant.worst_channels(one, other, 2)  # type: ignore[arg-type]
    for count in (-1, 1.5, True):
        with pytest.raises(ts_quant.OptionError, match="count="):
            ts_quant.worst_channels(weight, q, count)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changed",
    [
        {"shape": (-8, -64)},
        {"shape": "ab"},
        {"shape": 512},
        {"shape": (8.0, 64.0)},
        {"dtype": None},
        {"dtype": "float32"},
        {"dtype": torch.int8},
        {"layout": [1]},
        {"buffers": None},
        {"buffers": [torch.ones(1)]},
        {"buffers": {"codes": "x"}},
        {"layout": {"block_size": 1 << 70}},
    ],
    ids=str,
)
def test_from_buffers_names_the_argument(changed: dict[str, Any]) -> None:
    q = ts_quant.quantize(torch.randn(8, 64), "int8")
    good = {
        "buffers": dict(zip(("codes", "absmax"), q.buffers(), strict=True)),
        "shape": (8, 64),
        "dtype": torch.float32,
    }
    assert ts_quant.QuantTensor.from_buffers("int8", **good).shape == (8, 64)  # type: ignore[arg-type]
    with pytest.raises(ts_quant.OptionError, match=next(iter(changed))):
        ts_quant.QuantTensor.from_buffers("int8", **{**good, **changed})  # type: ignore[arg-type]


def test_other_arguments_of_another_kind() -> None:
    q = ts_quant.quantize(torch.randn(8, 64))
    with pytest.raises(ts_quant.OptionError, match="floating dtypes"):
        q.dequantize("float32")  # type: ignore[arg-type]
    with pytest.raises(ts_quant.OptionError, match="out is a list"):
        q.dequantize(out=[1.0])  # type: ignore[arg-type]
    with pytest.raises(ts_quant.OptionError, match="not list"):
        ts_quant.loftq(torch.randn(8, 64), second_moments=[1.0] * 64)  # type: ignore[arg-type]
    with pytest.raises(ts_quant.OptionError, match="second_moments is a list"):
        ts_quant.Storer("nf4", second_moments=[torch.ones(64)])  # type: ignore[arg-type]


def test_masks_made_anew_for_each_block_are_not_mixed_up() -> None:
    """A mask that is gone may leave its id to the next one."""

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
            return self.linear(x * factor)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(Scaled() for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index, block in enumerate(self.blocks):
                # On another device than the CPU the original is not kept by its copy there.
                x = block(x, Elsewhere.of(torch.full((4,), float(index + 1))))
            return x

    model = Model()
    with torch.no_grad():
        for block in model.blocks:
            block.linear.weight.copy_(torch.eye(4))
    found = ts_quant.error_stats(model, [torch.ones(2, 4)], blocks=list(model.blocks))
    product = 1.0
    for index in range(6):
        product *= index + 1
        assert torch.equal(found[f"blocks.{index}.linear"], torch.full((4,), product**2))


class Elsewhere(torch.Tensor):
    """A tensor whose copy on the CPU is another object."""

    @staticmethod
    def of(value: torch.Tensor) -> Elsewhere:
        return value.as_subclass(Elsewhere)

    def cpu(self, *args: Any, **options: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()
