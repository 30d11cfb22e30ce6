"""Updates by the device: how many the host queues, in which order, on which stream."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from ts_core import OffloadAdamW
from ts_core.device.host import HostDevice
from ts_core.optim import device_places
from ts_core.optim.launch_order import LINK_AHEAD, in_order
from ts_core.transfer import CopyEngine


class SeparateHost(HostDevice):
    separate_memory = True


def optimizer_of(params: list[torch.nn.Parameter], **options: Any) -> OffloadAdamW:
    device = SeparateHost()
    return OffloadAdamW(params, device=device, copies=CopyEngine(device), **options)


def give(optimizer: OffloadAdamW, params: list[torch.nn.Parameter], leave: int = -1) -> None:
    for index, param in enumerate(params):
        if index != leave:
            param.grad = torch.full_like(param, 0.5)
            optimizer._on_gradient(param)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """(values, over the link) of every kernel."""
    found: list[tuple[int, bool]] = []
    update = device_places.update_on_device

    def noted(param: torch.Tensor, *args: Any, **options: Any) -> None:
        found.append((param.numel(), options["over_link"]))
        update(param, *args, **options)

    monkeypatch.setattr(device_places, "update_on_device", noted)
    return found


def test_small_parameters_between_large_ones_are_one_update(
    launched: list[tuple[int, bool]],
) -> None:
    """Norms and biases stand between matrices, so their random bits are no one run; with fp32
    moments nobody asks for those."""
    sizes = [(7,), (600, 1000), (300,), (600, 1000), (9, 3)]
    ours = [torch.nn.Parameter(torch.ones(size)) for size in sizes]
    theirs = [torch.nn.Parameter(torch.ones(size)) for size in sizes]
    optimizer = optimizer_of(ours, mode="gpu", lr=0.1)
    reference = torch.optim.AdamW(theirs, lr=0.1)
    for step in range(3):
        leave = 2 if step == 1 else -1
        give(optimizer, ours, leave)
        optimizer.step()
        for index, param in enumerate(theirs):
            param.grad = None if index == leave else torch.full_like(param, 0.5)
        reference.step()
    optimizer.synchronize()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.detach(), other.detach(), rtol=0, atol=3e-7)
    small = [values for values, _ in launched if values < 10_000]
    # Neighbours of the one that was left out have other counts from then on.
    assert small == [256 + 512 + 27, 7, 27, 7, 300, 27]


def test_moments_that_are_rounded_keep_their_random_bits() -> None:
    """Random bits follow the place among all parameters, so no run spans a gap of them."""
    params = [torch.nn.Parameter(torch.ones(size)) for size in ((7,), (600, 1000), (300,))]
    optimizer = optimizer_of(params, moment_dtype="bf16", eager=False)
    give(optimizer, params)
    (small,) = [bucket for bucket in optimizer.buckets if bucket.layout.many]
    assert [segment.base for segment in small._segments()] == [0, 256 + 600_064]


def test_updates_over_the_link_come_a_little_earlier() -> None:
    params = [torch.nn.Parameter(torch.ones(600, 1000)) for _ in range(LINK_AHEAD + 8)]
    optimizer = optimizer_of(params, mode="gpu", max_grad_norm=1.0)
    optimizer.build()
    count = len(params)
    places = ["resident"] * count
    places[-1] = places[4] = "zero_copy"
    optimizer.place_state(places)
    give(optimizer, list(reversed(params)))
    index_of = {param: index for index, param in enumerate(params)}
    order = [index_of[bucket.params[0]] for bucket in in_order(optimizer.buckets)]
    assert order[:9] == [4, 0, 1, 2, 3, 5, 6, 7, count - 1] and count - 1 - LINK_AHEAD == 7
    assert order[9:] == list(range(8, count - 1))
    optimizer.step()
    optimizer.synchronize()


def test_the_link_holds_up_no_update_in_device_memory() -> None:
    params = [torch.nn.Parameter(torch.ones(600, 1000)) for _ in range(2)]
    optimizer = optimizer_of(params, mode="gpu", eager=False, lr=0.1)
    optimizer.build()
    optimizer.place_state(["zero_copy", "resident"])
    gate = threading.Event()
    device = optimizer._updates.storage.device
    assert device is not None
    link = optimizer._updates.storage.device_work().stream(over_link=True)
    device.launch(link, lambda: gate.wait(30) and None)
    give(optimizer, params)
    optimizer.step()
    begun = time.monotonic()
    assert float(params[1][0, 0].detach()) < 1.0
    assert time.monotonic() - begun < 10 and not gate.is_set()
    gate.set()
    assert float(params[0][0, 0].detach()) < 1.0


def test_norms_of_steps_that_share_no_parameter_do_not_mix() -> None:
    """Nothing in a step waits for those before it then, however many there are."""
    params = [torch.nn.Parameter(torch.ones(600, 1000)) for _ in range(5)]
    optimizer = optimizer_of(params, mode="gpu", lr=0.1, max_grad_norm=1.0)
    optimizer.build()
    go = threading.Event()
    optimizer._updates.pipeline.on_host(lambda: go.wait(10))
    verdicts = []
    for index, param in enumerate(params):
        param.grad = torch.full_like(param, 10.0**index)
        optimizer.step()
        verdicts.append(optimizer._updates.norm)
    assert optimizer._updates.storage.copies is not None
    optimizer._updates.storage.copies.synchronize()
    go.set()
    found = [verdict.result().norm for verdict in verdicts if verdict is not None]
    assert found == [pytest.approx(600_000**0.5 * 10.0**index) for index in range(5)]
