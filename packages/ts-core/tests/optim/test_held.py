"""Gradients that updates during backward still read: bounded, in the order of streams."""

from __future__ import annotations

import threading
import time
import weakref
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from ts_core import OffloadAdamW
from ts_core.device.host import HostDevice
from ts_core.optim.device_places import DeviceWork
from ts_core.optim.gradients import Sealed
from ts_core.optim.held import HeldGradients
from ts_core.transfer import CopyEngine


class Recorded(HostDevice):
    """Notes what its compute stream is told to wait for."""

    separate_memory = True

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[Any] = []
        waits = self.waits

        class Compute:
            name = "compute"

            def wait_event(self, event: Any) -> None:
                waits.append(event)

            def record(self) -> Any:
                return Passed(True)

            def synchronize(self) -> None:
                return None

        self._compute = Compute()  # type: ignore[assignment]


class Passed:
    def __init__(self, passed: bool) -> None:
        self.passed = passed

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        raise AssertionError("the host waits")


def queued(passed: bool | None) -> tuple[Future[Any], Passed | None]:
    """An update that has been queued; None: one that has already run, without an event."""
    job: Future[Any] = Future()
    event = None if passed is None else Passed(passed)
    job.set_result(event)
    return job, event


def gradient(values: int = 25) -> tuple[torch.Tensor, weakref.ref[Any]]:
    memory = np.zeros(values, dtype=np.float32)
    return torch.from_numpy(memory), weakref.ref(memory)


def test_the_oldest_go_behind_their_updates_and_the_host_waits_for_none() -> None:
    device = Recorded()
    held = HeldGradients(device)
    memories, events = [], []
    for _ in range(4):
        held.make_room(100, 250)
        tensor, memory = gradient()
        job, event = queued(False)
        held.add(job, tensor)
        memories.append(memory)
        events.append(event)
        del tensor
        assert held.size_bytes <= 250
    assert device.waits == events[:2]
    assert [memory() is None for memory in memories] == [True, True, False, False]
    held.clear()
    assert device.waits == events and held.size_bytes == 0
    assert all(memory() is None for memory in memories)


def test_what_has_been_read_goes_without_a_wait_of_a_stream_that_matters() -> None:
    device = Recorded()
    held = HeldGradients(device)
    for passed in (True, None):
        tensor, memory = gradient()
        held.add(queued(passed)[0], tensor)
        del tensor
        held.make_room(0, 10**9)
        assert memory() is None and held.size_bytes == 0


def test_what_the_link_still_reads_does_not_hold_what_was_read_in_device_memory() -> None:
    device = Recorded()
    held = HeldGradients(device)
    link, link_memory = gradient()
    near, near_memory = gradient()
    job, event = queued(False)
    held.add(job, link, over_link=True)
    held.add(queued(True)[0], near)
    del link, near
    held.make_room(100, 10**9)
    assert near_memory() is None and link_memory() is not None and held.size_bytes == 100
    held.add(queued(False)[0], gradient()[0])
    held.make_room(100, 200)  # the slow one goes first, behind its update
    assert device.waits[-1] is event and link_memory() is None and held.size_bytes == 100


def test_one_that_is_larger_than_the_limit_is_held_alone() -> None:
    device = Recorded()
    held = HeldGradients(device)
    for values in (10, 1000, 10):
        held.make_room(values * 4, 100)
        assert held.size_bytes == 0 or held.size_bytes + values * 4 <= 100
        held.add(queued(False)[0], gradient(values)[0])
    assert held.size_bytes == 40


def test_a_failed_update_lets_go_and_its_reader_gets_the_error() -> None:
    held = HeldGradients(Recorded())
    job: Future[Any] = Future()
    job.set_exception(RuntimeError("no"))
    tensor, memory = gradient()
    held.add(job, tensor)
    del tensor, job
    held.clear()
    assert memory() is None


def test_a_backward_goes_on_while_updates_are_late() -> None:
    """An update that hangs holds nobody up but the stream, until something reads its parameter."""
    device = Recorded()
    copies = CopyEngine(device, max_inflight_bytes=4096)
    params = [torch.nn.Parameter(torch.ones(600, 1000)) for _ in range(4)]
    optimizer = OffloadAdamW(params, mode="gpu", device=device, copies=copies)
    optimizer.build()
    gate = threading.Event()
    work = optimizer._updates.storage.device_work()
    device.launch(work.stream(over_link=True), lambda: gate.wait(20) and None)
    begun = time.monotonic()
    for param in params:
        param.grad = torch.ones_like(param)
        optimizer._on_gradient(param)
    assert time.monotonic() - begun < 10
    assert len(device.waits) >= 3  # all but the last
    gate.set()
    optimizer.step()
    optimizer.synchronize()


