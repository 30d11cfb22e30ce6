"""LoRA through PEFT on a quantized, streaming transformers model against stock PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ts_core import memory_report, unwrap
from ts_core.testing import inject_delays
from ts_hf import save_adapter, wrap_hf

STEPS = 10


def base(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=97,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).to(dtype)


def with_lora(model: LlamaForCausalLM, seed: int = 1) -> PeftModel:
    torch.manual_seed(seed)
    return get_peft_model(
        model,
        LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
            task_type="CAUSAL_LM",
            init_lora_weights=False,
        ),
    )


def run(model: nn.Module, optimizer: torch.optim.Optimizer, device: str = "cpu") -> list[float]:
    generator = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(STEPS):
        for _ in range(2):
            tokens = torch.randint(0, 97, (2, 17), generator=generator).to(device)
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss / 2).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def adapters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: p.detach().cpu().clone() for name, p in model.named_parameters() if p.requires_grad
    }


def ours(device: str = "host", delays: int | None = None, **options: Any) -> tuple[Any, Any]:
    model = with_lora(base())
    trained = [p for p in model.parameters() if p.requires_grad]
    return wrap_hf(
        model,
        torch.optim.AdamW(trained, lr=1e-3),
        quantize="nf4",
        accumulation_steps=2,
        offload=True,
        device=device,
        **options,
    )


@pytest.mark.parametrize("checkpointing", [False, True])
def test_streamed_nf4_equals_stock_peft_on_the_dequantized_weights(checkpointing: bool) -> None:
    model, optimizer = ours(param_offload=True)
    served = model.state_dict()
    twin = with_lora(base())
    assert not torch.equal(
        served["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"],
        twin.state_dict()["base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"],
    )
    assert not twin.load_state_dict(served).missing_keys
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
        model.train()
    stock = torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad], lr=1e-3)
    before = adapters(model)
    with inject_delays(4, max_ms=1.0):
        mine = run(model, optimizer)
    theirs = run(twin, stock)
    assert mine == pytest.approx(theirs, rel=1e-5)
    after, expected = adapters(model), adapters(twin)
    for name in expected:
        assert not torch.equal(after[name], before[name]), name
        assert (after[name] - expected[name]).abs().max() < 1e-5, name
    assert memory_report(model)["params"]["loads"] > 8


def test_adapter_of_a_streaming_model_loads_in_plain_peft(tmp_path: Path) -> None:
    model, optimizer = ours(param_offload=0.5)
    run(model, optimizer)
    save_adapter(model, tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(base(), tmp_path / "adapter")
    mine = {name.replace(".default", ""): value for name, value in adapters(model).items()}
    found = {
        name.replace(".default", ""): p.detach()
        for name, p in loaded.named_parameters()
        if "lora_" in name
    }
    assert mine.keys() == found.keys()
    assert all(torch.equal(mine[name], found[name]) for name in mine)
    unwrap(model)
    tokens = torch.randint(0, 97, (1, 9))
    with torch.no_grad():
        loaded_logits = loaded(input_ids=tokens).logits
        ours_logits = model(input_ids=tokens).logits
    assert ours_logits.shape == loaded_logits.shape


@pytest.mark.gpu
@pytest.mark.parametrize("param_offload", [True, 0.5])
def test_streamed_equals_resident_on_the_gpu(param_offload: Any) -> None:
    model, optimizer = ours("cuda", param_offload=False)
    resident, resident_losses = model, run(model, optimizer, "cuda")
    model, optimizer = ours("cuda", param_offload=param_offload)
    with inject_delays(4):
        losses = run(model, optimizer, "cuda")
    assert losses == resident_losses
    expected = adapters(resident)
    assert all(torch.equal(value, expected[name]) for name, value in adapters(model).items())
