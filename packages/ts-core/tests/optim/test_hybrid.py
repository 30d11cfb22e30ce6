"""The split between device memory, link and host threads, in use."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from ts_core import OffloadAdamW, wrap
from ts_core.device.host import HostDevice
from ts_core.memory.arena import default_arena
from ts_core.optim import updates
from ts_core.optim.hybrid import HybridSplit
from ts_core.optim.pieces import Bytes
from ts_core.optim.places import HostPlace
from ts_core.optim.rates import Rates, measure_rates
from ts_core.testing import inject_delays
from ts_core.transfer import CopyEngine

RATES = Rates(host=4.0e9, link=45e9)
MILLION = 1_000_000


@pytest.mark.parametrize(
    ("options", "waits"),
    [
        ({}, False),
        ({"max_grad_norm": 1.0}, True),
        ({"eager": False}, True),
        ({"accumulation_steps": 2}, True),
        ({"compute_grad_norm": True}, True),
    ],
)
def test_it_is_known_whether_gradients_wait(options: dict[str, Any], waits: bool) -> None:
    optimizer = OffloadAdamW([torch.nn.Parameter(torch.zeros(4))], mode="hybrid", **options)
    assert optimizer.step_options.gradients_wait == waits


class Tight(HostDevice):
    """A device whose peak is what state, waiting gradients and `others` take of its memory."""

    separate_memory = True
    others = 500_000
    optimizer: OffloadAdamW
    highest = 0

    def usable_bytes(self) -> int:
        return 20_000_000

    def memory(self) -> dict[str, int]:
        waiting = self.optimizer.step_options.gradients_wait
        taken = self.others
        for bucket in self.optimizer.buckets:
            taken += bucket.place.device_bytes()
            if waiting and bucket.gradients_stay:
                taken += bucket.layout.numel * 4
        self.highest = max(self.highest, taken)
        return {"allocated": taken, "reserved": taken, "peak_allocated": taken}


@pytest.mark.parametrize("clip", [None, 1.0])
def test_state_stays_within_the_target_with_its_gradients(clip: float | None) -> None:
    """Buckets that go to host threads take their gradients along; room that this leaves is not
    room for as many bytes of state, whose gradients wait on the device."""
    device = Tight()
    params = [torch.nn.Parameter(torch.ones(500_000)) for _ in range(8)]
    lines: list[str] = []
    optimizer = OffloadAdamW(
        params,
        mode="hybrid",
        device=device,
        copies=CopyEngine(device),
        max_grad_norm=clip,
        chunk_elems=4096,
    )
    device.optimizer = optimizer
    optimizer.headroom = 0.1
    optimizer.build()
    inside = optimizer._updates
    inside.split = HybridSplit(
        device,
        lambda: Rates(4e9, 45e9),
        inside.room_bytes,
        lines.append,
        lambda: optimizer.step_options.gradients_wait,
    )
    for _ in range(12):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    optimizer.synchronize()
    assert optimizer.state_on_device() >= 8_000_000
    assert device.highest <= 18_000_000


def test_rates_are_measured() -> None:
    device = HostDevice()
    rates = measure_rates(CopyEngine(device), default_arena(), 1)
    assert 1e7 < rates.host < 1e11 and 1e7 < rates.link < 1e13


class Roomy(HostDevice):
    """A host device with a link, device memory and a limit."""

    separate_memory = True

    def usable_bytes(self) -> int:
        return 1 << 20


def hybrid_on(params: Any, rates: Rates, lines: list[str], **options: Any) -> OffloadAdamW:
    device = Roomy()
    optimizer = OffloadAdamW(
        params, mode="hybrid", device=device, copies=CopyEngine(device), **options
    )
    optimizer.build()
    inside = optimizer._updates
    inside.split = HybridSplit(device, lambda: rates, inside.room_bytes, lines.append)
    return optimizer


@pytest.mark.parametrize("clip", [None, 0.05])
def test_optimizer_splits_after_two_steps_says_so_and_stays_exact(
    lab: Any, clip: float | None
) -> None:
    lines: list[str] = []
    ours, theirs = lab.model(), lab.model()
    optimizer = hybrid_on(
        ours.parameters(), Rates(4e9, 45e9), lines, lr=1e-2, max_grad_norm=clip, chunk_elems=4096
    )
    assert set(optimizer.stats()["values_by_place"]) == {"zero_copy"}
    with inject_delays(3, max_ms=1.0, share=0.3):
        lab.run(ours, optimizer, 9)
        optimizer.synchronize()
    lab.run(theirs, OffloadAdamW(theirs.parameters(), lr=1e-2, max_grad_norm=clip), 9)
    # With clipping the norm is summed on the device here, on the host there.
    assert lab.distance(ours, theirs) <= (0.0 if clip is None else 3e-7)
    assert lines and all(line.startswith("optimizer split") for line in lines)
    assert "G values/s" in lines[0]
    assert len(optimizer.stats()["values_by_place"]) > 1


def test_a_host_that_takes_longer_than_planned_gets_less() -> None:
    params = [torch.nn.Parameter(torch.zeros(600, 1000)) for _ in range(24)]
    lines: list[str] = []
    optimizer = hybrid_on(params, Rates(4e6, 45e6), lines)
    optimizer.headroom = 1.0  # no room for state

    def steps(count: int, seconds_per_bucket: float) -> None:
        for _ in range(count):
            for param in params:
                param.grad = torch.ones_like(param)
            for bucket in optimizer.buckets:
                bucket.place.seconds = seconds_per_bucket
            place = type(optimizer.buckets[0].place)
            assert place is not None
            optimizer.step()

    steps(2, 0.0)
    before = optimizer.stats()["values_by_place"]
    assert set(before) == {"zero_copy", "host"}
    # Host updates of this size take no time here, so the host is given more.
    steps(2, 0.0)
    after = optimizer.stats()["values_by_place"]
    assert after["host"] > before["host"]
    assert "host threads took" in lines[-1]


class Loads:
    """An optimizer of large weights, and steps that copy blocks of `size` bytes besides."""

    size = 60 * MILLION
    as_expected = True  # host threads seem to take the time that the split foresaw

    def __init__(self, lines: list[str], measured: int = 0, **options: Any) -> None:
        self.params = [torch.nn.Parameter(torch.zeros(600, 1000)) for _ in range(24)]
        device = Roomy()
        self.copies = CopyEngine(device)
        self.optimizer = OffloadAdamW(
            self.params, mode="hybrid", device=device, copies=self.copies, **options
        )
        self.optimizer.build()
        self.optimizer.headroom = 1.0  # no room for state
        inside = self.optimizer._updates
        assert inside.split is not None
        self.split = inside.split
        self.split._say = lines.append
        self.split._measure = lambda: self.load(measured) or Rates(4e6, 45e6)
        self._block, self._slot = (torch.zeros(self.size, dtype=torch.uint8) for _ in range(2))

    def load(self, count: int) -> None:
        for _ in range(count):
            self.copies.h2d(self._slot, self._block)

    def steps(self, count: int, loads: int) -> dict[str, int]:
        for _ in range(count):
            self.load(loads)
            for _ in range(self.optimizer.accumulation_steps):
                for param in self.params:
                    param.grad = torch.ones_like(param)
                    self.optimizer._on_gradient(param)
            on_host = [b.place for b in self.optimizer.buckets if b.place.name == "host"]
            for place in on_host if self.as_expected else ():
                assert self.split.last is not None
                place.seconds = self.split.last.host_s / len(on_host)
            self.optimizer.step()
        return dict(self.optimizer.stats()["values_by_place"])


@pytest.mark.parametrize("passes", [1, 3])
def test_copies_of_others_are_measured(passes: int) -> None:
    """What a step copies besides is told apart from gradients of every pass, and new values."""
    lines: list[str] = []
    run = Loads(lines, accumulation_steps=passes, eager=False)
    alone = run.steps(2, 0)
    assert "beside copies" not in lines[-1]
    few = run.steps(2, 1)
    assert "beside copies of 0.06 GB to the device and 0.00 GB back" in lines[-1]
    assert run.split._others == (run.size, 0)
    assert alone["host"] < few["host"]
    run.steps(2, 1)
    assert run.split._others == (run.size, 0)  # though other buckets are on the host now


@pytest.mark.parametrize("clip", [None, 1.0])
def test_state_is_not_moved_for_a_little(
    monkeypatch: pytest.MonkeyPatch, clip: float | None
) -> None:
    """Moving it takes as long as steps, and host threads are not as fast in every step.

    Not either where gradients wait on the device, and so take room there with updates by it.
    """
    lines: list[str] = []
    run = Loads(lines, max_grad_norm=clip)
    if clip is not None:
        room = 112 * MILLION  # for half of the state, and gradients of updates over the link
        run.split._room = lambda: room - run.split._taken(run.optimizer)
    run.as_expected = False
    slower = 1.0
    update = HostPlace.update

    def timed(self: HostPlace, *args: Any) -> Any:
        event = update(self, *args)
        on_host = [b.place for b in run.optimizer.buckets if b.place.name == "host"]
        assert run.split.last is not None
        self.seconds = slower * run.split.last.host_s / len(on_host)
        return event

    monkeypatch.setattr(HostPlace, "update", timed)
    before = run.steps(2, 0)
    slower = 1.12
    assert run.steps(2, 0) == before and len(lines) == 1
    slower = 2.0
    assert run.steps(2, 0).get("host", 0) < before["host"] and len(lines) == 2


def test_only_copies_of_steps_that_count_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of rates, of steps while others take memory, or new values of a step before."""
    update = HostPlace.update

    def slow(*args: Any) -> Any:
        time.sleep(0.01)
        return update(*args)

    monkeypatch.setattr(HostPlace, "update", slow)
    run = Loads([], measured=7)
    run.steps(1, 0)
    run.optimizer.state_away()  # measures rates
    run.steps(2, 0)
    assert run.split.last is not None and run.split._others == (0, 0)
    run.steps(1, 0)
    run.optimizer.split_waits = lambda: True
    assert run.steps(3, 5)["host"]
    run.optimizer.split_waits = None
    run.steps(2, 1)
    assert run.split._others == (run.size, 0)


