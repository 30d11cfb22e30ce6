"""The exact tier for activations: kept, paged or recomputed, the numbers are the same bits."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from ts_core import memory_report, wrap
from ts_core.testing import TinyModel, TrainingRecord, inject_delays, tiny_model, train

STEPS = 4
SEED = 7


def run(
    *,
    steps: int = STEPS,
    accumulation: int = 1,
    delays: bool = True,
    call: Any = None,
    device: str = "host",
    autocast: torch.dtype | None = None,
    dropout: float = 0.1,
    model_options: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[TinyModel, TrainingRecord]:
    model = tiny_model(dropout=dropout, **(model_options or {}))
    trained = [p for p in model.parameters() if p.requires_grad]
    options = {"param_offload": False, "min_offload_bytes": 0, **options}
    model, optimizer = wrap(
        model,
        torch.optim.AdamW(trained, lr=1e-2),
        accumulation_steps=accumulation,
        quantize="none",
        offload=True,
        device=device,
        **options,
    )
    where = "cpu" if device == "host" else device
    with inject_delays(SEED, max_ms=1.0) if delays else contextlib.nullcontext():
        record = train(
            model,
            optimizer,
            steps,
            accumulation=accumulation,
            call=call,
            device=where,
            autocast=autocast,
        )
    return model, record


def resident(**options: Any) -> TrainingRecord:
    options = {**options, "activation_offload": False, "recompute": False, "param_offload": False}
    return run(delays=False, **options)[1]


@pytest.mark.parametrize("param_offload", [False, True, [0, 3]])
@pytest.mark.parametrize(
    ("activation_offload", "recompute", "wanted"),
    [
        (True, False, "ooook"),
        (0.5, False, "okook"),
        (False, True, "rrrrr"),
        (False, [1, 3], "krkrk"),
        (True, [2], "oorok"),
    ],
)
def test_policies(activation_offload: Any, recompute: Any, wanted: str, param_offload: Any) -> None:
    model, record = run(
        activation_offload=activation_offload,
        recompute=recompute,
        param_offload=param_offload,
        accumulation=2,
    )
    assert resident(accumulation=2).differences(record) == []
    found = memory_report(model)["activations"]
    assert "".join(mode[0] for mode in found["policy"]) == wanted
    assert found["offloaded_blocks"] == [k for k, mode in enumerate(wanted) if mode == "o"]
    assert found["recompute_blocks"] == [k for k, mode in enumerate(wanted) if mode == "r"]
    assert (found["fetches"] > 0) == ("o" in wanted)
    assert found["recomputed"] == 2 * STEPS * wanted.count("r")
