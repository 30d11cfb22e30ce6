"""What a step costs the host: calls, events and jobs, however many buckets there are."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ts_core import OffloadAdamW
from ts_core.device.base import Event, Stream
from ts_core.device.host import CallingThread, HostDevice
from ts_core.optim import device_norms, device_places, norms, pipeline
from ts_core.optim.buckets import Bucket
from ts_core.optim.device_norms import norms_of
from ts_core.optim.launch_order import TOGETHER, together
from ts_core.optim.pipeline import UpdatePipeline
from ts_core.optim.places import HostPlace
from ts_core.testing import inject_delays
from ts_core.transfer import CopyEngine

SHAPE = (600, 1000)


class _Counted(CallingThread):
    def __init__(self) -> None:
        self.recorded = 0

    def record(self) -> Event:
        self.recorded += 1
        return super().record()


class SeparateHost(HostDevice):
    """Gradients and values cross a link, as on a GPU; counts events of the compute stream."""

    separate_memory = True

    def __init__(self) -> None:
        super().__init__()
        self.counted = _Counted()

    def compute_stream(self) -> Stream:
        return self.counted


def made(count: int, **options: Any) -> tuple[OffloadAdamW, list[torch.nn.Parameter], SeparateHost]:
    """Large parameters, each a bucket of its own, whose state the device updates."""
    params = [torch.nn.Parameter(torch.ones(SHAPE)) for _ in range(count)]
    device = SeparateHost()
    options = {"lr": 0.1, "mode": "gpu", "max_grad_norm": 1.0, **options}
    optimizer = OffloadAdamW(params, device=device, copies=CopyEngine(device), **options)
    optimizer.build()
    return optimizer, params, device


def give(optimizer: OffloadAdamW, params: list[torch.nn.Parameter], value: float = 0.5) -> None:
    for param in params:
        with torch._C.DisableTorchFunctionSubclass():
            param.grad = torch.full(param.shape, value, dtype=param.dtype)
        optimizer._on_gradient(param)


def first_value(param: torch.nn.Parameter) -> float:
    """Waits for the parameter's update."""
    return float(param[0, 0].detach())


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tensors in each call that measures norms."""
    found: list[int] = []
    measure = torch._foreach_norm

    def noted(tensors: Any, *args: Any) -> Any:
        found.append(len(tensors))
        return measure(tensors, *args)

    monkeypatch.setattr(torch, "_foreach_norm", noted)
    return found


# -- norms -----------------------------------------------------------------------------------------


def test_gradients_that_stay_are_measured_by_one_call(measured: list[int]) -> None:
    optimizer, params, _ = made(7)
    optimizer.place_state(["resident", "host", "zero_copy", "host", *["resident"] * 3])
    for step in range(3):
        give(optimizer, params, 0.5 + step)
        assert measured == [1, 1]  # of those that leave, as they do
        optimizer.step()
        assert measured == [1, 1, 5]
        assert optimizer.last_grad_norm == pytest.approx((0.5 + step) * math.sqrt(7 * 600_000))
        measured.clear()


def test_dropped_gradients_count_in_no_norm() -> None:
    optimizer, params, _ = made(4)
    optimizer.place_state(["resident", "host"] * 2)
    give(optimizer, params, 1e3)
    optimizer.zero_grad()
    give(optimizer, params[2:], 0.5)
    optimizer.step()
    assert optimizer.last_grad_norm == pytest.approx(0.5 * math.sqrt(2 * 600_000))


def test_a_step_without_any_gradient_has_a_norm_of_zero() -> None:
    params = [torch.nn.Parameter(torch.ones(3))]
    optimizer = OffloadAdamW(params, mode="gpu", max_grad_norm=1.0)
    optimizer.step()
    assert optimizer.last_grad_norm == 0.0


def test_norms_do_not_depend_on_what_is_measured_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_norms, "_SCRATCH_BYTES", 64)
    torch.manual_seed(0)
    sizes = [5, 70_001, 3, 200_000, 65_536, 1, 70_000]
    gradients = [torch.randn(size) for size in sizes]
    gradients[2], gradients[3] = gradients[2].bfloat16(), gradients[3].bfloat16()
    for one, norm in zip(gradients, norms_of(gradients), strict=True):
        (alone,) = torch._foreach_norm([one], 2, torch.float64)
        assert norm.dtype is torch.float64 and torch.equal(norm, alone)


@pytest.mark.gpu
def test_norms_on_the_gpu_do_not_depend_on_what_is_measured_beside() -> None:
    torch.manual_seed(0)
    sizes = [5, 70_001, 3, 2_000_000, 65_536, 1, 70_000, 9_000_000]
    for dtype in (torch.float32, torch.bfloat16):
        gradients = [torch.randn(size, device="cuda").to(dtype) for size in sizes]
        for one, norm in zip(gradients, norms_of(gradients), strict=True):
            (alone,) = torch._foreach_norm([one], 2, torch.float64)
            assert norm.dtype is torch.float64 and torch.equal(norm, alone)


def test_what_is_measured_together_takes_little_memory_and_is_of_one_dtype(
    monkeypatch: pytest.MonkeyPatch, measured: list[int]
) -> None:
    # torch's kernel takes 8 bytes for each tensor and each 64 Ki values of the largest.
    monkeypatch.setattr(device_norms, "_SCRATCH_BYTES", 32)
    large, small = torch.ones(130_000), torch.ones(10)
    norms_of([small, large, small, small, small.double(), small])
    assert measured == [2, 3, 1]


def test_a_step_puts_all_norms_together_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[int] = []
    cat = torch.cat

    def noted(tensors: Any) -> torch.Tensor:
        joined.append(len(tensors))
        return cat(tensors)

    monkeypatch.setattr(norms.torch, "cat", noted)
    optimizer, params, _ = made(6)
    optimizer.place_state(["resident", "host"] * 3)
    before = optimizer._updates.storage.copies.stats()["d2h"].copies  # type: ignore[union-attr]
    give(optimizer, params)
    optimizer.step()
    optimizer.synchronize()
    after = optimizer._updates.storage.copies.stats()["d2h"].copies  # type: ignore[union-attr]
    assert joined == [6] and after - before == 3 + 1


# -- step() ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 20])
def test_a_step_records_few_events_of_the_compute_stream(count: int) -> None:
    optimizer, params, device = made(count)
    optimizer.place_state((["resident", "zero_copy", "host", "resident"] * count)[:count])
    give(optimizer, params)
    device.counted.recorded = 0
    optimizer.step()
    assert device.counted.recorded == 2  # behind the norms, and behind the reads of old values


def test_an_update_during_backward_records_one_event() -> None:
    optimizer, params, device = made(3, max_grad_norm=None)
    optimizer.place_state(["resident", "zero_copy", "resident"])
    device.counted.recorded = 0
    give(optimizer, params)
    assert device.counted.recorded == 3
    optimizer.step()
    optimizer.synchronize()


def test_workers_begin_when_all_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_LONGEST_HOLD_S", 20)
    optimizer, params, _ = made(8)
    optimizer.place_state(["resident", "host", "zero_copy", "host"] * 2)
    running: list[str] = []
    queued: list[int] = []
    take, update = Bucket.take_update, HostPlace.update
    device_update = device_places.update_together

    def slow(self: Bucket, *args: Any) -> Any:
        time.sleep(0.002)
        queued.append(len(running))
        return take(self, *args)

    def on_host(self: HostPlace, *args: Any) -> Any:
        running.append("host")
        return update(self, *args)

    def on_device(*args: Any) -> Any:
        running.append("device")
        return device_update(*args)

    monkeypatch.setattr(Bucket, "take_update", slow)
    monkeypatch.setattr(HostPlace, "update", on_host)
    monkeypatch.setattr(device_places, "update_together", on_device)
    give(optimizer, params)
    optimizer.step()
    optimizer.synchronize()
    assert queued == [0] * 8 and sorted(set(running)) == ["device", "host"]


def test_buckets_are_ready_for_the_next_step_before_workers_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pipeline, "_LONGEST_HOLD_S", 20)
    optimizer, params, _ = made(6)
    optimizer.place_state(["resident", "host"] * 3)
    seen: list[bool] = []
    update = HostPlace.update

    def noted(self: HostPlace, *args: Any) -> Any:
        seen.append(any(bucket.started() for bucket in optimizer.buckets))
        return update(self, *args)

    monkeypatch.setattr(HostPlace, "update", noted)
    give(optimizer, params)
    optimizer.step()
    optimizer.synchronize()
    assert seen == [False] * 3


def test_workers_begin_at_once_where_queueing_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "_LONGEST_HOLD_S", 60)
    updates = UpdatePipeline()
    with pytest.raises(ZeroDivisionError), updates._workers_held():
        job = updates.on_host(lambda: "run")
        _ = 1 // 0
    assert job.result(20) == "run"


def test_workers_are_held_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for an update may hold what the caller needs to queue the next."""
    monkeypatch.setattr(pipeline, "_LONGEST_HOLD_S", 0.5)
    updates = UpdatePipeline()
    with updates._workers_held():
        job = updates.on_host(lambda: "run")
        assert not job.done()
        assert job.result(20) == "run"


