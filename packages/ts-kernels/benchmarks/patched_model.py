"""A LoRA step of four Qwen2.5-14B-shaped layers, with and without the patches.

    python packages/ts-kernels/benchmarks/patched_model.py

Needs a CUDA GPU, transformers and PEFT; NF4 rows only where ts_quant is installed. Per step and
layer: wall time, and time of the GPU's kernels (from torch's profiler), whose difference is waiting
for the host; peak memory above the weights. Forward and backward, eager, bf16 base, float32
adapters of rank 16 on all seven projections; medians of 10 steps. About 40 seconds.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

from ts_kernels import patch_blocks, patch_lora

LAYERS = 4
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_model(quantized: bool, device: str = "cuda", **changes: int) -> nn.Module:
    import peft
    import transformers

    settings = {
        "vocab_size": 1024,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = transformers.Qwen2Config(**settings | changes)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if quantized:
        import ts_quant

        for module in model.model.layers.modules():
            if isinstance(module, nn.Linear):
                weight = ts_quant.quantize(module.weight.detach(), "nf4")
                module.weight = nn.Parameter(weight, requires_grad=False)
    lora = peft.LoraConfig(r=16, lora_alpha=32, target_modules=PROJECTIONS)
    return peft.get_peft_model(model, lora).train()


def step(model: nn.Module, ids: torch.Tensor) -> None:
    hidden = model.base_model.model.model(ids, use_cache=False).last_hidden_state
    hidden.float().square().mean().backward()
    for parameter in model.parameters():
        parameter.grad = None


def measure(model: nn.Module, tokens: int) -> tuple[float, float, float]:
    """(wall ms, kernel ms) per step and layer, peak MiB above the weights."""
    ids = torch.randint(3, 1024, (1, tokens), device="cuda")
    for _ in range(3):
        step(model, ids)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(10):
        start = time.perf_counter()
        step(model, ids)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(3):
            step(model, ids)
        torch.cuda.synchronize()
    kernel_us = sum(event.self_device_time_total for event in profile.key_averages()) / 3
    wall = sorted(times)[len(times) // 2] * 1e3
    return wall / LAYERS, kernel_us / 1e3 / LAYERS, peak


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs a CUDA GPU; torch sees none.")
    try:
        import ts_quant  # noqa: F401

        formats = [False, True]
    except ModuleNotFoundError:
        formats = [False]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; ms per step and layer")
    print(f"{'base':<6}{'tokens':>7}  {'patches':<16}{'wall':>8}{'kernels':>9}{'peak MiB':>10}")
    for quantized in formats:
        model = make_model(quantized)
        for tokens in (512, 2048):
            for name in ("none", "LoRA", "blocks", "LoRA and blocks"):
                handles = []
                if "LoRA" in name:
                    handles.append(patch_lora(model, on_event=print if tokens == 512 else None))
                if "blocks" in name:
                    layers = model.base_model.model.model.layers
                    handles.append(patch_blocks(layers, on_event=print if tokens == 512 else None))
                wall, kernels, peak = measure(model, tokens)
                for handle in handles:
                    handle.undo()
                label = "NF4" if quantized else "bf16"
                line = f"{label:<6}{tokens:>7}  {name:<16}{wall:>8.2f}{kernels:>9.2f}{peak:>10.0f}"
                print(line, flush=True)
        del model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
