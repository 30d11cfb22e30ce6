"""trainstream: ts_hf's random model, PEFT adapters, and ts_core's streaming underneath."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ts_bench.engines import API_VERSION, UnsupportedError
from ts_bench.scenarios import Scenario
from ts_bench.workload import (
    LEARNING_RATE,
    Inputs,
    LossFunction,
    TrainStep,
    add_adapters,
    config_of,
    input_batches,
    recompute_activations,
    trainable,
)
from ts_core.errors import NotAvailableError, UnknownPluginError
from ts_core.registry import codecs

CHECKPOINTING = "checkpointing"
LOSS_CHUNK_SIZE = 1024  # TrainStreamTrainer's default
# A block's call is recorded when it comes for the third time after everything has settled.
QUIET_STEPS = 4
PLAIN_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class TrainStreamEngine:
    """A model on the host whose blocks stream, within the scenario's memory cap.

    Args:
        name: of the engine.
        how: what differs from wrap's defaults, in words.
        **options: of wrap(), and `fp8_backward` of ts_quant.configure_matmul().
    """

    API_VERSION = API_VERSION
    variants = ("default", CHECKPOINTING)

    def __init__(self, name: str, how: str, **options: Any) -> None:
        self.name = name
        self.description = f"ts_hf.load_model + PEFT + wrap_hf {how}, TrainStreamTrainer's loss"
        self._options = options

    def with_options(self, options: dict[str, Any]) -> TrainStreamEngine:
        """The same engine with more options."""
        how = ", ".join(f"{name}={value!r}" for name, value in options.items())
        more = TrainStreamEngine(self.name, "", **{**self._options, **options})
        more.description = f"{self.description}; {how}"
        return more

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
        if variant == CHECKPOINTING:
            recompute_activations(model)
        if scenario.mode == "lora":
            model.requires_grad_(False)
            model = add_adapters(model, scenario)
        else:
            model.requires_grad_(True)
        optimizer = torch.optim.AdamW(trainable(model), lr=LEARNING_RATE)
        options: dict[str, Any] = dict(self._options)
        _choose_products(model, scenario.base, options)
        if scenario.max_grad_norm is not None:
            options["max_grad_norm"] = scenario.max_grad_norm
        if scenario.limit_bytes is not None:
            options["vram_limit"] = scenario.limit_bytes
        try:
            model, wrapped = wrap_hf(model, optimizer, device=device, **options)
        except NotAvailableError as error:
            raise UnsupportedError(str(error)) from error
        notes: list[str] = []
        loss = _trainer_loss(model, scenario, device, notes)
        return TrainStep(
            model,
            wrapped,
            scenario,
            device,
            lambda: {"loss": notes, **_details(model)},
            loss,
            clips=True,
            transferred=lambda: _transferred(model),
            settled=Settled(model),
        )


def _choose_products(model: nn.Module, base: str, options: dict[str, Any]) -> None:
    """Take out of `options` what is no option of wrap()."""
    fp8_backward = options.pop("fp8_backward", None)
    if fp8_backward is None:
        return
    if base in PLAIN_DTYPES:
        raise UnsupportedError("fp8_backward: the base is not quantized")
    configure = getattr(codecs.get(base), "configure_matmul", None)
    if configure is None:
        raise UnsupportedError(f"fp8_backward: products of {base!r} cannot be chosen")
    configure(model, fp8_backward=fp8_backward)


class Settled:
    """Whether a wrapped model runs as it will go on running; to be called once after each step.

    It does once placement and activations have settled and nothing was recorded, moved or decided
    in the last few steps.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._seen: tuple[int, ...] = ()
        self._quiet = 0

    def __call__(self) -> bool:
        from ts_core import memory_report

        report = memory_report(self._model)
        replay = report.get("replay") or {}
        counts = (replay.get("recorded", 0), replay.get("dropped", 0), len(report["events"]))
        quiet = report["plan"]["settled"] and counts == self._seen
        self._seen = counts
        self._quiet = self._quiet + 1 if quiet else 0
        return self._quiet >= QUIET_STEPS


def _trainer_loss(
    model: nn.Module, scenario: Scenario, device: torch.device, notes: list[str]
) -> LossFunction | None:
    """The loss that TrainStreamTrainer takes by default: by chunks, where that is the model's own.

    It is tried out here on a batch, which is then not a part of the first step.
    """
    from ts_hf.training.loss import ChunkedLoss

    chunked = ChunkedLoss(LOSS_CHUNK_SIZE, notes.append)
    with torch.autocast(device.type, torch.bfloat16):
        if not chunked.applies(model, next(input_batches(scenario, device))):
            return None
    notes.append(f"by chunks of {LOSS_CHUNK_SIZE} rows of logits")

    def loss(model: nn.Module, inputs: Inputs) -> Tensor:
        return chunked(model, inputs, None)[0]

    return loss


def _transferred(model: nn.Module) -> dict[str, int]:
    from ts_core import memory_report

    copies = memory_report(model)["transfers"]
    return {way: int(copies[way]["bytes"]) for way in ("h2d", "d2h")}


def _details(model: nn.Module) -> dict[str, Any]:
    """What `memory_report` says about where the blocks live, and the decisions taken."""
    from ts_core import memory_report

    report = memory_report(model)
    return {
        "events": [str(event) for event in report["events"]],
        "params": _plain(report.get("params")),
        "plan": _plain(report.get("plan")),
        "pinned": _plain(report.get("pinned")),
        "optimizer": _plain(report.get("optimizer")),
        "activations": _plain(report.get("activations")),
        "replay": _plain(report.get("replay")),
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


ENGINE = TrainStreamEngine("trainstream", "at its defaults")
ENGINE_ZERO_COPY = TrainStreamEngine(
    "trainstream-gpu", "with optimizer_mode='gpu'", optimizer_mode="gpu", offload=True
)
ENGINE_HYBRID = TrainStreamEngine(
    "trainstream-hybrid", "with optimizer_mode='hybrid'", optimizer_mode="hybrid"
)
ENGINE_AUTO = TrainStreamEngine(
    "trainstream-auto", "with optimizer_mode='auto'", optimizer_mode="auto"
)
