"""What is said of products is what `dispatch` does, and the reason given is the one that counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ts_quant
from ts_quant.matmul import dispatch, options


def stored(codec: str, *shape: int, dtype: torch.dtype = torch.bfloat16, **given: Any) -> Any:
    return ts_quant.quantize(torch.randn(*shape, dtype=torch.float32).to(dtype), codec, **given)


def model_of(*weights: Any) -> nn.Module:
    model = nn.Module()
    for index, weight in enumerate(weights):
        model.register_parameter(f"w{index}", nn.Parameter(weight, requires_grad=False))
    return model


@pytest.fixture
def on_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_supported", lambda device, kind: True)


def test_a_model_whose_weights_are_always_decoded() -> None:
    model = model_of(stored("nf4", 64, 64), stored("nf4", 64, 64), stored("int8", 64, 64))
    assert ts_quant.configure_matmul(model, fp8_backward=True, tensor_cores=True) == 3
    found = ts_quant.matmul_report(model, "cpu")
    assert (found.matrices, found.products, found.gradients, found.codecs) == (3, 0, 0, ())
    assert found.decoded == {"nf4 is always decoded": 2, "int8 is always decoded": 1}
    assert str(found) == (
        "products: 0 of 3 matrices on tensor cores (2: nf4 is always decoded; 1: int8 is always "
        "decoded); input gradients: 0"
    )


@pytest.mark.usefixtures("on_tensor_cores")
def test_small_matrices_and_what_each_option_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "FASTER_FROM", 64 * 64)
    model = model_of(stored("fp8_row", 64, 64), stored("fp8", 64, 64), stored("fp8", 32, 64))
    small = "fewer than 4096 weights and tensor_cores='auto'"
    found = ts_quant.matmul_report(model)
    assert (found.matrices, found.products, found.gradients) == (3, 2, 0)
    assert found.decoded == {small: 1}
    assert found.decoded_backward == {"fp8_backward=False": 2, small: 1}
    assert str(found) == (
        f"FP8 products: 2 of 3 matrices on tensor cores (1: {small}); "
        f"input gradients: 0 (2: fp8_backward=False; 1: {small})"
    )
    ts_quant.configure_matmul(model, fp8_backward=True)
    found = ts_quant.matmul_report(model)
    assert (found.products, found.gradients, found.decoded_backward) == (2, 2, {small: 1})
    ts_quant.configure_matmul(model, tensor_cores=True)
    assert str(ts_quant.matmul_report(model)) == (
        "FP8 products: 3 of 3 matrices on tensor cores; input gradients: 3"
    )
    ts_quant.configure_matmul(model, tensor_cores=False)
    assert ts_quant.matmul_report(model).decoded == {"tensor_cores=False": 3}


OUTLIERS = {"outlier_channels": torch.tensor([1, 5])}
FLOAT = "float32 activations; bfloat16 ones, as of autocast, would be taken"
TILE, ROW, WHOLE = {"layout": "tile"}, {"layout": "row"}, {"layout": "tensor"}
CASES: list[tuple[str, tuple[int, ...], dict[str, Any], int, str, str]] = [
    # codec, shape, options, tokens, why forward is decoded, why the gradient is
    ("fp8", (32, 64), {}, 3, "", ""),
    ("fp8", (32, 48), {}, 3, "sizes that are no multiples of 16 x 32", "="),
    ("fp8", (40, 64), {}, 3, "sizes that are no multiples of 16 x 32", "="),
    ("fp8", (32, 48), ROW, 3, "", ""),
    ("fp8", (32, 40), ROW, 3, "sizes that are no multiples of 16 x 16", "="),
    ("fp8", (128, 256), TILE, 8, "", "scales per 128 x 128 tile"),
    ("fp8", (128, 256), TILE, 6, "a number of tokens that is no multiple of 4", "="),
    ("fp8", (128, 192), TILE, 8, "sizes that are no multiples of 128 x 128", "="),
    ("fp8", (64, 64), WHOLE, 8, "scales in a layout without such a product", "="),
    ("fp8", (32, 64), OUTLIERS, 3, "", "outlier channels"),
    ("fp8", (2, 32, 64), {}, 3, "stacks of matrices", "="),
    ("fp8", (32, 64), {"dtype": torch.float32}, 3, FLOAT, "="),
    ("nvfp4", (32, 64), {}, 3, "", ""),
    ("nvfp4", (32, 48), {}, 3, "sizes that are no multiples of 32 x 32", "="),
    ("nvfp4", (32, 64), OUTLIERS, 3, "outlier channels", "="),
    ("mxfp4", (32, 64), {}, 3, "mxfp4 is always decoded", "="),
]


@pytest.mark.usefixtures("on_tensor_cores")
@pytest.mark.parametrize(("codec", "shape", "given", "tokens", "why", "back"), CASES)
def test_reasons_and_counts_are_those_of_dispatch(
    codec: str, shape: tuple[int, ...], given: dict[str, Any], tokens: int, why: str, back: str
) -> None:
    weight = stored(codec, *shape, **given)
    ts_quant.configure_matmul(
        weight, tensor_cores=True, fp8_backward=codec == "fp8", nvfp4_backward=codec == "nvfp4"
    )
    found = ts_quant.matmul_report(weight, "cpu", tokens)
    back = why if back == "=" else back
    assert found.matrices == 1
    assert (found.products, found.decoded) == ((0, {why: 1}) if why else (1, {}))
    assert (found.gradients, found.decoded_backward) == ((0, {back: 1}) if back else (1, {}))
    if len(shape) == 2:
        x = torch.randn(tokens, shape[1], dtype=weight.dtype)
        assert found.products == (dispatch.prepare(x, x, weight, None) is not None)
        grad = torch.randn(tokens, shape[0], dtype=weight.dtype)
        assert found.gradients == (dispatch.prepared_gradient_kind(weight, grad) is not None)


def test_the_device_is_named_where_it_alone_is_in_the_way() -> None:
    model = model_of(stored("fp8", 32, 64), stored("nvfp4", 32, 64))
    ts_quant.configure_matmul(model, tensor_cores=True)
    found = ts_quant.matmul_report(model, "cpu")
    assert found.decoded == {"cpu has no such product": 2} == found.decoded_backward
    assert found.codecs == ("fp8", "nvfp4")
    with ts_quant.emulate_tensor_cores():
        found = ts_quant.matmul_report(model, "cpu")
    assert (found.products, found.gradients) == (2, 0)
    assert found.decoded_backward == {"fp8_backward=False": 1, "nvfp4_backward=False": 1}
    with pytest.raises(ts_quant.OptionError, match="tokens=0"):
        ts_quant.matmul_report(model, "cpu", tokens=0)


def test_under_autocast_its_dtype_is_that_of_the_activations() -> None:
    weight = stored("fp8", 32, 64, dtype=torch.float32)
    ts_quant.configure_matmul(weight, tensor_cores=True)
    with ts_quant.emulate_tensor_cores():
        assert ts_quant.matmul_report(weight, "cpu").products == 0
        assert ts_quant.matmul_report(weight, "cpu", dtype=torch.bfloat16).products == 1


def test_a_codec_sums_it_up_only_for_weights_that_tensor_cores_could_take() -> None:
    codec, cpu = ts_quant.quantize(torch.randn(8, 64), "nf4"), torch.device("cpu")
    from ts_quant.codecs.fp8 import CODEC

    assert CODEC.tensor_core_summary(model_of(codec), cpu) is None
    said = CODEC.tensor_core_summary(model_of(codec, stored("fp8", 32, 64)), cpu)
    assert said is not None and said.startswith("FP8 products: 0 of 2 matrices on tensor cores (")