# -- updates queued together -----------------------------------------------------------------------


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """(over the link, events waited for) of every piece of work that the device is given."""
    found: list[tuple[bool, int]] = []
    launch = device_places.DeviceWork.launch

    def noted(self: Any, work: Callable[[], None], after: list[Event], over_link: bool) -> Any:
        found.append((over_link, len(after)))
        return launch(self, work, after, over_link)

    monkeypatch.setattr(device_places.DeviceWork, "launch", noted)
    return found


def test_neighbours_in_device_memory_are_queued_together(works: list[tuple[bool, int]]) -> None:
    optimizer, params, _ = made(TOGETHER + 5)
    places = ["resident"] * (TOGETHER + 2) + ["zero_copy"] * 2 + ["resident"]
    places[4] = "host"  # has an order of its own
    optimizer.place_state(places)
    for step in range(2):
        give(optimizer, list(reversed(params)))
        optimizer.step()
        optimizer.synchronize()
        link = [over_link for over_link, _ in works]
        # Those over the link come first, as few others stand before them.
        assert link == [True, True, False, False]
        if step:  # nothing was written into state since, so each waits for the one event of a step
            assert [events for _, events in works] == [1] * 4
        works.clear()


def test_gradients_of_updates_queued_together_are_bounded() -> None:
    optimizer, *_ = made(7)
    optimizer.place_state(["resident"] * 7)
    size = optimizer.buckets[0].gradient_bytes
    groups = together(optimizer.buckets, 3 * size)
    assert [len(group) for group in groups] == [3, 3, 1]
    assert [bucket for group in groups for bucket in group] == optimizer.buckets
    assert [len(group) for group in together(optimizer.buckets, size - 1)] == [1] * 7


