"""What weights say of the speed of their products, beside what `prepare` decides."""

from __future__ import annotations

import pytest
import torch

import ts_quant
from ts_quant.matmul import dispatch, options
from ts_quant.matmul.speed import FP8_SPEED, PASS_TOKENS

CPU = torch.device("cpu")


def weight(codec: str, layout: str | None = None, **given: torch.dtype) -> ts_quant.QuantTensor:
    values = torch.randn(256, 384, dtype=given.get("dtype", torch.bfloat16)) * 0.05
    return ts_quant.quantize(values, codec, layout=layout)


@pytest.fixture
def on_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_supported", lambda device, kind: True)
    monkeypatch.setattr(options, "FASTER_FROM", 0)


@pytest.mark.parametrize("codec", ["int8", "fp8", "nf4", "nvfp4", "mxfp4"])
def test_without_tensor_cores_a_weight_is_decoded_in_both_passes(codec: str) -> None:
    few, many = (weight(codec).product_speeds(tokens, CPU) for tokens in (PASS_TOKENS, 1 << 20))
    assert few == (0.5, 0.5)
    assert many[0] == many[1] and 0.99 < many[0] < 1.0


@pytest.mark.usefixtures("on_tensor_cores")
@pytest.mark.parametrize(
    ("layout", "at_2048"),
    [("row", 1.386), ("tile", 1.386), (None, 1.152)],  # 61 / 44, and 61 / (44 + 9) ms
)
def test_fp8_products_are_faster_in_forward_alone(layout: str | None, at_2048: float) -> None:
    forward, backward = weight("fp8", layout).product_speeds(2048, CPU)
    assert forward == pytest.approx(at_2048, abs=0.005)
    assert backward == 2048 / (2048 + PASS_TOKENS)
    short = weight("fp8", layout).product_speeds(256, CPU)[0]
    assert short < 1.0 if layout is None else short == forward == FP8_SPEED


@pytest.mark.usefixtures("on_tensor_cores")
@pytest.mark.parametrize("layout", ["row", "tile", None])
def test_fp8_backward_turns_the_weight_in_either_layout_that_it_takes(layout: str | None) -> None:
    made = weight("fp8", layout)
    forward, decoded = made.product_speeds(2048, CPU)
    ts_quant.configure_matmul(made, fp8_backward=True)
    turned = 2048 / (2048 / FP8_SPEED + PASS_TOKENS)
    assert decoded < 1.0 < turned < FP8_SPEED
    assert made.product_speeds(2048, CPU) == (forward, decoded if layout == "tile" else turned)
    ts_quant.configure_matmul(made, tensor_cores=False)
    assert made.product_speeds(2048, CPU) == (decoded, decoded)


@pytest.mark.usefixtures("on_tensor_cores")
def test_nvfp4_products_are_not_called_faster() -> None:
    made = weight("nvfp4")
    assert made.product_speeds(PASS_TOKENS, CPU) == (1.0, 0.5)
    ts_quant.configure_matmul(made, nvfp4_backward=True)
    assert made.product_speeds(PASS_TOKENS, CPU) == (1.0, 1.0)


@pytest.mark.usefixtures("on_tensor_cores")
def test_speeds_are_of_the_product_that_a_layer_would_run() -> None:
    """What decides, decides for both: options, sizes, tokens; and what is not known is 1."""
    made, tiles = weight("fp8"), weight("fp8", "tile")
    for tokens in (6, 8):
        x = torch.randn(tokens, 384).bfloat16()
        faster = tiles.product_speeds(tokens, CPU)[0] > 1.0
        assert faster == (dispatch.prepare(x, x, tiles, None) is not None) == (tokens == 8)
    ts_quant.configure_matmul(made, tensor_cores=False)
    assert made.product_speeds(PASS_TOKENS, CPU) == (0.5, 0.5)
    assert weight("fp8", dtype=torch.float32).product_speeds(2048, CPU) == (1.0, 1.0)
    assert tiles.product_speeds(0, CPU) == (1.0, 1.0)
    stack = ts_quant.quantize(torch.randn(2, 256, 384).bfloat16(), "fp8")
    assert stack.product_speeds(2048, CPU) == (1.0, 1.0)
