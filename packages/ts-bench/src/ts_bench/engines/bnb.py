"""bitsandbytes: PEFT LoRA on NF4 weights, alone and with Liger's kernels."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from ts_bench.engines import API_VERSION, UnsupportedError
from ts_bench.engines.stock import CHECKPOINTING, VARIANTS
from ts_bench.scenarios import Scenario
from ts_bench.workload import (
    TrainStep,
    adamw,
    add_adapters,
    build_model,
    random_parameter,
    recompute_activations,
)


class BitsAndBytesEngine:
    """NF4 weights (blocks of 64, no double quantization) in `bitsandbytes.nn.Linear4bit`.

    Norms, embedding and output matrix stay in bf16: faster and smaller than the fp32 that
    PEFT's `prepare_model_for_kbit_training` would make of them.

    Args:
        name: the engine's name.
        liger: also put in Liger's RMSNorm, rotary, SwiGLU and fused linear cross-entropy.
    """

    API_VERSION = API_VERSION
    own_interpreter = True  # bitsandbytes picks its library by the GPU, as it is imported
    variants = VARIANTS

    def __init__(self, name: str, *, liger: bool) -> None:
        self.name = name
        self.liger = liger
        kernels = ", Liger's fused kernels and loss" if liger else ""
        self.description = f"transformers + PEFT on bitsandbytes NF4 weights{kernels}"

    def available(self) -> str | None:
        """None, or which package is missing."""
        missing = [] if find_spec("bitsandbytes") else ["bitsandbytes"]
        if self.liger and not find_spec("liger_kernel"):
            missing.append("liger-kernel")
        if missing:
            return f"needs {' and '.join(missing)}: pip install {' '.join(missing)}"
        return None

    def prepare(self, scenario: Scenario, device: torch.device, variant: str) -> TrainStep:
        """See `ts_bench.engines.Engine.prepare`."""
        if scenario.mode != "lora" or scenario.base != "nf4":
            raise UnsupportedError(
                f"{self.name} is compared where the base is NF4 and LoRA is trained, "
                f"not for {scenario.mode} on {scenario.base}"
            )
        if self.liger and device.type != "cuda":
            raise UnsupportedError("Liger's kernels need a CUDA GPU")
        import bitsandbytes as bnb

        def nf4(linear: nn.Linear) -> nn.Module:
            # Its constructor fills the weight it is about to replace; on meta that costs nothing.
            replaced: Any = bnb.nn.Linear4bit(
                linear.in_features,
                linear.out_features,
                bias=linear.bias is not None,
                compute_dtype=torch.bfloat16,
                compress_statistics=False,
                quant_type="nf4",
                device="meta",
            )
            shape = (linear.out_features, linear.in_features)
            weight = random_parameter(shape, "weight", device, torch.bfloat16)
            replaced.weight = bnb.nn.Params4bit(
                weight,
                requires_grad=False,
                compress_statistics=False,
                quant_type="nf4",
                module=replaced,
            ).to(device)
            return replaced  # type: ignore[no-any-return]

        model = build_model(scenario, device, torch.bfloat16, nf4)
        model.requires_grad_(False)
        if self.liger:
            from liger_kernel.transformers import apply_liger_kernel_to_qwen2

            apply_liger_kernel_to_qwen2(model=model)
        if variant == CHECKPOINTING:
            recompute_activations(model)
        # What PEFT looks at to choose its 4-bit LoRA layer.
        model.is_loaded_in_4bit = True  # type: ignore[assignment]
        model = add_adapters(model, scenario)
        details = {
            "weights": "nf4, bf16 embedding and output",
            "optimizer": "AdamW(fused)",
            "lora_layers": lora_layer_types(model),
        }
        return TrainStep(model, adamw(model, device), scenario, device, details)


def lora_layer_types(model: nn.Module) -> dict[str, int]:
    """How many adapted layers of which type the model has; shows that PEFT took the 4-bit one."""
    found: dict[str, int] = {}
    for module in model.modules():
        if hasattr(module, "lora_A") and hasattr(module, "base_layer"):
            kind = f"{type(module).__module__}.{type(module).__name__}"
            found[kind] = found.get(kind, 0) + 1
    return found


ENGINE = BitsAndBytesEngine("bitsandbytes", liger=False)
ENGINE_LIGER = BitsAndBytesEngine("bitsandbytes-liger", liger=True)