def test_gradients_go_when_updates_queued_together_have_run() -> None:
    optimizer, params, _ = made(5)
    optimizer.place_state(["resident"] * 5)
    held = []
    for param in params:
        with torch._C.DisableTorchFunctionSubclass():
            param.grad = torch.full(SHAPE, 0.5)
            held.append(weakref.ref(param.grad.untyped_storage()))
        optimizer._on_gradient(param)
    optimizer.step()
    optimizer.synchronize()
    give(optimizer, params)
    optimizer.step()
    optimizer.synchronize()
    assert [storage() for storage in held] == [None] * 5


def test_parameters_whose_reads_do_not_wait_are_queued_alone(
    works: list[tuple[bool, int]],
) -> None:
    class Special(torch.nn.Parameter):
        pass

    optimizer, params, _ = made(3)
    optimizer.place_state(["resident"] * 3)
    params[2].__class__ = Special
    give(optimizer, params)
    optimizer.step()
    assert len(works) == 2
    assert type(params[2]) is Special and first_value(params[2]) < 1.0
    assert first_value(params[0]) < 1.0


def test_an_update_that_fails_is_told_by_all_queued_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer, params, _ = made(3)
    optimizer.place_state(["resident", "resident", "host"])

    def broken(*args: Any, **options: Any) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(device_places, "update_on_device", broken)
    give(optimizer, params)
    optimizer.step()
    assert first_value(params[2]) < 1.0
    for param in params[:2]:
        with pytest.raises(RuntimeError, match="no kernel"):
            first_value(param)


