"""What moe_paging costs and saves: decoding and training a Qwen3-30B-A3B-shaped mixture of experts.

    python packages/ts-hf/benchmarks/moe_paging.py --layers 12 --codec nf4

Random weights. Three ways of holding the same model: resident, whole blocks streamed, and experts
paged by expert; each in a process of its own. Prints one JSON line per way: seconds per decoded
token and per LoRA step, bytes copied for each, and the peak of device memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

WAYS: dict[str, dict[str, Any]] = {
    "resident": {"param_offload": False},
    "blocks streamed": {"param_offload": True},
    "experts paged": {"param_offload": False, "moe_paging": True},
}


def _config(layers: int, experts: int, width: int) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=32768,
        hidden_size=width,
        moe_intermediate_size=3 * width // 8,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=experts,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    )


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """One way, in this process."""
    import peft
    import torch

    import ts_hf
    from ts_core import memory_report

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    codec = None if arguments.codec == "none" else arguments.codec
    model = ts_hf.load_model(
        _config(arguments.layers, arguments.experts, arguments.width),
        random_weights=True,
        quantize=codec,
    )
    config = peft.LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    model = peft.get_peft_model(model, config)
    model, optimizer = ts_hf.wrap_hf(
        model, device=device, quantize="none", lr=1e-4, **WAYS[arguments.way]
    )

    def synchronize() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def copied() -> int:
        return int(memory_report(model)["transfers"]["h2d"]["bytes"])

    ids = torch.randint(0, 32768, (1, arguments.tokens), device=device)
    steps: list[float] = []
    for _ in range(arguments.steps + 2):
        before, start = copied(), time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.synchronize()
        synchronize()
        steps.append(time.perf_counter() - start)
        step_bytes = copied() - before
    model.eval()
    decoded: list[float] = []
    with torch.no_grad():
        out = model(input_ids=ids[:, :16], use_cache=True)
        for _ in range(arguments.decode + 2):
            before, start = copied(), time.perf_counter()
            token = out.logits[:, -1:].argmax(-1)
            out = model(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
            synchronize()
            decoded.append(time.perf_counter() - start)
            token_bytes = copied() - before
    report = memory_report(model)
    return {
        "way": arguments.way,
        "codec": arguments.codec,
        "layers": arguments.layers,
        "tokens": arguments.tokens,
        "step_s": sorted(steps[2:])[len(steps[2:]) // 2],
        "step_h2d_bytes": step_bytes,
        "token_s": sorted(decoded[2:])[len(decoded[2:]) // 2],
        "token_h2d_bytes": token_bytes,
        "peak_bytes": report["gpu"]["peak_allocated"],
        "experts": report.get("experts"),
        "device": torch.cuda.get_device_name() if device == "cuda" else "host",
    }


def main() -> None:
    """Run every way in a process of its own and print what each gave."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--width", type=int, default=2048, help="hidden size")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--decode", type=int, default=16)
    parser.add_argument("--codec", default="nf4")
    parser.add_argument("--way", choices=list(WAYS))
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(measure(arguments)))
        return
    for way in WAYS:
        command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = done.stdout.splitlines()
        print(lines[-1] if done.returncode == 0 and lines else f"{way}: {done.stderr[-2000:]}")


if __name__ == "__main__":
    main()
