"""Replayed equals eager bit for bit: streamed or not, kept or recomputed, with delays injected."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ts_core import memory_report, unwrap, wrap
from ts_core.engine.replay.host_recorder import HostRecorder
from ts_core.testing import TinyModel, TrainingRecord, inject_delays, tiny_model, train

STEPS = 4


def run(
    graphs: bool,
    *,
    full: bool = False,
    autocast: torch.dtype | None = None,
    length: int = 7,
    **options: Any,
) -> tuple[TinyModel, TrainingRecord]:
    model = tiny_model(depth=4, dropout=0.1, full=full)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = wrap(
        model,
        torch.optim.AdamW(trained, lr=1e-2),
        quantize="none",
        device="host",
        offload=True,
        accumulation_steps=2,
        cuda_graphs=graphs,
        **options,
    )
    with inject_delays(3, max_ms=1.0, share=0.3):
        record = train(model, optimizer, STEPS, accumulation=2, autocast=autocast, length=length)
        optimizer.synchronize()
    return model, record


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"param_offload": True},
        {"recompute": True},
        {"param_offload": [0, 2, 3], "recompute": [0, 1], "max_grad_norm": 1.0},
        {"full": True, "param_offload": True},
        {"autocast": torch.bfloat16, "param_offload": 0.5, "recompute": [1]},
    ],
    ids=["resident", "streamed", "recomputed", "mixed", "full", "autocast"],
)
def test_replayed_equals_eager(recorders: list[HostRecorder], options: dict[str, Any]) -> None:
    _, eager = run(False, **options)
    model, replayed = run(True, **options)
    assert eager.differences(replayed) == []
    report = memory_report(model)["replay"]
    # Two calls of each of the 8 are the first sight and the watched one.
    assert report["replayed_forwards"] == report["replayed_backwards"] == 4 * (2 * STEPS - 2)
    assert (report["recorded"], report["eager"]) == (4, {})  # a slot of its own for each block
    assert report["pool_bytes"] > 0 and report["scratch_bytes"] > 0
    assert (report["saved_bytes"] > 0) == (options.get("recompute") is not True)


def test_paged_activations_stay_eager_and_say_so(recorders: list[HostRecorder]) -> None:
    options: dict[str, Any] = {"activation_offload": 0.5, "min_offload_bytes": 0}
    _, eager = run(False, **options)
    model, replayed = run(True, **options)
    assert eager.differences(replayed) == []
    report = memory_report(model)
    assert report["replay"]["replayed_backwards"] == 2 * (2 * STEPS - 2)
    assert any("paged to host memory" in line for line in report["events"])


def test_without_a_gpu_it_is_off_and_says_so() -> None:
    model, _ = run(True)
    report = memory_report(model)
    assert "replay" not in report
    assert any("cuda_graphs=True: off, as there is no GPU" in line for line in report["events"])


def test_unwrap_drops_what_was_recorded(recorders: list[HostRecorder]) -> None:
    model, _ = run(True)
    replay = model._trainstream_session.replay
    assert replay.size_bytes() > 0
    unwrap(model)
    assert replay.report()["saved_bytes"] == replay.report()["scratch_bytes"] == 0
    model(torch.zeros(2, 7, dtype=torch.long)).backward()
