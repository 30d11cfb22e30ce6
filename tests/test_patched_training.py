"""wrap(kernels=True, fused_lora=True): a streamed, quantized PEFT model trains as without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import trainstream
import ts_quant
from trainstream.integrations.huggingface import wrap_hf


def scale_inputs(model: torch.nn.Module) -> None:
    """Store the frozen linear weights as an AWQ checkpoint does: NVFP4, and a factor per column."""
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) and not layer.weight.requires_grad:
            factors = torch.linspace(0.25, 3.0, layer.in_features)
            plain = ts_quant.quantize(layer.weight / factors, "nvfp4")
            names = plain.__tensor_flatten__()[0]
            scaled = ts_quant.QuantTensor.from_buffers(
                "nvfp4",
                {**dict(zip(names, plain.buffers(), strict=True)), "channel_scale": factors},
                shape=plain.shape,
                dtype=plain.dtype,
                layout={"channel_scale": True},
            )
            layer.weight = torch.nn.Parameter(scaled, requires_grad=False)


def trained(codec: str, **options: Any) -> tuple[list[float], Any, Any]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = get_peft_model(
        LlamaForCausalLM(config),
        LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False),
    )
    if codec == "scaled inputs":
        codec = "none"
        scale_inputs(model)
    model, optimizer = wrap_hf(
        model, quantize=codec, param_offload=True, device="cpu", lr=1e-2, **options
    )
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(4):
        ids = torch.randint(0, 64, (2, 12), generator=generator)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model, optimizer


@pytest.mark.parametrize("codec", ["none", "nf4", "scaled inputs"])
def test_losses_follow_the_models_own_code(codec: str) -> None:
    plain, _, _ = trained(codec)
    fused, model, _ = trained(codec, kernels=True, fused_lora=True)
    assert fused == pytest.approx(plain, rel=1e-5)
    assert fused[-1] != fused[0]
    patches = model._trainstream_session.patches
    assert [len(patch.replaced) > 0 for patch in patches] == [True, True]
    ids = torch.arange(12)[None]
    with torch.no_grad():
        before = model(input_ids=ids).logits
        trainstream.unwrap(model)
        after = model(input_ids=ids).logits
    assert not patches
    assert (before - after).abs().max() <= 1e-4
