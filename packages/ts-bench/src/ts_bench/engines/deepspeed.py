"""DeepSpeed ZeRO with optimizer state (and, for stage 3, parameters) in host memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ts_bench.deepspeed_folder import FOLDER, deepspeed_is_there, use_deepspeed_folder
from ts_bench.engines import API_VERSION, UnsupportedError
from ts_bench.engines.stock import CHECKPOINTING, VARIANTS
from ts_bench.scenarios import Scenario
from ts_bench.workload import (
    LEARNING_RATE,
    Inputs,
    build_model,
    input_batches,
    recompute_activations,
)

WEIGHT_DECAY = 0.01


class DeepSpeedEngine:
    """ZeRO-Offload as its documentation sets it up: bf16 parameters, fp32 state on the host.

    Its CPUAdam is compiled on first use, or taken from `TORCH_EXTENSIONS_DIR` where `build` has
    put it: that needs no CUDA toolkit.

    Args:
        name: the engine's name.
        stage: of ZeRO: 2, or 3 with the parameters offloaded, too.
    """

    API_VERSION = API_VERSION
    variants = VARIANTS

    def __init__(self, name: str, stage: int) -> None:
        self.name = name
        self.stage = stage
        what = "optimizer" if stage == 2 else "optimizer and parameters"
        self.description = f"DeepSpeed ZeRO-{stage}, {what} offloaded to the host, bf16 parameters"

    def available(self) -> str | None:
        """None, or what is missing."""
        if deepspeed_is_there():
            return None
        return f"needs deepspeed: pip install deepspeed, or {FOLDER} naming a folder with it"

    def prepare(self, scenario: Scenario, device: torch.device, variant: str) -> DeepSpeedStep:
        """See `ts_bench.engines.Engine.prepare`."""
        if scenario.mode != "full":
            raise UnsupportedError(f"{self.name} is compared on full fine-tunes")
        os.environ["DS_ACCELERATOR"] = device.type
        _one_process(device)
        use_deepspeed_folder()
        use_built_adam()
        deepspeed: Any = __import__("deepspeed")
        model = build_model(scenario, device, torch.bfloat16)
        if variant == CHECKPOINTING:
            recompute_activations(model)
        zero: dict[str, Any] = {
            "stage": self.stage,
            "offload_optimizer": {"device": "cpu", "pin_memory": device.type == "cuda"},
            "overlap_comm": device.type == "cuda",
            "contiguous_gradients": True,
        }
        if self.stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": device.type == "cuda"}
        config = {
            "train_micro_batch_size_per_gpu": scenario.batch,
            "gradient_accumulation_steps": 1,
            "gradient_clipping": scenario.max_grad_norm or 0.0,
            "bf16": {"enabled": True},
            "zero_optimization": zero,
            "optimizer": {
                "type": "AdamW",
                "params": {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY},
            },
        }
        engine, optimizer, _, _ = deepspeed.initialize(
            model=model, model_parameters=list(model.parameters()), config=config
        )
        details = {
            "weights": "bf16, fp32 master on the host",
            "optimizer": type(getattr(optimizer, "optimizer", optimizer)).__name__,
            "zero": zero,
        }
        return DeepSpeedStep(engine, scenario, device, details)


class DeepSpeedStep:
    """A step as DeepSpeed's engine runs it."""

    def __init__(
        self, engine: Any, scenario: Scenario, device: torch.device, details: dict[str, Any]
    ) -> None:
        self.engine = engine
        self._batches = input_batches(scenario, device)
        self._details = details

    @property
    def model(self) -> nn.Module:
        """What is trained."""
        model: nn.Module = self.engine.module
        return model

    def __call__(self) -> Tensor:
        """Forward, backward, update."""
        inputs: Inputs = next(self._batches)
        loss: Tensor = self.engine(**inputs).loss
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def details(self) -> dict[str, Any]:
        """See `ts_bench.engines.Step`."""
        return self._details


def _one_process(device: torch.device) -> None:
    """A process group of this process alone; DeepSpeed takes over one that there is."""
    import torch.distributed as dist

    os.environ.setdefault("LOCAL_RANK", "0")
    if not dist.is_initialized():
        place = Path(tempfile.mkdtemp(prefix="ts-bench-ds-")) / "store"
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{place}",
            rank=0,
            world_size=1,
        )


def built_adam() -> Path | None:
    """The CPUAdam that `build` has left in TORCH_EXTENSIONS_DIR."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    found = sorted(Path(root).glob("**/cpu_adam.so")) if root else []
    return found[0] if found else None


def use_built_adam() -> bool:
    """Have DeepSpeed take the CPUAdam that is built, instead of asking for a CUDA toolkit."""
    place = built_adam()
    if place is None:
        return False
    from importlib.machinery import ExtensionFileLoader
    from importlib.util import module_from_spec, spec_from_file_location

    builders: Any = __import__("deepspeed.ops.op_builder", fromlist=["CPUAdamBuilder"])
    spec = spec_from_file_location(
        "cpu_adam", place, loader=ExtensionFileLoader("cpu_adam", str(place))
    )
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    builders.CPUAdamBuilder._loaded_ops["cpu_adam"] = module
    return True


def build() -> None:
    """Compile CPUAdam for the host alone: `python -m ts_bench.engines.deepspeed`."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    use_deepspeed_folder()
    builders: Any = __import__("deepspeed.ops.op_builder", fromlist=["CPUAdamBuilder"])
    print(builders.CPUAdamBuilder().load())


ENGINE_ZERO2 = DeepSpeedEngine("deepspeed-zero2", 2)
ENGINE_ZERO3 = DeepSpeedEngine("deepspeed-zero3", 3)

if __name__ == "__main__":
    build()
