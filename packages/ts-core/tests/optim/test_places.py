"""State in any place, on any path: the same bits, with delays on every edge."""

from __future__ import annotations

import copy
import itertools
import threading
import time
from typing import Any

import pytest
import torch

from ts_core import OffloadAdamW
from ts_core.device.host import HostDevice
from ts_core.errors import OptionError, StateError
from ts_core.memory.arena import PinnedArena
from ts_core.optim.places import NAMES
from ts_core.testing import inject_delays
from ts_core.transfer import CopyEngine

LIMIT = 3e-7


class SeparateHost(HostDevice):
    """The host device with gradients and values crossing a link, as on a GPU."""

    separate_memory = True


def optimizer_on(separate: bool, params: Any, **options: Any) -> OffloadAdamW:
    device = SeparateHost() if separate else HostDevice()
    return OffloadAdamW(params, device=device, copies=CopyEngine(device), **options)


def trained(
    lab: Any, places: list[str] | str, separate: bool, steps: int = 4, **options: Any
) -> torch.nn.Module:
    model = lab.model(options.pop("dtype", torch.float32))
    accumulation = options.get("accumulation_steps", 1)
    optimizer = optimizer_on(
        separate, lab.groups(model, True), lr=1e-2, chunk_elems=4096, **options
    )
    optimizer.build()
    count = len(optimizer.buckets)
    if isinstance(places, str):
        places = [places] * count
    optimizer.place_state((places * count)[:count])
    with inject_delays(7, max_ms=2.0, share=0.3):
        lab.run(model, optimizer, steps, accumulation=accumulation)
        optimizer.synchronize()
    return model


@pytest.mark.parametrize("separate", [False, True], ids=["host", "link"])
@pytest.mark.parametrize("place", NAMES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"eager": False},
        {"accumulation_steps": 3},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float16, "accumulation_steps": 2},
    ],
    ids=["eager", "deferred", "accumulated", "bf16", "fp16"],
)
def test_every_place_gives_the_same_bits(
    lab: Any, place: str, separate: bool, options: dict[str, Any]
) -> None:
    expected = trained(lab, "host", False, **options)
    found = trained(lab, place, separate, **options)
    assert lab.distance(found, expected) == 0.0
    assert lab.distance(found, lab.model(options.get("dtype", torch.float32))) > 1e-3


@pytest.mark.parametrize("separate", [False, True], ids=["host", "link"])
def test_mixed_places_with_clipping(lab: Any, separate: bool) -> None:
    places = ["zero_copy", "host", "resident"]
    reference = lab.model()
    theirs = torch.optim.AdamW(lab.groups(reference, True), lr=1e-2)
    lab.run(reference, theirs, 4, clip=0.05)
    found = trained(lab, places, separate, max_grad_norm=0.05)
    assert lab.distance(found, reference) <= LIMIT
    alike = trained(lab, ["host"], separate, max_grad_norm=0.05)
    assert lab.distance(found, alike) == 0.0


