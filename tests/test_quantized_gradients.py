"""A LoRA layer in one function multiplies its input gradient as the stored weight is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import ts_quant
from ts_kernels import lora_linear, patch_lora

FORMATS: list[tuple[str, str | None, str]] = [
    ("fp8", None, "fp8_backward"),
    ("fp8", "row", "fp8_backward"),
    ("nvfp4", None, "nvfp4_backward"),
]


def weight(codec: str, layout: str | None, **options: bool) -> ts_quant.QuantTensor:
    torch.manual_seed(0)
    q = ts_quant.quantize((torch.randn(64, 96) * 0.05).bfloat16(), codec, layout=layout)
    ts_quant.configure_matmul(q, tensor_cores=True, **options)
    return q


@pytest.mark.parametrize(("codec", "layout", "option"), FORMATS)
@pytest.mark.parametrize("autocast", [False, True])
def test_fused_lora_honours_both_options(
    codec: str, layout: str | None, option: str, autocast: bool
) -> None:
    q = weight(codec, layout, **{option: True})
    a, b = torch.randn(4, 96).requires_grad_(), torch.zeros(64, 4).requires_grad_()
    x = torch.randn(2, 8, 96).bfloat16().requires_grad_()
    grad = torch.randn(2, 8, 64).bfloat16()

    def gradients(function: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = function()
        found: Tensor = torch.autograd.grad(y, x, grad)[0]
        return found

    def fused() -> Tensor:
        return lora_linear(x, q, a, b)

    def plain() -> Tensor:
        return torch.nn.functional.linear(x, q)

    decoded = (grad.view(16, 64) @ q.dequantize()).view(2, 8, 96)
    assert torch.equal(gradients(fused), decoded)  # no tensor cores here
    with ts_quant.emulate_tensor_cores():
        found = gradients(fused)
        # The adapter's part is zero, b being so.
        assert torch.equal(found, gradients(plain)) and not torch.equal(found, decoded)
        off = (found.float() - decoded.float()).norm() / decoded.float().norm()
        assert float(off) < (0.06 if codec == "fp8" else 0.2)
        ts_quant.configure_matmul(q, **{option: False})  # type: ignore[arg-type]
        assert torch.equal(gradients(fused), decoded)
        assert torch.equal(gradients(plain), decoded)


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize(("codec", "layout", "option"), FORMATS)
def test_adapters_of_peft_train_as_far_with_it(
    codec: str, layout: str | None, option: str, patched: bool
) -> None:
    """Thirty steps of two layers, in one function each or as PEFT runs them."""

    def losses(on: bool) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(96, 64), nn.Tanh(), nn.Linear(64, 96)).bfloat16()
        for layer in (model[0], model[2]):
            q = ts_quant.quantize(layer.weight.detach(), codec, layout=layout)
            layer.weight = nn.Parameter(q, requires_grad=False)
        ts_quant.configure_matmul(model, tensor_cores=True, **{option: on})  # type: ignore[arg-type]
        adapters = LoraConfig(r=4, target_modules=["0", "2"])
        trained = get_peft_model(model, adapters)
        if patched:
            assert patch_lora(trained).replaced
        optimizer = torch.optim.Adam([p for p in trained.parameters() if p.requires_grad], 1e-2)
        x = torch.randn(64, 96).bfloat16()
        wanted = torch.tanh(x.float() @ torch.randn(96, 96) / 10)
        seen = []
        for _ in range(30):
            loss = (trained(x).float() - wanted).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen

    with ts_quant.emulate_tensor_cores():
        without, with_it = losses(False), losses(True)
    assert with_it != without and with_it[0] == without[0]
    assert without[-1] < 0.9 * without[0]
    assert with_it[-1] == pytest.approx(without[-1], rel=0.03 if codec == "fp8" else 0.1)
