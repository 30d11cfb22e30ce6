"""Stock torch: PEFT LoRA on a bf16 model, or a full fine-tune in fp32 with fused AdamW."""

from __future__ import annotations

import torch

from ts_bench.engines import API_VERSION
from ts_bench.scenarios import Scenario
from ts_bench.workload import TrainStep, adamw, add_adapters, build_model, recompute_activations

CHECKPOINTING = "checkpointing"
VARIANTS = ("plain", CHECKPOINTING)


class StockEngine:
    """The model as transformers and PEFT make it, everything on the device."""

    API_VERSION = API_VERSION
    name = "torch"
    description = "transformers + PEFT in bf16 (LoRA) or fp32 (full), torch's fused AdamW"
    variants = VARIANTS

    def available(self) -> str | None:
        """None: what it needs are requirements of ts-bench."""
        return None

    def prepare(self, scenario: Scenario, device: torch.device, variant: str) -> TrainStep:
        """See `ts_bench.engines.Engine.prepare`. A quantized base is held in bf16."""
        dtype = torch.bfloat16 if scenario.mode == "lora" else torch.float32
        model = build_model(scenario, device, dtype)
        if scenario.mode == "lora":
            model.requires_grad_(False)
            if variant == CHECKPOINTING:
                recompute_activations(model)
            model = add_adapters(model, scenario)
        elif variant == CHECKPOINTING:
            recompute_activations(model)
        details = {"weights": str(dtype).removeprefix("torch."), "optimizer": "AdamW(fused)"}
        return TrainStep(model, adamw(model, device), scenario, device, details)


ENGINE = StockEngine()