def test_a_forward_in_another_thread_may_let_go_meanwhile() -> None:
    """While a backward looks at the oldest, that is."""
    held = HeldGradients(Recorded())
    others: list[threading.Thread] = []

    class Meanwhile(Future[Any]):
        def done(self) -> bool:
            others.append(threading.Thread(target=held.clear))
            others[-1].start()
            others[-1].join(0.3)
            return super().done()

    job = Meanwhile()
    job.set_result(None)
    held.add(job, gradient()[0])
    held.make_room(0, 10**9)
    for other in others:
        other.join()
    assert others and held.size_bytes == 0


def test_nothing_is_held_once_updates_wait_for_step() -> None:
    """Clipping is switched on after eager steps, say, and no forward of a wrapped model comes."""

    class Linked(HostDevice):
        separate_memory = True

    device = Linked()
    params = [torch.nn.Parameter(torch.ones(600, 1000)) for _ in range(2)]
    optimizer = OffloadAdamW(params, mode="gpu", device=device, copies=CopyEngine(device))

    def step() -> None:
        for param in params:
            param.grad = torch.ones_like(param)
            optimizer._on_gradient(param)
        optimizer.step()

    step()
    held = optimizer._updates.pipeline._held
    assert held is not None and held.size_bytes > 0
    optimizer.max_grad_norm = 1.0
    step()
    assert held.size_bytes == 0
    optimizer.synchronize()


def test_what_is_waited_for_is_held_though_the_wait_ends_early() -> None:
    """Ctrl-C ends it, say, and the update that has yet to be queued reads its gradients then."""

    class Interrupted(Future[Any]):
        def exception(self, timeout: float | None = None) -> BaseException | None:
            raise KeyboardInterrupt

    device = Recorded()
    held = HeldGradients(device)
    tensor, memory = gradient()
    held.add(Interrupted(), tensor)
    del tensor
    for let_go in (held.clear, lambda: held.make_room(100, 150)):
        with pytest.raises(KeyboardInterrupt):
            let_go()
        assert memory() is not None and held.size_bytes == 100
    assert not device.waits


def test_gradients_of_updates_on_their_way_go_where_the_streams_that_made_them_wait() -> None:
    device, other = Recorded(), Recorded()
    work = DeviceWork(device, 10_000)
    memories, events = [], []
    for stream, over_link, passed in [
        (device.compute_stream(), False, True),
        (device.compute_stream(), False, False),
        (device.compute_stream(), False, False),
        (other.compute_stream(), True, False),
        (device.compute_stream(), True, False),
        (None, True, False),  # memory that stays what it is
    ]:
        tensor, memory = gradient()
        events.append(Passed(passed))
        work.keep(events[-1], [Sealed(tensor, made_on=stream)], over_link)
        memories.append(memory)
        del tensor
    assert [memory() is None for memory in memories] == [True] + 5 * [False]
    work.let_go()
    assert all(memory() is None for memory in memories)
    assert device.waits == [events[2], events[4]] and other.waits == [events[3]]
    work.let_go()
    assert len(device.waits) == 2


def test_a_forward_between_passes_waits_for_no_copy_of_the_pass_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Passed, "synchronize", lambda self: None)
    device = Recorded()
    copies = CopyEngine(device)
    param = torch.nn.Parameter(torch.ones(300_000))
    optimizer = OffloadAdamW(
        [param], device=device, copies=copies, mode="cpu", accumulation_steps=3, lr=0.1
    )
    gate = threading.Event()
    lane = copies._lanes["d2h"]

    def backward() -> None:
        device.launch(lane.stream, lambda: gate.wait(30) and None)
        param.grad = torch.ones_like(param)
        optimizer._on_gradient(param)

    def sources() -> int:
        return sum(copy.source is not None for copy in lane.in_flight)

    backward()
    assert sources() == 1
    optimizer.let_go()  # the forward of the second pass begins
    assert device.waits == [] and sources() == 1
    optimizer.weights_read()  # and ends
    assert len(device.waits) == 1 and sources() == 0
    gate.set()
    backward()
    backward()
    device.launch(copies._lanes["values"].stream, lambda: time.sleep(0.2))  # a slow way back
    optimizer.step()
    device.waits.clear()
    optimizer.let_go()
    assert sources() == 0
    optimizer.synchronize()
    for event in device.waits:  # as the compute stream, which only notes them, would
        event.synchronize()
    assert float(param.detach().max()) < 1.0
