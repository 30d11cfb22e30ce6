"""LoRA from PEFT on nn.Linear layers whose weight is quantized."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn

import ts_quant

if find_spec("peft") is None:  # ts-quant does not need it; the repository's environments have it
    pytest.skip("PEFT is not installed", allow_module_level=True)

import peft


class Block(nn.Module):
    def __init__(self, codec: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.q_proj = nn.Linear(48, 48, bias=False, dtype=dtype)
        self.up = nn.Linear(48, 96, dtype=dtype)
        self.down = nn.Linear(96, 48, dtype=dtype)
        self.requires_grad_(False)
        for linear in (self.q_proj, self.up, self.down):
            linear.weight = nn.Parameter(
                ts_quant.quantize(linear.weight, codec), requires_grad=False
            )
            ts_quant.configure_matmul(linear, tensor_cores=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.q_proj(x)
        return x + self.down(torch.nn.functional.silu(self.up(x)))


def with_lora(model: nn.Module) -> nn.Module:
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "up", "down"], init_lora_weights=False
    )
    torch.manual_seed(3)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_adapter_gradients_equal_stock_peft_on_the_decoded_weights(
    dense_twin: Callable[[nn.Module], nn.Module],
    codec: str,
    dtype: torch.dtype,
    autocast: bool,
    device: str,
) -> None:
    base = nn.Sequential(Block(codec, dtype), Block(codec, dtype)).to(device)
    stock = with_lora(dense_twin(base))
    model = with_lora(base)
    quantized = [p for p in model.parameters() if isinstance(p, ts_quant.QuantTensor)]
    assert len(quantized) == 6
    assert not any(isinstance(p, ts_quant.QuantTensor) for p in stock.parameters())
    x = torch.randn(2, 7, 48).to(device, dtype)
    target = torch.randn(2, 7, 48).to(device)
    losses = []
    for part in (model, stock):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            y = part(x)
        loss = (y.float() - target).square().mean()
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(losses[0], losses[1])
    mine = {n: p for n, p in model.named_parameters() if p.requires_grad}
    other = {n: p for n, p in stock.named_parameters() if p.requires_grad}
    assert mine.keys() == other.keys() and len(mine) == 12
    for name, parameter in mine.items():
        assert "lora_" in name and parameter.grad is not None
        assert other[name].grad is not None
        assert torch.equal(parameter, other[name]), name
        assert torch.equal(parameter.grad, other[name].grad), name  # type: ignore[arg-type]


def test_adapters_take_the_weights_dtype_and_merging_is_refused(codec: str) -> None:
    model = with_lora(nn.Sequential(Block(codec, torch.bfloat16)))
    state = peft.get_peft_model_state_dict(model)
    assert state and all("lora_" in name for name in state)
    with pytest.raises(ts_quant.FrozenWeightError, match="dequantize"):
        model.merge_adapter()


def test_gradient_checkpointing_with_inputs_that_need_no_gradient(codec: str) -> None:
    from torch.utils.checkpoint import checkpoint

    model = with_lora(nn.Sequential(Block(codec, torch.float32)))
    x = torch.randn(3, 48)
    model(x).square().sum().backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    checkpoint(model, x, use_reentrant=False).square().sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and torch.equal(parameter.grad, expected[name])
