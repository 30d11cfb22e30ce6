"""Blocks with trained weights change place between steps, and no bit of any result changes."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from ts_core import memory_report, wrap
from ts_core.engine import wrapping
from ts_core.engine.placement import block_leaves, model_profile
from ts_core.testing import inject_delays, tiny_model, train

DEPTH = 5


def start(monkeypatch: pytest.MonkeyPatch, needs: list[float], **options: Any) -> tuple[Any, Any]:
    """A wrapped model on a device of 5 blocks, whose step k seems to need needs[k] more."""
    model = tiny_model(DEPTH, full=True, dropout=0.1)
    size = model_profile(model, block_leaves(model, list(model.layers))).pageable[0]
    real = wrapping.plan_options
    monkeypatch.setattr(
        wrapping, "plan_options", lambda config: replace(real(config), reserve=2 * size)
    )
    model, optimizer = wrap(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        device="host",
        quantize="none",
        vram_limit=5 * size,
        vram_headroom=0.0,
        threads=1,
        **options,
    )
    session = model._trainstream_session

    def memory() -> dict[str, int]:
        used = session.device.pool.used + int(needs[min(session.steps, len(needs) - 1)] * size)
        return {"allocated": used, "reserved": used, "peak_allocated": used}

    monkeypatch.setattr(session.device, "memory", memory)
    return model, optimizer


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_grad_norm": 0.5}, {"moment_dtype": "int8", "max_grad_norm": 0.5}],
    ids=["eager", "clipped", "int8"],
)
def test_any_course_of_needs(
    monkeypatch: pytest.MonkeyPatch, seed: int, options: dict[str, Any]
) -> None:
    draw = random.Random(seed)
    needs = [0.0] * 2 + [draw.uniform(0.0, 2.9) for _ in range(8)]
    model, optimizer = start(monkeypatch, needs, **options)
    session = model._trainstream_session
    counts: list[int] = []
    model.register_forward_hook(lambda *_: counts.append(len(session.homes)))
    with inject_delays(seed, max_ms=1.0):
        record = train(model, optimizer, 8)
    assert len(set(counts)) > 1  # blocks did change place
    plain = tiny_model(DEPTH, full=True, dropout=0.1)
    plain, other = wrap(
        plain,
        torch.optim.AdamW(plain.parameters(), lr=1e-2),
        device="host",
        quantize="none",
        param_offload=False,
        threads=1,
        **options,
    )
    assert train(plain, other, 8).differences(record) == []
    assert memory_report(model)["params"]["paged_blocks"] == sorted(
        {home.image.index for home in session.homes}
    )
    homes = {home.param: home for home in session.homes}
    for bucket in optimizer.buckets:
        assert bucket.home is homes.get(bucket.params[0])
