"""The published trainstream 0.4.1, from a folder of its own beside this version.

Its package is called `trainstream`, as ours is, so it is not installed but unpacked: the folder
that holds it is named by the environment variable TS_BENCH_TRAINSTREAM_041. It compiles itself on
first import, with nvcc.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ts_bench.engines import API_VERSION, UnsupportedError
from ts_bench.scenarios import Scenario
from ts_bench.workload import (
    LEARNING_RATE,
    Inputs,
    TrainStep,
    add_adapters,
    config_of,
    trainable,
)

FOLDER = "TS_BENCH_TRAINSTREAM_041"
VERSION = "0.4.1"


class PublishedEngine:
    """`load_model` + PEFT + `wrap_hf` of trainstream 0.4.1, its Trainer's chunked loss."""

    API_VERSION = API_VERSION
    name = "trainstream-0.4.1"
    description = "the published trainstream 0.4.1: load_model, PEFT, wrap_hf, chunked loss"
    variants = ("default",)

    def available(self) -> str | None:
        """None, or what is missing."""
        folder = os.environ.get(FOLDER)
        if folder and (Path(folder) / "trainstream" / "wrapper.py").exists():
            return None
        return (
            f"needs {FOLDER} to name a folder with trainstream {VERSION}: "
            f"pip install --no-deps --target FOLDER trainstream=={VERSION}"
        )

    def prepare(self, scenario: Scenario, device: torch.device, variant: str) -> TrainStep:
        """See `ts_bench.engines.Engine.prepare`."""
        if device.type != "cuda":
            raise UnsupportedError("trainstream 0.4.1 needs a CUDA GPU")
        if scenario.base not in ("nf4", "int8", "bf16", "fp32"):
            raise UnsupportedError(f"trainstream 0.4.1 has no {scenario.base}")
        sys.path.insert(0, os.environ[FOLDER])
        hf: Any = __import__("trainstream.integrations.huggingface", fromlist=["load_model"])
        old: Any = sys.modules["trainstream"]
        if old.__version__ != VERSION:
            raise UnsupportedError(f"{FOLDER} holds trainstream {old.__version__}, not {VERSION}")
        kind = scenario.base if scenario.base in ("nf4", "int8") else "none"
        with tempfile.TemporaryDirectory() as folder, _random_on(device):
            config_of(scenario).save_pretrained(folder)
            model: nn.Module = hf.load_model(
                folder,
                quantize=kind,
                dtype=torch.float32 if scenario.base == "fp32" else torch.bfloat16,
                random_weights=True,
            )
        model.train()
        if scenario.mode == "lora":
            model.requires_grad_(False)
            model = add_adapters(model, scenario)
        optimizer = torch.optim.AdamW(trainable(model), lr=LEARNING_RATE)
        clip = scenario.max_grad_norm
        # It refuses quantized weights unless their kind is named again.
        model, wrapped = hf.wrap_hf(
            model, optimizer, device=device, max_grad_norm=clip, quantize=kind
        )
        head = hf.lm_head_of(model)

        def loss(model: nn.Module, inputs: Inputs) -> Tensor:
            rest = {name: value for name, value in inputs.items() if name != "labels"}
            with hf._CaptureHidden(head) as capture:
                model(**rest)
            found: Tensor = old.causal_lm_loss(
                capture.hidden, head.weight, inputs["labels"], head.bias
            )
            return found

        def details() -> dict[str, Any]:
            report = old.memory_report(model)
            return {name: str(value)[:2000] for name, value in report.items()}

        return TrainStep(model, wrapped, scenario, device, details, loss, clips=True)


@contextlib.contextmanager
def _random_on(device: torch.device) -> Iterator[None]:
    """Its random weights are drawn on one core of the host, minutes for 14B: draw them on the GPU.

    Only `Tensor.normal_` of large host tensors changes, and only while the model is made.
    """
    plain = Tensor.normal_

    def normal_(self: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Any:
        if self.device.type != "cpu" or self.numel() < 1 << 16:
            return plain(self, mean, std, generator=generator)
        drawn = torch.empty(self.shape, device=device, dtype=self.dtype)
        return self.copy_(plain(drawn, mean, std))

    Tensor.normal_ = normal_  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        Tensor.normal_ = plain  # type: ignore[method-assign]
        torch.cuda.empty_cache()


ENGINE = PublishedEngine()
