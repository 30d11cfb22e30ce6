"""Runs of a tiny model under a policy for its activations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from ts_core.engine import memory_report, wrap
from ts_core.testing import TinyModel, TrainingRecord, inject_delays, tiny_model, train

STEPS = 3
SEED = 7
Run = tuple[TinyModel, TrainingRecord]


def run(
    *,
    steps: int = STEPS,
    accumulation: int = 1,
    delays: bool = True,
    call: Callable[[Any, torch.Tensor], torch.Tensor] | None = None,
    autocast: torch.dtype | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "host",
    depth: int = 5,
    width: int = 16,
    length: int = 7,
    full: bool = False,
    **options: Any,
) -> Run:
    """Train a tiny model; copies may not pile up, so that pages really leave the device."""
    model = tiny_model(depth, width, dropout=0.1, dtype=dtype, full=full)
    trained = [p for p in model.parameters() if p.requires_grad]
    defaults = {"param_offload": False, "min_offload_bytes": 0, "max_inflight_bytes": 1}
    model, optimizer = wrap(
        model,
        torch.optim.AdamW(trained, lr=1e-2),
        accumulation_steps=accumulation,
        quantize="none",
        offload=True,
        device=device,
        **{**defaults, **options},
    )
    with inject_delays(SEED, max_ms=0.3) if delays else contextlib.nullcontext():
        record = train(
            model,
            optimizer,
            steps,
            accumulation=accumulation,
            call=call,
            autocast=autocast,
            device="cpu" if device == "host" else device,
            length=length,
        )
    return model, record


def resident(**options: Any) -> TrainingRecord:
    """The same with everything on the device."""
    return run(delays=False, activation_offload=False, recompute=False, **options)[1]


def in_short(model: torch.nn.Module) -> str:
    """The policy now: a letter per block."""
    return "".join(mode[0] for mode in memory_report(model)["activations"]["policy"])
