"""Limits on a GPU's memory, of which torch keeps one number for the whole process."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from ts_core import unwrap, wrap
from ts_core.device import HostDevice
from ts_core.device.limits import MemoryLimits, end_with
from ts_core.engine import wrapping
from ts_core.errors import OutOfBudgetError
from ts_core.testing import tiny_model

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


@pytest.mark.parametrize("where", ["_take_workspaces", "serve_stored", "with_rates", "_assemble"])
def test_a_wrap_that_fails_leaves_no_limit(
    where: str, device: HostDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"{where} failed")

    monkeypatch.setattr(wrapping, where, fail)
    with pytest.raises(RuntimeError, match=f"{where} failed"):
        wrap(tiny_model(), lr=1e-2, vram_limit="1GiB", param_offload=True, **HOST)
    assert device.pool.limit is None


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
    assert torch.cuda.get_per_process_memory_fraction() == start