def test_gradients_are_kept_until_the_first_have_run_where_a_later_one_cannot_be_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer, params, device = made(2)
    optimizer.place_state(["resident"] * 2)
    ran: list[bool] = []

    def half(stream: Any, work: Callable[[], None]) -> None:
        HostDevice.launch(device, stream, lambda: time.sleep(0.2) or ran.append(True))
        raise RuntimeError("no kernel")

    monkeypatch.setattr(device, "launch", half)
    give(optimizer, params)
    optimizer.step()
    with pytest.raises(RuntimeError, match="no kernel"):
        optimizer.synchronize()
    assert ran == [True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("clip", [0.5, None])
def test_every_place_in_company_gives_the_same_bits(dtype: torch.dtype, clip: float | None) -> None:
    """Over steps with a parameter left out, a step that is skipped, and accumulation."""
    names = ["resident"] * 5 + ["zero_copy", "host", "resident", "shared", "resident"]

    def run(places: list[str], seed: int) -> tuple[list[torch.Tensor], list[float | None]]:
        torch.manual_seed(3)
        shapes = [(301, 1000) if k % 4 else (41, 3) for k in range(20)]
        params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
        device = SeparateHost()
        optimizer = OffloadAdamW(
            params,
            lr=1e-2,
            mode="gpu",
            max_grad_norm=clip,
            skip_nonfinite=clip is not None,
            accumulation_steps=2,
            threads=1,
            device=device,
            copies=CopyEngine(device),
        )
        optimizer.build()
        count = len(optimizer.buckets)
        optimizer.place_state((places * count)[:count])
        found: list[float | None] = []
        with inject_delays(seed, max_ms=1.0, share=0.2):
            for step in range(4):
                for _ in range(2):
                    for k, param in enumerate(params):
                        if (step, k) == (1, 6):
                            continue
                        grad = torch.randn(param.shape).to(dtype)
                        if clip is not None and (step, k) == (2, 3):
                            grad[0, 0] = math.inf
                        with torch._C.DisableTorchFunctionSubclass():
                            param.grad = grad
                        optimizer._on_gradient(param)
                optimizer.step()
                found.append(optimizer.last_grad_norm)
            optimizer.synchronize()
        state = [t for p in params for t in optimizer.state[p].values() if torch.is_tensor(t)]
        return [*(p.detach().clone() for p in params), *(t.clone() for t in state)], found

    alone, found_alone = run(["host"], 1)
    company, found = run(names, 2)
    if clip is not None:
        assert found == pytest.approx(found_alone, rel=1e-12)
    assert len(alone) == len(company) > 40
    assert all(torch.equal(a, b) for a, b in zip(alone, company, strict=True))


def test_a_forward_in_another_thread_waits_for_its_group_only() -> None:
    optimizer, params, device = made(2)
    optimizer.place_state(["resident", "zero_copy"])
    gate = threading.Event()
    link = optimizer._updates.storage.device_work().stream(over_link=True)
    device.launch(link, lambda: gate.wait(30) and None)
    give(optimizer, params)
    optimizer.step()
    seen: list[float] = []
    reader = threading.Thread(target=lambda: seen.append(first_value(params[0])))
    reader.start()
    reader.join(10)
    assert seen and seen[0] < 1.0 and not gate.is_set()
    gate.set()
    assert first_value(params[1]) < 1.0
