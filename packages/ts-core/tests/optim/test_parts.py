"""Gradients of many passes are summed in host memory through few buffers."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch

from ts_core import OffloadAdamW
from ts_core.device.host import HostDevice
from ts_core.memory.arena import PinnedArena
from ts_core.optim import buckets
from ts_core.optim.parts import PartSums
from ts_core.testing import inject_delays
from ts_core.transfer import CopyEngine


class Linked(HostDevice):
    separate_memory = True


def run(lab: Any, device: HostDevice, limit: int | None, clip: float | None) -> Any:
    model = lab.model()
    optimizer = OffloadAdamW(
        model.parameters(),
        lr=1e-2,
        device=device,
        copies=CopyEngine(device, limit),
        accumulation_steps=6,
        max_grad_norm=clip,
        threads=1,
    )
    with inject_delays(5, max_ms=0.5, share=0.2):
        lab.run(model, optimizer, 3, accumulation=6)
        lab.loss(model, 3).backward()  # a step that is dropped, and its sums with it
        lab.loss(model, 3, 1).backward()
        optimizer.zero_grad()
        lab.run(model, optimizer, 2, accumulation=6, first=3)
        optimizer.synchronize()
    return model, optimizer


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("limit", [None, 1_300_000])
def test_bounded_and_exact(lab: Any, limit: int | None, clip: float | None) -> None:
    """The large parameters take 1.1 and 1.2 MB; 5 of their 6 passes are added."""
    expected, _ = run(lab, HostDevice(), None, clip)
    found, optimizer = run(lab, Linked(), limit, clip)
    assert lab.distance(expected, found) == 0.0
    held = optimizer._updates.storage._part_sums().held_bytes
    assert 0 < held <= (limit or 2 * 6 * 1_200_000)


def test_no_gradient_stays_on_the_device_between_passes(lab: Any) -> None:
    model = lab.model()
    device = Linked()
    optimizer = OffloadAdamW(
        model.parameters(), device=device, copies=CopyEngine(device), accumulation_steps=2
    )
    lab.loss(model, 0).backward()
    large = next(b for b in optimizer.buckets if b.params[0] is model.large)
    assert large.started() and large._gradients._single is None


def test_an_error_in_a_sum_reaches_the_reader(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, device = lab.model(), Linked()
    optimizer = OffloadAdamW(
        model.parameters(), device=device, copies=CopyEngine(device), accumulation_steps=2
    )
    lab.run(model, optimizer, 1, accumulation=2)
    optimizer.synchronize()

    def broken(event: Any) -> None:
        raise RuntimeError("the copy broke")

    lab.loss(model, 1).backward()
    monkeypatch.setattr(device, "host_wait", broken)
    lab.loss(model, 1, 1).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="the copy broke"):
        torch.sum(model.large)


def test_gradients_that_could_not_be_measured_can_be_dropped(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for fails in (False, True):
        model, device = lab.model(), Linked()
        optimizer = OffloadAdamW(
            model.parameters(),
            device=device,
            copies=CopyEngine(device),
            accumulation_steps=2,
            max_grad_norm=0.5,
        )
        if fails:

            def fail(*_: Any) -> Any:
                raise MemoryError("measuring")

            with monkeypatch.context() as patch:
                patch.setattr(buckets, "_measure", fail)
                for part in range(2):
                    lab.loss(model, 0, part).backward()
                assert optimizer._updates.pipeline._measured
                optimizer.zero_grad()
        lab.run(model, optimizer, 2, accumulation=2)
        optimizer.synchronize()
        results.append(model)
    assert lab.distance(*results) == 0.0


def test_a_buffer_is_not_lost_where_the_wait_for_it_ends_early() -> None:
    """By Ctrl-C, say."""

    class Interrupted(Future[None]):
        waits = 0

        def exception(self, timeout: float | None = None) -> BaseException | None:
            self.waits += 1
            if self.waits == 1:
                raise KeyboardInterrupt
            return None

    device = Linked()
    parts = PartSums(CopyEngine(device), PinnedArena(), lambda work: Interrupted(), 100)
    sum_h, part_d = torch.zeros(25), torch.ones(25)
    behind = device.compute_stream().record()
    parts.add(sum_h, part_d, behind)
    with pytest.raises(KeyboardInterrupt):
        parts.add(sum_h, part_d, behind)
    parts.add(sum_h, part_d, behind)
    assert parts.held_bytes == 100
