"""The plan counts the gradients that are on the device at once, not all that ever come."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ts_core import OffloadAdamW
from ts_core.config import WrapOptions
from ts_core.engine.placement import model_profile
from ts_core.engine.planning import gradients_in_flight

MIB = 1 << 20


@pytest.mark.parametrize(
    ("options", "waits"),
    [
        ({}, False),
        ({"max_grad_norm": 1.0}, False),  # to the host, where the norm is needed too
        ({"accumulation_steps": 4}, False),
        ({"optimizer_mode": "gpu"}, False),
        ({"optimizer_mode": "auto", "max_grad_norm": 1.0}, True),
        ({"optimizer_mode": "gpu", "accumulation_steps": 2}, True),
        ({"optimizer_mode": "hybrid", "eager": False}, True),
    ],
)
def test_which_gradients_wait(options: dict[str, Any], waits: bool) -> None:
    config = WrapOptions.from_keywords({"max_inflight_bytes": MIB, **options})
    found = gradients_in_flight(None, config)
    assert (found is None) == waits
    assert waits or found == 2 * MIB


def test_an_optimizer_that_was_passed_counts_too() -> None:
    params = [nn.Parameter(torch.zeros(3))]
    config = WrapOptions.from_keywords({})
    assert gradients_in_flight(OffloadAdamW(params, mode="gpu", max_grad_norm=1.0), config) is None
    assert gradients_in_flight(OffloadAdamW(params, max_grad_norm=1.0), config) is not None


def test_bytes() -> None:
    model = nn.Sequential(*(nn.Linear(256, 1024, bias=False) for _ in range(8)))  # 1 MiB each
    model.append(nn.Linear(1024, 1024, bias=False))  # 4 MiB
    assert model_profile(model, ()).trained == 12 * MIB
    assert model_profile(model, (), 8.0, 2 * MIB).trained == 6 * MIB
    assert model_profile(model, (), 8.0, 100 * MIB).trained == 12 * MIB
