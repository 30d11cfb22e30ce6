"""Host updates during backward: the newest gradients first, and never a lock-up."""

from __future__ import annotations

import gc
import random
import threading
import weakref
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


def test_an_error_in_asking_is_for_the_work_to_find() -> None:
    """A device that has failed raises at every question; nobody is to wait for ever then."""
    held, order = Held(), list[int]()
    queue = NewestFirst[None](held.worker)

    def broken() -> bool:
        raise RuntimeError("the device is gone")

    jobs = [queue.submit(lambda k=k: order.append(k), broken) for k in range(3)]
    held.go()
    for job in jobs:
        job.result(timeout=5.0)
    assert sorted(order) == [0, 1, 2]


def test_work_that_no_worker_takes_is_not_kept() -> None:
    worker = ThreadPoolExecutor(1)
    queue = NewestFirst[int](worker)
    assert queue.submit(lambda: 1, lambda: True).result() == 1
    worker.shutdown()
    with pytest.raises(RuntimeError, match="shutdown"):
        queue.submit(lambda: 2, lambda: True)
    assert queue._waiting == []


def test_an_error_does_not_keep_its_work() -> None:
    """It goes with its future, without a collection of garbage."""
    held = Held()
    queue = NewestFirst[None](held.worker)

    def fail() -> None:
        raise ValueError("mine")

    job = queue.submit(fail, lambda: True)
    held.go()
    gone = weakref.ref(job)
    gc.disable()
    try:
        del job
        assert gone() is None
    finally:
        gc.enable()


def test_what_waits_for_readers_of_old_values_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Updates in place write where copies that were queued before still read."""
    device = HostDevice()
    params = [torch.nn.Parameter(torch.ones(520, 520)) for _ in range(3)]
    optimizer = OffloadAdamW(params, eager=True, device=device, copies=CopyEngine(device))
    optimizer.build()
    begin, read = threading.Event(), threading.Event()
    optimizer._updates.pipeline.on_host(lambda: begin.wait() and None)
    reader = device.new_stream("reader")
    device.launch(reader, lambda: read.wait() and None)
    layout = optimizer.buckets[optimizer._updates.where[params[0]][0]].layout
    monkeypatch.setattr(layout, "begin_update", lambda: [reader.record()])
    for param in reversed(params):
        param.grad = torch.ones_like(param)
        optimizer._on_gradient(param)
    newest, *others = (optimizer.flight_of(param) for param in params)
    begin.set()
    try:
        for flight in others:
            flight._job.result(timeout=10.0)
        assert not newest.ran()
    finally:
        read.set()
    optimizer.step()
    optimizer.synchronize()
    assert all(torch.equal(param, params[0]) for param in params)


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
            if delays is None:
                optimizer._updates.storage.copies.synchronize()  # all gradients are there
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