def test_missing_wait_on_the_devices_stream_is_caught(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes away the wait for a device update before its values are read: they are then old."""
    from ts_core.optim.device_places import DevicePlace
    from ts_core.optim.read_guard import Flight

    update = DevicePlace.update

    def late(self: DevicePlace, *args: Any) -> Any:
        time.sleep(0.02)
        return update(self, *args)

    monkeypatch.setattr(DevicePlace, "update", late)
    expected = trained(lab, "zero_copy", True)
    monkeypatch.setattr(Flight, "wait", lambda self: True)
    wrong = trained(lab, "zero_copy", True)
    assert lab.distance(expected, wrong) > 0.0
    monkeypatch.undo()
    time.sleep(0.5)  # the updates that were not waited for


def test_state_moves_between_places_bit_for_bit(lab: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        straight, moved = lab.model(dtype), lab.model(dtype)
        lab.run(straight, OffloadAdamW(straight.parameters(), lr=1e-2), 5)
        optimizer = optimizer_on(True, moved.parameters(), lr=1e-2)
        for step, place in zip(range(5), itertools.cycle(NAMES), strict=False):
            optimizer.build()
            optimizer.place_state([place] * len(optimizer.buckets))
            lab.run(moved, optimizer, 1, first=step)
        assert lab.distance(straight, moved) == 0.0
        assert optimizer.stats()["values_by_place"].keys() == {place}


def test_places_are_checked(lab: Any) -> None:
    model = lab.model()
    optimizer = OffloadAdamW(model.parameters(), accumulation_steps=2)
    optimizer.build()
    with pytest.raises(OptionError, match="places="):
        optimizer.place_state(["somewhere"] * len(optimizer.buckets))
    with pytest.raises(OptionError, match="places="):
        optimizer.place_state(["host"])
    lab.loss(model, 0).backward()
    with pytest.raises(StateError, match="middle of a step"):
        optimizer.place_state(["resident"] * len(optimizer.buckets))
    optimizer.zero_grad()
    small = OffloadAdamW(lab.model().parameters(), moment_dtype="int8")
    small.build()
    with pytest.raises(OptionError, match="int8 moments"):
        small.place_state(["zero_copy"] * len(small.buckets))


@pytest.mark.parametrize("place", NAMES)
def test_state_dicts_pass_between_places_and_torch(lab: Any, place: str) -> None:
    ours, theirs = lab.model(), lab.model()
    optimizer = optimizer_on(True, ours.parameters(), lr=2e-3)
    reference = torch.optim.AdamW(theirs.parameters(), lr=2e-3)
    optimizer.build()
    optimizer.place_state([place] * len(optimizer.buckets))
    lab.run(ours, optimizer, 3)
    lab.run(theirs, reference, 3)
    to_torch = torch.optim.AdamW(ours.parameters(), lr=9.0)
    to_torch.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    to_ours = optimizer_on(True, theirs.parameters(), lr=9.0)
    to_ours.build()
    to_ours.place_state([place] * len(to_ours.buckets))
    to_ours.load_state_dict(copy.deepcopy(reference.state_dict()))
    optimizer.detach()
    lab.run(ours, to_torch, 3, first=3)
    lab.run(theirs, to_ours, 3, first=3)
    assert lab.distance(ours, theirs) <= LIMIT


def test_values_the_user_writes_count_in_every_place(lab: Any) -> None:
    for place, dtype in itertools.product(NAMES, (torch.float32, torch.bfloat16)):
        model = lab.model(dtype)
        optimizer = optimizer_on(True, model.parameters(), lr=0.0, weight_decay=0.0)
        optimizer.build()
        optimizer.place_state([place] * len(optimizer.buckets))
        with inject_delays(1, max_ms=10.0, share=0.5):
            lab.run(model, optimizer, 1)
        with torch.no_grad():
            model.large.fill_(0.25)
            model[0].weight.data = torch.full_like(model[0].weight, 0.5)
        lab.run(model, optimizer, 1)
        assert torch.equal(model.large.detach(), torch.full_like(model.large, 0.25))
        assert torch.equal(model[0].weight.detach(), torch.full_like(model[0].weight, 0.5))


def test_gradients_queued_for_the_device_are_bounded(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More gradients than may wait: backward is held back, and the values are the same."""
    from ts_core.optim.held import HeldGradients

    calls: list[int] = []
    most: list[int] = []
    make_room, add = HeldGradients.make_room, HeldGradients.add

    def makes_room(self: HeldGradients, size_bytes: int, limit_bytes: int) -> None:
        make_room(self, size_bytes, limit_bytes)
        assert self.size_bytes == 0 or self.size_bytes + size_bytes <= limit_bytes
        calls.append(limit_bytes)

    def adds(self: HeldGradients, *args: Any) -> None:
        add(self, *args)
        most.append(self.size_bytes)

    monkeypatch.setattr(HeldGradients, "make_room", makes_room)
    monkeypatch.setattr(HeldGradients, "add", adds)
    results = []
    for place in ("host", "zero_copy"):
        model = lab.model()
        device = SeparateHost()
        copies = CopyEngine(device, max_inflight_bytes=1 << 20)
        optimizer = OffloadAdamW(model.parameters(), device=device, copies=copies)
        optimizer.build()
        optimizer.place_state([place] * len(optimizer.buckets))
        with inject_delays(1, max_ms=2.0, share=0.3):
            lab.run(model, optimizer, 3)
            optimizer.synchronize()
        results.append(model)
    assert lab.distance(*results) == 0.0
    assert calls and set(calls) == {1 << 19}
    assert max(most) == 1_200_000  # one that is larger than the limit, alone


def test_gpu_mode_works_on_the_host_device(lab: Any) -> None:
    results = []
    for mode in ("cpu", "gpu"):
        model = lab.model()
        optimizer = OffloadAdamW(model.parameters(), lr=1e-2, mode=mode)
        lab.run(model, optimizer, 4)
        results.append(model)
        place = "host" if mode == "cpu" else "zero_copy"
        assert set(optimizer.stats()["values_by_place"]) == {place}
    assert lab.distance(*results) == 0.0


def test_arena_is_asked_for_pinned_state(lab: Any) -> None:
    for options, expected in (({}, 0), ({"pin_moments": True}, 1), ({"mode": "gpu"}, 1)):
        arena = PinnedArena()
        model = lab.model()
        OffloadAdamW(model.parameters(), arena=arena, **options).build()
        held = arena.stats().get("optimizer state", 0)
        assert (held > 0) == bool(expected)


def test_new_values_reach_the_device_while_a_load_waits_for_its_buffer(lab: Any) -> None:
    device = SeparateHost()
    copies = CopyEngine(device)
    model = lab.model(torch.float32)
    optimizer = OffloadAdamW(lab.groups(model, True), lr=1e-2, device=device, copies=copies)
    used = threading.Event()
    reader = device.new_stream("reader")
    device.launch(reader, lambda: used.wait() and None)
    load = copies.h2d(torch.zeros(8), torch.ones(8), after=reader.record())
    lab.run(model, optimizer, 2)
    optimizer.synchronize()  # a timeout here: new values wait behind the load
    assert not load.query() and copies.stats()["h2d"].bytes > 32
    used.set()
    load.synchronize()


@pytest.mark.parametrize("place", NAMES)
@pytest.mark.parametrize("separate", [False, True], ids=["host", "link"])
def test_norm_counts_gradients_that_came_before_those_of_a_new_group(
    place: str, separate: bool
) -> None:
    """State of a new group is made at its first gradient, when others have been measured."""
    first, new = (torch.nn.Parameter(torch.ones(600, 500)) for _ in range(2))
    optimizer = optimizer_on(separate, [first], lr=1e-2, max_grad_norm=1e9)
    norms = []
    for step in range(3):
        if step == 1:
            optimizer.build()
            optimizer.place_state([place] * len(optimizer.buckets))
            optimizer.add_param_group({"params": [new]})
        loss = new.sum()  # computed first, so that its gradient comes last
        (4 * first.sum() + 3 * loss).backward()
        optimizer.step()
        norms.append(optimizer.last_grad_norm)
        if step == 0:
            new.grad = None  # not yet trained
    each = 600 * 500
    assert norms == [pytest.approx(k * each**0.5) for k in (4, 5, 5)]
