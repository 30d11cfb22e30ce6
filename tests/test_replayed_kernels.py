"""Blocks with fused kernels, quantized weights and adapters, replayed on the host."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ts_core import memory_report, wrap
from ts_core.engine.replay import setup
from ts_core.engine.replay.host_recorder import HostRecorder

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


def model_with_adapters() -> nn.Module:
    config = transformers.Qwen2Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    torch.manual_seed(0)
    base = transformers.Qwen2ForCausalLM(config)
    adapted: nn.Module = peft.get_peft_model(
        base, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    )
    return adapted


@pytest.mark.parametrize("quantize", ["none", "nf4"])
@pytest.mark.parametrize("recompute", [False, True])
def test_fused_blocks_replay_as_they_run(
    quantize: str, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is watched and recorded must take the same way through the kernels as any other call:
    they go another one under a dispatch mode that could change what runs."""
    monkeypatch.setattr(setup, "recorder_for", lambda device: HostRecorder())
    first = model_with_adapters()
    results: list[list[torch.Tensor]] = []
    for graphs in (False, True):
        model: Any = copy.deepcopy(first)
        trained = [p for p in model.parameters() if p.requires_grad]
        model, optimizer = wrap(
            model,
            torch.optim.AdamW(trained, lr=1e-2),
            device="host",
            quantize=quantize,
            kernels=True,
            fused_lora=True,
            recompute=recompute,
            cuda_graphs=graphs,
        )
        losses = []
        for step in range(6):
            tokens = (torch.arange(26).view(2, 13) * (step + 3)) % 61
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        optimizer.synchronize()
        results.append([*losses, *(p.detach().clone() for p in trained)])
    report = memory_report(model)
    assert report["replay"]["replayed_backwards"] > 0, "\n".join(report["events"])
    assert report["replay"]["eager"] == {}, "\n".join(report["events"])
    for eager, replayed in zip(*results, strict=True):
        assert torch.equal(eager, replayed)
