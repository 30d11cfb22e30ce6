"""How stored weights are multiplied: wrap()'s options for it, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ts_core import memory_report, quantize_model, unwrap, wrap
from ts_core.registry import codecs
from ts_core.store.leaves import is_wrapper
from ts_core.testing import tiny_model

needs_codecs = pytest.mark.skipif(not codecs.has("nf4"), reason="ts-quant is not installed")
WIDTH = 64


def _stored(model: nn.Module) -> dict[str, Any]:
    return {name: p for name, p in model.named_parameters() if is_wrapper(p)}


@needs_codecs
def test_how_weights_are_multiplied_may_be_chosen_before_or_after_wrap() -> None:
    """FP8 products, outlier channels among them: the same streamed as resident."""
    tokens, codec = torch.randint(0, 37, (2, 6)), codecs.get("fp8")

    def losses(offload: bool, early: bool) -> list[float]:
        model = tiny_model(3, WIDTH).bfloat16()
        quantize_model(model, "fp8", outlier_channels=0.05)
        found = []
        if early:
            codec.configure_matmul(model, tensor_cores=True)
        options = {"device": "host", "quantize": "none", "param_offload": offload}
        _, optimizer = wrap(model, eager=False, lr=0.0, **options)
        for products in (True, False):
            if not (early and products):
                codec.configure_matmul(model, tensor_cores=products)
            with codec.emulate_tensor_cores():
                loss = model(tokens)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        unwrap(model)
        return found

    expected = losses(False, True)
    assert expected[0] != expected[1]
    assert losses(True, True) == losses(True, False) == expected


@needs_codecs
def test_outliers_reach_the_stored_weights_and_are_said_to_do_nothing_without() -> None:
    model = tiny_model(2, WIDTH)
    wrap(model, device="host", quantize="nvfp4", outliers="auto", nvfp4_backward=True)
    for parameter in _stored(model).values():
        assert parameter._matmul.outliers == 0.01 and parameter._matmul.nvfp4_backward
    assert memory_report(model)["params"]["outliers"] == 0.01
    model = tiny_model(2, WIDTH)
    wrap(model, device="host", quantize="none", outliers=0.05)
    report = memory_report(model)
    assert any(event.startswith("outliers=0.05: nothing to do") for event in report["events"])
    assert report["params"]["outliers"] == 0.0


@needs_codecs
@pytest.mark.parametrize("options", [{}, {"outliers": 0.05, "nvfp4_backward": True}])
def test_what_was_said_of_products_before_wrapping_is_kept(options: dict[str, Any]) -> None:
    import ts_quant

    model = tiny_model(2, WIDTH)
    for module in model.modules():
        if isinstance(module, nn.Linear) and not module.weight.requires_grad:
            q = ts_quant.quantize(module.weight.detach(), "fp8")
            module.weight = nn.Parameter(q, requires_grad=False)
    ts_quant.configure_matmul(model, tensor_cores=True, fp8_backward=True)
    wrap(model, device="host", quantize="none", **options)
    stored = _stored(model)
    assert stored
    for parameter in stored.values():
        assert parameter._matmul.fp8_backward and parameter._matmul.tensor_cores is True
        assert parameter._matmul.nvfp4_backward == options.get("nvfp4_backward", False)


@needs_codecs
@pytest.mark.parametrize(
    ("codec", "early", "expected"),
    [
        ("fp8", {"tensor_cores": True}, ["FP8 products: 4 of 4 {}; input gradients: 4"]),
        ("nvfp4", {}, ["NVFP4 products: 4 of 4 {}; input gradients: 0 (4: nvfp4_backward=False)"]),
        (
            "fp8_row",
            {},
            [
                "FP8 products: 0 of 4 {} (4: fewer than 2097152 weights and tensor_cores='auto'); "
                "input gradients: 0"
            ],
        ),
        ("nf4", {"tensor_cores": True}, []),
    ],
)
def test_an_event_says_how_many_products_run_on_tensor_cores(
    codec: str, early: dict[str, bool], expected: list[str]
) -> None:
    model = tiny_model(2, WIDTH).bfloat16()
    quantize_model(model, codec)
    codecs.get(codec).configure_matmul(model, fp8_backward=True, **early)
    with codecs.get(codec).emulate_tensor_cores():
        wrap(model, device="host", quantize="none")
    said = [line for line in memory_report(model)["events"] if "products: " in line]
    assert said == [line.replace("{}", "matrices on tensor cores") for line in expected]


@needs_codecs
@pytest.mark.parametrize("asked, share", [(True, 0.01), (0.05, 0.05), (0, 0.0), (None, 0.0)])
def test_the_report_has_the_share_of_outliers_that_weights_were_given(
    asked: Any, share: float
) -> None:
    model = tiny_model(2, WIDTH)
    wrap(model, device="host", quantize="nvfp4", outliers=asked, nvfp4_backward=True)
    assert {p._matmul.outliers for p in _stored(model).values()} == {share}
    assert memory_report(model)["params"]["outliers"] == share
