"""What the planner knows of trained weights that can be paged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ts_core.engine.placement import block_leaves, model_profile
from ts_core.schedule import MachineProfile, ModelProfile, PlanOptions, make_plan

MIB = 1 << 20


def stack(dtype: torch.dtype = torch.float32, freeze: bool = False) -> nn.Sequential:
    blocks = [nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512)) for _ in range(8)]
    model = nn.Sequential(nn.Sequential(*blocks), nn.Linear(512, 4)).to(dtype)
    if freeze:
        model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes(dtype: torch.dtype) -> None:
    model = stack(dtype)
    leaves = block_leaves(model, list(model[0]))
    profile = model_profile(model, leaves, gradients_in_flight=None, max_inflight_bytes=MIB // 4)
    size = 512 * 512 * dtype.itemsize
    assert profile.pageable == profile.trained_pageable == (size,) * 8
    total = sum(p.numel() for p in model.parameters())
    assert profile.fixed_device == total * dtype.itemsize - 8 * size
    # Gradients of resident weights wait for a device update; those of paged ones leave.
    assert profile.gradients(()) == total * dtype.itemsize
    leaving = min(total * dtype.itemsize, MIB // 2 + size)
    rest = total * dtype.itemsize - 8 * size
    assert profile.gradients(range(8)) == rest + min(8 * size, leaving)
    bounded = model_profile(model, leaves, gradients_in_flight=MIB)
    assert (
        bounded.gradients(())
        == bounded.gradients(range(8))
        == min(total * dtype.itemsize, MIB + size)
    )


def test_frozen_blocks_have_no_gradients_that_leave() -> None:
    model = stack(freeze=True)
    profile = model_profile(model, block_leaves(model, list(model[0])))
    assert profile.trained_pageable == (0,) * 8
    assert profile.gradients(range(8)) == profile.trained


def test_auto_pages_until_waiting_gradients_fit() -> None:
    """Each block that is paged takes its weights and its gradients off the device."""
    model = ModelProfile(
        pageable=(10 * MIB,) * 8,
        trained=80 * MIB,
        trained_pageable=(10 * MIB,) * 8,
        gradients_wait=True,
        gradients_leaving=10 * MIB,
    )
    options = PlanOptions(headroom=0.0, activation_share=0.0)
    paged = [
        len(make_plan(model, MachineProfile(room * MIB), options).paged)
        for room in (160, 150, 110, 70, 30)
    ]
    assert paged == sorted(paged)
    assert paged[0] == 0
    plan = make_plan(model, MachineProfile(110 * MIB), options)
    resident = 8 - len(plan.paged)
    assert plan.fits and plan.predicted["gradients"] == (10 * resident + 10) * MIB
    assert plan.predicted["total"] <= 110 * MIB


def test_images_are_the_copies_that_host_threads_write() -> None:
    """On a GPU a resident trained weight has a copy in host memory, a paged one its image."""
    model = stack()
    leaves = block_leaves(model, list(model[0]))
    profile = model_profile(model, leaves, host_copies=True)
    trained = sum(p.numel() * 4 for p in model.parameters())
    assert profile.optimizer_bytes((), True) == profile.host_state + trained
    for machine in (MachineProfile(None, 1 << 40), MachineProfile(None, 1 << 40, False)):
        totals = [
            make_plan(profile, machine, PlanOptions(param_offload=asked)).host["total"]
            for asked in (False, True)
        ]
        extra = 0 if machine.counts_fixed else sum(profile.pageable)
        assert totals[1] - totals[0] == extra
    without = model_profile(model, leaves)
    assert without.optimizer_bytes((), True) == without.host_state