def test_state_elsewhere_costs_what_it_adds_to_other_copies() -> None:
    run = Loads([])
    run.steps(2, 0)
    size, alone = run.split.away(run.optimizer.buckets)
    run.split._others = Bytes(1000 * MILLION, 0)  # 22 s of link
    assert size and 0 < run.split.away(run.optimizer.buckets)[1] <= 1.5 * alone


def test_state_goes_back_when_a_step_took_too_much(lab: Any) -> None:
    lines: list[str] = []
    ours, theirs = lab.model(), lab.model()
    optimizer = hybrid_on(ours.parameters(), Rates(4e9, 45e9), lines, lr=1e-2, chunk_elems=4096)
    assert not optimizer.give_state_back(100)  # none is there
    lab.run(ours, optimizer, 3)
    here = optimizer.state_on_device()
    assert here > 0
    assert not optimizer.give_state_back(0) and optimizer.state_on_device() == here
    assert optimizer.give_state_back(here // 2)
    assert optimizer.state_on_device() <= here - here // 2
    assert "took too much memory" in lines[-1]
    room = optimizer._updates.room_bytes()
    optimizer.leave_room_for(lambda: 1000)
    assert optimizer._updates.room_bytes() == room - 1000
    lab.run(ours, optimizer, 1)
    optimizer.synchronize()
    other = OffloadAdamW(theirs.parameters(), lr=1e-2)
    lab.run(theirs, other, 3)
    lab.run(theirs, other, 1)
    assert lab.distance(ours, theirs) == 0.0


@pytest.mark.parametrize("mode", ["auto", "hybrid", "gpu"])
def test_wrap_takes_every_mode(lab: Any, mode: str) -> None:
    model, twin = lab.model(), lab.model()
    model, optimizer = wrap(model, optimizer_mode=mode, lr=1e-2, device="cpu")
    assert optimizer.mode == mode
    lab.run(model, optimizer, 3)
    lab.run(twin, OffloadAdamW(twin.parameters(), lr=1e-2), 3)
    assert lab.distance(model, twin) == 0.0


def test_rates_are_those_of_an_idle_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates by the device that are still on their way would be measured as a slow link."""
    device = Roomy()
    copies = CopyEngine(device)
    params = [torch.nn.Parameter(torch.ones(600, 1000)) for _ in range(3)]
    optimizer = OffloadAdamW(params, mode="hybrid", device=device, copies=copies)
    optimizer.build()
    work = optimizer._updates.storage.device_work()
    found: list[tuple[bool, int]] = []

    def measure(*args: Any) -> Rates:
        found.append((done.is_set(), copies._lanes["d2h"].in_flight_bytes))
        return RATES

    monkeypatch.setattr(updates, "measure_rates", measure)
    done = threading.Event()
    for step in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        if step == 1:
            device.launch(work.stream(over_link=True), lambda: time.sleep(0.3) or done.set())
        optimizer.step()
    assert found == [(True, 0)]


def test_gradients_go_as_soon_as_the_device_has_updated() -> None:
    """Not at step(): a backward would hold all of them beside the activations."""
    device = Roomy()
    params = [torch.nn.Parameter(torch.ones(600, 1000)) for _ in range(6)]
    size = params[0].numel() * 4
    copies = CopyEngine(device, max_inflight_bytes=4 * size)  # two of them for updates
    optimizer = OffloadAdamW(params, mode="gpu", device=device, copies=copies)
    optimizer.build()
    alive: list[int] = []
    gradients: list[weakref.ref[Any]] = []  # to the memory
    for param in params:
        memory = np.ones(tuple(param.shape), dtype=np.float32)
        gradients.append(weakref.ref(memory))
        param.grad = torch.from_numpy(memory)
        del memory
        optimizer._on_gradient(param)
        alive.append(sum(reference() is not None for reference in gradients))
    assert max(alive) <= 4  # two held, this one, and one that a thread has just finished with
    optimizer.let_go()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(r() is not None for r in gradients):
        time.sleep(0.01)
    assert all(reference() is None for reference in gradients)
    optimizer.step()


def test_gradients_for_the_device_take_half_of_what_may_wait_for_the_link() -> None:
    device = Roomy()
    copies = CopyEngine(device)
    param = torch.nn.Parameter(torch.ones(600, 1000))
    optimizer = OffloadAdamW([param], mode="gpu", device=device, copies=copies)
    optimizer.build()
    limit = optimizer._updates.storage.device_inflight_bytes()
    assert limit == copies.max_leaving_bytes // 2 == (1 << 20) // 40


def test_a_group_without_gradients_yet_may_be_there_when_state_is_split() -> None:
    params = [torch.nn.Parameter(torch.ones(600, 1000)) for _ in range(2)]
    lines: list[str] = []
    optimizer = hybrid_on(params, Rates(4e9, 45e9), lines)

    def steps(count: int) -> None:
        for _ in range(count):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()

    steps(1)
    late = torch.nn.Parameter(torch.ones(500, 1000))
    optimizer.add_param_group({"params": [late]})
    steps(1)
    assert lines and len(optimizer.buckets) == 3
    other = torch.nn.Parameter(torch.ones(300, 1000))
    optimizer.add_param_group({"params": [other]})
    optimizer.give_state_back(1)
    steps(1)
    optimizer.synchronize()
    assert torch.equal(late, torch.ones_like(late)) and torch.equal(other, torch.ones_like(other))


def test_a_group_that_comes_after_the_split_is_part_of_the_next() -> None:
    """Where nothing else would move, too: there is no room for state, and no time to gain."""
    params = [torch.nn.Parameter(torch.ones(600, 1000)) for _ in range(4)]
    lines: list[str] = []
    optimizer = hybrid_on(params, Rates(1e9, 45e9), lines)
    optimizer.headroom = 1.0

    def steps(count: int) -> None:
        for _ in range(count):
            for param in params:
                param.grad = torch.ones_like(param)
            optimizer.step()

    steps(3)
    params.append(torch.nn.Parameter(torch.ones(600, 1000)))
    optimizer.add_param_group({"params": params[4:]})
    steps(5)
    split = optimizer._updates.split
    assert split is not None and split.last is not None
    assert split.last.places == tuple(bucket.place.name for bucket in optimizer.buckets)
    assert len(split.last.places) == 5


@pytest.mark.parametrize("again", [False, True])
def test_a_step_that_took_too_much_takes_state_back_while_it_is_to_be_split_again(
    again: bool,
) -> None:
    params = [torch.nn.Parameter(torch.ones(600, 1000)) for _ in range(8)]
    optimizer = hybrid_on(params, Rates(4e9, 45e9), [])
    split = optimizer._updates.split
    assert split is not None
    split._room = lambda: 20 * MILLION - split._taken(optimizer)
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    held = optimizer.state_on_device()
    assert held
    if again:
        split.start_again()
    assert optimizer.give_state_back(1000)
    assert optimizer.state_on_device() < held
