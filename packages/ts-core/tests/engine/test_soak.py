"""A thousand steps with delays, failures, evaluations and saves: nothing grows, no bit differs."""

from __future__ import annotations

import copy
import gc
import random
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from ts_core import pinned_stats, wrap
from ts_core.engine.host_buffers import TAG
from ts_core.testing import inject_delays, tiny_model

STEPS, WARM = 1000, 200
STREAMED = {
    "param_offload": 0.75,
    "activation_offload": 0.5,
    "recompute": [1],
    "min_offload_bytes": 1,
}


class Raised(Exception):
    pass


def batch(seed: int) -> torch.Tensor:
    return torch.randint(0, 37, (2, 7), generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, optimizer: Any, seed: int, passes: int) -> None:
    torch.manual_seed(seed)  # dropout
    for part in range(passes):
        (model(batch(7 * seed + part)) / passes).backward()
    optimizer.step()
    optimizer.zero_grad()


def fail(model: nn.Module, optimizer: Any, seed: int, where: str) -> None:
    """An exception in the middle of a forward or a backward, as a user's code may raise."""
    layer = model.layers[seed % len(model.layers)]

    def raise_(*_: Any) -> None:
        raise Raised

    if where == "forward":
        handle = layer.lora_b.register_forward_hook(raise_)
        with pytest.raises(Raised):
            model(batch(seed))
        handle.remove()
    else:
        handle = layer.lora_b.register_forward_hook(
            lambda m, args, out: out.register_hook(raise_) and None
        )
        with pytest.raises(Raised):
            model(batch(seed)).backward()
        handle.remove()
        optimizer.zero_grad()


def footprint() -> dict[str, int]:
    gc.collect()
    stats = pinned_stats()
    pages = stats.get(TAG, 0)
    return {
        "arena": stats["arena_bytes"],
        "arena used": stats["arena_used"] - pages,
        "paged activations": pages,
        "RSS": psutil.Process().memory_info().rss,
    }


def lasting(files: list[str]) -> set[str]:
    """Without those that the watch on RAM opens for a moment."""
    return {name for name in files if not name.startswith(("/proc/", "/sys/"))}


@pytest.mark.parametrize("trained", [False, True], ids=["adapters", "everything"])
def test_soak(trained: bool, open_files: Callable[[], list[str]]) -> None:
    pair = []
    for options in (STREAMED, {"param_offload": False, "activation_offload": False}):
        made = tiny_model(depth=4, width=16, dropout=0.1)
        if trained:
            made.requires_grad_(True)
        pair.append(wrap(made, lr=1e-3, device="host", max_grad_norm=1.0, eager=False, **options))
    (model, optimizer), (twin, theirs) = pair
    choose = random.Random(0)
    before: dict[str, int] = {}
    threads, files = set[threading.Thread](), set[str]()
    with inject_delays(3, max_ms=0.3, share=0.05):
        for number in range(STEPS):
            chance = choose.random()
            if chance < 0.03:
                fail(model, optimizer, number, "forward")
            elif chance < 0.06:
                fail(model, optimizer, number, "backward")
            elif chance < 0.09:
                with torch.no_grad():
                    found, wanted = model.eval()(batch(number)), twin.eval()(batch(number))
                assert torch.equal(found, wanted), number
                model.train()
                twin.train()
            elif chance < 0.11:
                saved = {name: value.clone() for name, value in model.state_dict().items()}
                state = copy.deepcopy(optimizer.state_dict())  # it shows live memory
                step(model, optimizer, 5000 + number, 1)  # undone by what follows
                model.load_state_dict(saved)
                optimizer.load_state_dict(state)
            passes = 2 if chance > 0.9 else 1
            optimizer.accumulation_steps = theirs.accumulation_steps = passes
            step(model, optimizer, number, passes)
            step(twin, theirs, number, passes)
            if number == WARM:
                before = footprint()
                threads, files = set(threading.enumerate()), lasting(open_files())
    after = footprint()
    for (name, found), wanted in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(found, wanted), name
    growth = {name: after[name] - before[name] for name in after}
    assert set(threading.enumerate()) <= threads and lasting(open_files()) <= files
    assert growth.pop("RSS") < 24 << 20, growth
    # Buffers of a step that failed may still be held when the next one asks for its own.
    for name in ("paged activations", "arena"):
        assert growth.pop(name) <= before["paged activations"], (name, growth)
    assert all(grown <= 0 for grown in growth.values()), growth
