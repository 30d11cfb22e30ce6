"""Limits on a GPU's memory, of which torch keeps one number for the whole process."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from ts_core import unwrap, wrap
from ts_core.device import CudaDevice, HostDevice
from ts_core.device import limits as limits_module
from ts_core.device.limits import MemoryLimits, end_with
from ts_core.engine import wrapping
from ts_core.errors import OutOfBudgetError
from ts_core.testing import tiny_model, train

TOTAL = 1000


class Share:
    """The number as torch keeps it: rounded to bytes."""

    def __init__(self, value: float = 1.0) -> None:
        self.allowed = int(value * TOTAL)

    def read(self) -> float:
        return self.allowed / TOTAL

    def write(self, value: float) -> None:
        assert 0 <= value <= 1
        self.allowed = int(value * TOTAL)


def made(value: float = 1.0) -> tuple[Share, MemoryLimits]:
    share = Share(value)
    return share, MemoryLimits(TOTAL, share.read, share.write)


def test_the_last_limit_holds_and_the_one_before_comes_back() -> None:
    share, limits = made()
    limits.put(1, 600)
    assert share.allowed == limits.allowed_bytes() == 600
    limits.put(2, 300)
    assert share.allowed == 300
    limits.put(1, 500)  # set again: it is the last one now
    assert share.allowed == 500
    limits.end(2)
    assert share.allowed == 500
    limits.end(1)
    assert share.allowed == TOTAL
    limits.end(1)
    limits.end(7)
    assert share.allowed == TOTAL
    limits.put(3, 5 * TOTAL)
    assert share.allowed == TOTAL


@pytest.mark.parametrize("ended_first", [1, 2])
def test_limits_end_in_any_order(ended_first: int) -> None:
    share, limits = made()
    limits.put(1, 600)
    limits.put(2, 300)
    limits.end(ended_first)
    assert share.allowed == (300 if ended_first == 1 else 600)
    limits.end(3 - ended_first)
    assert share.allowed == TOTAL


def test_the_share_of_the_user_comes_back() -> None:
    share, limits = made(0.7)
    limits.put(1, 333)
    limits.end(1)
    assert share.allowed == 700


def test_a_share_that_somebody_sets_meanwhile_stays() -> None:
    share, limits = made()
    limits.put(1, 600)
    share.write(0.9)
    limits.end(1)
    assert share.allowed == 900
    limits.put(2, 600)
    share.write(0.8)
    limits.put(3, 100)
    limits.end(3)  # the limit set before holds again
    assert share.allowed == 600
    limits.end(2)
    assert share.allowed == 800


def test_a_limit_ends_with_its_owner() -> None:
    class Owner:
        pass

    share, limits = made()
    owner, other = Owner(), Owner()
    number = end_with(owner, limits)
    assert number != end_with(other, limits)
    limits.put(number, 100)
    del owner
    assert share.allowed == TOTAL


class FakeGPU:
    """What CudaDevice asks of torch about memory."""

    total_memory = 1000

    def __init__(self) -> None:
        self.share = Share()
        self.free, self.reserved = 900, 100
        self.segments: list[dict[str, Any]] = []
        self.gone: list[dict[str, Any]] = []  # go when torch empties its cache
        self.emptied = 0

    def empty(self) -> None:
        self.emptied += 1
        self.segments = [segment for segment in self.segments if segment not in self.gone]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGPU:
    found = FakeGPU()
    answers: dict[str, Any] = {
        "init": lambda: None,
        "current_device": lambda: 0,
        "get_device_properties": lambda _: found,
        "get_per_process_memory_fraction": lambda _: found.share.read(),
        "set_per_process_memory_fraction": lambda share, _: found.share.write(share),
        "mem_get_info": lambda _: (found.free, found.total_memory),
        "memory_reserved": lambda _: found.reserved,
        "memory_snapshot": lambda: found.segments,
        "get_allocator_backend": lambda: "native",
        "empty_cache": found.empty,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(limits_module, "_LIMITS", {})
    return found


def segment(total: int, allocated: int, pool: tuple[int, int], device: int = 0) -> dict[str, Any]:
    return {
        "total_size": total,
        "allocated_size": allocated,
        "segment_pool_id": pool,
        "device": device,
    }


def test_what_a_gpu_offers(gpu: FakeGPU) -> None:
    device = CudaDevice(None)
    assert device.usable_bytes() == 1000
    gpu.free = 500
    assert device.usable_bytes() == 600
    device.set_limit(300)
    assert device.usable_bytes() == gpu.share.allowed == 300
    device.set_limit(None)
    assert device.usable_bytes() == 600 and gpu.share.allowed == 1000
    gpu.share.write(0.25)  # the user's own
    assert device.usable_bytes() == 250
    other = CudaDevice(0)
    other.set_limit(400)
    assert other.usable_bytes() == device.usable_bytes() == 400
    del other
    assert device.usable_bytes() == gpu.share.allowed == 250


def test_everyone_knows_of_resets_of_a_gpus_peak(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever else streams a model on it measures steps by the same peak."""
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    mine, others, elsewhere = CudaDevice(0), CudaDevice(0), CudaDevice(1)
    before, apart = mine.peaks, elsewhere.peaks
    others.reset_peak()
    assert mine.peaks == others.peaks == before + 1 and elsewhere.peaks == apart


