"""Host updates during backward: the newest gradients first, and never a lock-up."""

from __future__ import annotations

import random
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from ts_core import OffloadAdamW
from ts_core.device.host import HostDevice
from ts_core.optim.newest_first import NewestFirst
from ts_core.optim.places import HostPlace
from ts_core.testing import inject_delays
from ts_core.transfer import CopyEngine


class Apart(HostDevice):
    """A host device whose gradients are copied to host memory."""

    separate_memory = True


class Held:
    """A worker that is kept busy until `go`."""

    def __init__(self) -> None:
        self.worker = ThreadPoolExecutor(1)
        self._gate = threading.Event()
        self.worker.submit(self._gate.wait)

    def go(self) -> None:
        self._gate.set()
        self.worker.shutdown(wait=True)


def test_the_newest_comes_first() -> None:
    held, order = Held(), list[int]()
    queue = NewestFirst[None](held.worker)
    jobs = [queue.submit(lambda k=k: order.append(k), lambda: True) for k in range(5)]
    held.go()
    assert order == [4, 3, 2, 1, 0]
    assert all(job.done() for job in jobs)


def test_what_would_wait_is_passed_over_and_the_oldest_waits() -> None:
    held, order = Held(), list[int]()
    queue = NewestFirst[None](held.worker)
    landed = {0: False, 1: True, 2: False, 3: False}
    for k in range(4):
        queue.submit(lambda k=k: order.append(k), lambda k=k: landed[k])
    held.go()
    assert order == [1, 0, 2, 3]


def test_an_error_is_that_of_its_own_work() -> None:
    held = Held()
    queue = NewestFirst[int](held.worker)

    def fail() -> int:
        raise ValueError("mine")

    jobs = [queue.submit(lambda: 1, lambda: True), queue.submit(fail, lambda: True)]
    jobs.append(queue.submit(lambda: 3, lambda: True))
    held.go()
    assert (jobs[0].result(), jobs[2].result()) == (1, 3)
    with pytest.raises(ValueError, match="mine"):
        jobs[1].result()


@pytest.mark.parametrize("seed", range(8))
def test_work_behind_its_own_sums_never_locks_up(seed: int) -> None:
    """Each piece of work waits for sums queued before it on the same worker, as parts of gradients
    are; sums of later work may be queued in between."""
    draw = random.Random(seed)
    worker = ThreadPoolExecutor(1)
    queue = NewestFirst[int](worker)
    sums: dict[int, list[Future[None]]] = {k: [] for k in range(30)}
    jobs: list[Future[int]] = []
    pending = list(range(30))
    while pending:
        k = draw.choice(pending[:4])
        if len(sums[k]) < 3 and draw.random() < 0.7:
            sums[k].append(worker.submit(lambda: None))
            continue
        pending.remove(k)

        def run(k: int = k) -> int:
            for job in sums[k]:
                job.result(timeout=5.0)
            return k

        jobs.append(queue.submit(run, lambda k=k: all(job.done() for job in sums[k])))
    assert sorted(job.result(timeout=10.0) for job in jobs) == list(range(30))
    worker.shutdown()


@pytest.mark.parametrize("delays", [None, 5])
def test_the_optimizer_updates_what_the_next_forward_reads_first(
    delays: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the worker is kept busy, gradients of a whole backward come: then in forward order.

    Delayed copies are passed over, and no bit depends on the order.
    """
    order: list[int] = []
    run = HostPlace.update

    def told(self: HostPlace, update: Any, scale: float) -> Any:
        order.append(update.target.data_ptr())
        return run(self, update, scale)

    monkeypatch.setattr(HostPlace, "update", told)

    def trained(hold: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(520, 520)) for _ in range(6)]
        device = Apart()
        optimizer = OffloadAdamW(
            params, lr=1e-2, eager=True, device=device, copies=CopyEngine(device), chunk_elems=4096
        )
        optimizer.build()
        for _ in range(3):
            gate = threading.Event()
            if hold:
                optimizer._updates.pipeline.on_host(lambda gate=gate: gate.wait() and None)
            optimizer.synchronize()
            order.clear()
            found = torch.ones(4, 520)
            for param in params:
                found = torch.tanh(found @ param)
            found.square().sum().backward()
            gate.set()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        if hold and delays is None:
            assert order == [param.data_ptr() for param in params]
        assert len(order) == len(params)
        return [param.detach().clone() for param in params]

    if delays is None:
        assert all(map(torch.equal, trained(True), trained(False)))
    else:
        with inject_delays(delays, max_ms=2.0):
            found = trained(True)
        assert all(map(torch.equal, found, trained(False)))
