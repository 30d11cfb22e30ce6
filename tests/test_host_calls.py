"""What a LoRA step on a quantized base costs in Python, in calls (never in time)."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch

TOKENS = torch.arange(4)[None]
LAYERS = (2, 4)
LINEARS = 7  # per layer
LIMIT = 860  # calls of our functions per layer, forward and backward (829 on Python 3.11)


def lora_llama(layers: int) -> Any:
    import peft
    import transformers

    from ts_hf import wrap_hf

    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).requires_grad_(False)
    adapters = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.0)
    model, optimizer = wrap_hf(
        peft.get_peft_model(model, adapters),
        quantize="nf4",
        device="host",
        attention=None,
        kernels=True,
        fused_lora=True,
        max_grad_norm=1.0,
    )
    optimizer.make_resident()
    return model, optimizer


def counted(work: Any) -> Counter[str]:
    """Calls of this project's functions, and of all, by this thread."""
    seen: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            name = frame.f_globals.get("__name__", "")
            if name.startswith("ts_"):
                seen[frame.f_code.co_name] += 1
                seen["all of ours"] += 1

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return seen


def test_calls_per_layer_and_per_adapter_are_bounded() -> None:
    passes, steps = [], []
    for layers in LAYERS:
        model, optimizer = lora_llama(layers)

        def both(model: Any = model) -> None:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=TOKENS, labels=TOKENS).loss
            loss.backward()

        for _ in range(2):
            both()
            optimizer.step()
        passes.append(counted(both))
        steps.append(counted(optimizer.step))
    more = LAYERS[1] - LAYERS[0]
    per_layer = {name: (passes[1][name] - passes[0][name]) / more for name in passes[1]}
    # A stored weight is asked for its product once per layer that uses it, and for nothing else.
    assert per_layer["__torch_function__"] == LINEARS
    assert per_layer["lora_linear"] == LINEARS and per_layer["decode_reference"] == 2 * LINEARS
    assert per_layer["all of ours"] <= LIMIT
    # The optimizer's step does not grow with the number of adapters (they share one buffer).
    assert steps[0]["all of ours"] == steps[1]["all of ours"] <= 100
