"""trainstream: ts_hf's random model, PEFT adapters, and ts_core's streaming underneath."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ts_bench.engines import API_VERSION, UnsupportedError
from ts_bench.scenarios import Scenario
from ts_bench.workload import LEARNING_RATE, TrainStep, add_adapters, config_of, trainable
from ts_core.errors import NotAvailableError, UnknownPluginError

PLAIN_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class TrainStreamEngine:
    """A model on the host whose blocks stream, within the scenario's memory cap."""

    API_VERSION = API_VERSION
    name = "trainstream"
    description = "ts_hf.load_model + PEFT + ts_hf.wrap_hf, options left at their defaults"
    variants = ("default",)

    def available(self) -> str | None:
        """None: ts-core and ts-hf are requirements of ts-bench."""
        return None

    def prepare(self, scenario: Scenario, device: torch.device, variant: str) -> TrainStep:
        """See `ts_bench.engines.Engine.prepare`."""
        from ts_hf import load_model, wrap_hf

        plain = PLAIN_DTYPES.get(scenario.base)
        try:
            model: nn.Module = load_model(
                config_of(scenario),
                random_weights=True,
                quantize=None if plain is not None else scenario.base,
                dtype=plain or torch.bfloat16,
            )
        except (UnknownPluginError, NotAvailableError) as error:
            raise UnsupportedError(str(error)) from error
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what encoding left in torch's cache is not ours to keep
        model.train()
        if scenario.mode == "lora":
            model.requires_grad_(False)
            model = add_adapters(model, scenario)
        else:
            model.requires_grad_(True)
        optimizer = torch.optim.AdamW(trainable(model), lr=LEARNING_RATE)
        options: dict[str, Any] = {}
        if scenario.limit_bytes is not None:
            options["vram_limit"] = scenario.limit_bytes
        try:
            model, wrapped = wrap_hf(model, optimizer, device=device, **options)
        except NotAvailableError as error:
            raise UnsupportedError(str(error)) from error
        return TrainStep(model, wrapped, scenario, device, lambda: _details(model))


def _details(model: nn.Module) -> dict[str, Any]:
    """What `memory_report` says about where the blocks live, and the decisions taken."""
    from ts_core import memory_report

    report = memory_report(model)
    return {
        "events": [str(event) for event in report["events"]],
        "params": _plain(report.get("params")),
        "plan": _plain(report.get("plan")),
        "pinned": _plain(report.get("pinned")),
    }


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


ENGINE = TrainStreamEngine()
