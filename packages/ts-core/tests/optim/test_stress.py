"""200 steps of everything a training loop may do, ending equal to the plain run."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

from ts_core import OffloadAdamW
from ts_core.device.host import HostDevice
from ts_core.optim.places import NAMES
from ts_core.testing import inject_delays
from ts_core.transfer import CopyEngine

STEPS = 200


class Linked(HostDevice):
    separate_memory = True


def make(model: torch.nn.Module, clip: float | None, place: str) -> OffloadAdamW:
    device = Linked()
    optimizer = OffloadAdamW(
        model.parameters(),
        lr=1e-3,
        max_grad_norm=clip,
        device=device,
        copies=CopyEngine(device),
        chunk_elems=4096,
    )
    optimizer.build()
    optimizer.place_state([place] * len(optimizer.buckets))
    return optimizer


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_random_loops_end_equal_to_the_plain_run(
    lab: Any, clip: float | None, dtype: torch.dtype
) -> None:
    """Both runs draw the same accumulation and learning rates; one of them also saves, loads,
    moves its state, evaluates, drops a backward and calls zero_grad in odd places."""
    plain, busy = lab.model(dtype), lab.model(dtype)
    # Norms of accumulated gradients are summed by the host for host updates, else by the device.
    places = NAMES if clip is None else ("zero_copy", "resident")
    draws, whims = random.Random(1), random.Random(2)
    straight, optimizer = make(plain, clip, places[0]), make(busy, clip, places[0])
    with inject_delays(11, max_ms=0.5, share=0.05):
        for step in range(STEPS):
            micro, lr = draws.choice([1, 1, 2, 3]), draws.choice([1e-3, 3e-4, 0.0])
            for each, model in ((straight, plain), (optimizer, busy)):
                each.accumulation_steps = micro
                each.param_groups[0]["lr"] = lr
                if each is optimizer and whims.random() < 0.1 and not each.eager:
                    lab.loss(model, 3).backward()
                    each.zero_grad()
                for part in range(micro):
                    (lab.loss(model, step, part) / micro).backward()
                each.step()
                if each is straight or whims.random() < 0.5:
                    each.zero_grad()
            whim = whims.random()
            if whim < 0.03:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer.detach()
                optimizer = make(busy, clip, whims.choice(places))
                optimizer.load_state_dict(saved)
            elif whim < 0.06:
                optimizer.place_state([whims.choice(places) for _ in optimizer.buckets])
            elif whim < 0.12:
                with torch.no_grad():
                    assert torch.isfinite(lab.loss(busy, step))
            elif whim < 0.15:
                busy.load_state_dict(copy.deepcopy(busy.state_dict()))
    assert lab.distance(plain, busy) == 0.0
    assert lab.distance(plain, lab.model(dtype)) > 1e-3