def test_what_recorded_graphs_keep_is_not_offered(gpu: FakeGPU) -> None:
    gpu.segments = [segment(200, 100, (0, 0)), segment(90, 90, (0, 3))]
    assert CudaDevice(None).usable_bytes() == 1000 and gpu.emptied == 0
    gpu.gone = [segment(50, 0, (0, 3))]
    kept = [segment(60, 20, (0, 4)), segment(70, 0, (5, 0)), segment(80, 0, (0, 6), device=1)]
    gpu.segments += [*gpu.gone, *kept]
    device = CudaDevice(None)
    assert gpu.emptied == 1
    assert device.usable_bytes() == 1000 - 40 - 70
    device.set_limit(500)
    assert device.usable_bytes() == 500 - 40 - 70
    device.set_limit(100)
    assert device.usable_bytes() == 0
    gpu.segments.append(segment(30, 0, (0, 7)))  # made since: its owner counts it
    device.set_limit(500)
    assert device.usable_bytes() == 500 - 40 - 70


def test_an_allocator_that_tells_nothing_of_pools(
    gpu: FakeGPU, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.segments = [segment(60, 20, (0, 4))]
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert CudaDevice(None).usable_bytes() == 1000


HOST: dict[str, Any] = {"quantize": "none", "host_arena": False, "profile": False}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> HostDevice:
    found = HostDevice()
    monkeypatch.setattr(wrapping, "_device_for", lambda model, config: found)
    return found


@pytest.mark.parametrize("how", ["unwrapped", "closed", "dropped"])
def test_the_limit_of_a_session_ends_with_it(how: str, device: HostDevice) -> None:
    model, optimizer = wrap(tiny_model(full=True), lr=1e-2, vram_limit="1GiB", **HOST)
    model(torch.randint(0, 37, (2, 7))).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert device.pool.limit == 1 << 30
    if how == "unwrapped":
        unwrap(model)
    elif how == "closed":
        model._trainstream_session.close()
    else:
        del model, optimizer
        gc.collect()
    assert device.pool.limit is None


def test_a_session_that_is_gone_does_not_end_a_later_limit(device: HostDevice) -> None:
    first, optimizer = wrap(tiny_model(), lr=1e-2, vram_limit="1GiB", **HOST)
    unwrap(first)
    second, _ = wrap(tiny_model(), lr=1e-2, vram_limit="2GiB", **HOST)
    del first, optimizer
    gc.collect()
    assert device.pool.limit == 2 << 30
    unwrap(second)


@pytest.mark.parametrize(
    "where", ["_take_workspaces", "serve_stored", "with_rates", "assemble", "apply_patches"]
)
def test_a_wrap_that_fails_leaves_no_limit(
    where: str, device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor a model that is wrapped."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"{where} failed")

    model = tiny_model(full=True)
    with pytest.raises(RuntimeError, match=f"{where} failed"), monkeypatch.context() as patched:
        patched.setattr(wrapping, where, fail)
        wrap(model, lr=1e-2, vram_limit="1GiB", param_offload=True, **HOST)
    assert device.pool.limit is None and device.pool.used == 0
    plain = tiny_model(full=True)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]
    assert train(model, optimizers[0], 2).differences(train(plain, optimizers[1], 2)) == []
    model.zero_grad()
    wrap(model, lr=1e-2, vram_limit="1GiB", param_offload=True, **HOST)


def test_a_wrap_that_is_refused_leaves_no_limit(device: HostDevice) -> None:
    with pytest.raises(OutOfBudgetError):
        wrap(tiny_model(), lr=1e-2, vram_limit=1000, param_offload=False, **HOST)
    assert device.pool.limit is None


@pytest.mark.gpu
def test_on_a_gpu_a_limit_ends_with_the_session() -> None:
    start = torch.cuda.get_per_process_memory_fraction()
    held = torch.cuda.memory_reserved()
    limits = [held + (2 << 30), held + (1 << 30)]
    first, second = (
        wrap(tiny_model(), lr=1e-2, device="cuda", quantize="none", vram_limit=limit)[0]
        for limit in limits
    )
    total = torch.cuda.get_device_properties(0).total_memory
    assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(limits[1] / total)
    first_device = first._trainstream_session.device
    assert first_device.usable_bytes() <= limits[0]
    del first, first_device
    gc.collect()
    assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(limits[1] / total)
    assert torch.cuda.memory_reserved() < limits[1]
    del second
    gc.collect()
    assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(start)
