"""State that moves between places: what device memory it takes meanwhile."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from ts_core import OffloadAdamW
from ts_core.device.host import HostDevice
from ts_core.optim import storage
from ts_core.optim.device_places import DevicePlace
from ts_core.optim.hybrid import HybridSplit
from ts_core.optim.rates import Rates
from ts_core.transfer import CopyEngine

SIZE = 600_000


class SeparateHost(HostDevice):
    separate_memory = True


def optimizer_of(params: list[torch.nn.Parameter], **options: Any) -> OffloadAdamW:
    device = SeparateHost()
    return OffloadAdamW(params, device=device, copies=CopyEngine(device), **options)


class _Device:
    """Counts the device memory of state."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = self.most = 0
        counts = self

        class Counted(DevicePlace):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **options)
                for tensor in self.state.tensors() if self.name == "resident" else []:
                    counts.now += tensor.nbytes
                    weakref.finalize(tensor.untyped_storage(), counts._gone, tensor.nbytes)
                counts.most = max(counts.most, counts.now)

        monkeypatch.setattr(storage, "DevicePlace", Counted)

    def _gone(self, size_bytes: int) -> None:
        self.now -= size_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_that_moves_is_never_twice_in_device_memory(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It moves where memory is short: out of it where a step took too much."""
    device = _Device(monkeypatch)
    param = torch.nn.Parameter(torch.ones(SIZE, dtype=dtype))
    optimizer = optimizer_of([param], lr=0.1)
    param.grad = torch.ones_like(param)
    optimizer.step()
    before = {k: v.clone() for k, v in optimizer.state_dict()["state"][0].items()}
    for name, near in [
        ("shared", 0.6),
        ("shared", 0.4),
        ("shared", 0.5),
        ("resident", 0.0),
        ("shared", 0.7),
        ("zero_copy", 0.0),
        ("resident", 0.0),
        ("shared", 0.0),
    ]:
        was = optimizer.state_on_device()
        device.most = 0
        optimizer.share_by(0.5, near)
        optimizer.place_state([name])
        assert device.now == optimizer.state_on_device()
        assert device.most <= max(was, device.now)
        found = optimizer.state_dict()["state"][0]
        assert all(torch.equal(before[k], found[k]) for k in before)
        del found


def test_what_leaves_device_memory_makes_room_for_what_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = _Device(monkeypatch)
    params = [torch.nn.Parameter(torch.ones(SIZE)) for _ in range(3)]
    optimizer = optimizer_of(params)
    optimizer.build()
    optimizer.place_state(["zero_copy", "shared", "resident"])
    assert optimizer.state[params[2]]  # it is shown, which keeps no memory
    for places in (["resident", "host", "zero_copy"], ["host", "shared", "resident"]):
        device.most = 0
        optimizer.place_state(places)
        assert device.most == device.now == 8 * SIZE
    assert optimizer.state[params[2]]["exp_avg"].numel() == SIZE


def test_a_split_that_finds_device_memory_full_goes_on_where_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is free may lie in pieces, or be taken by others meanwhile."""
    zeros = torch.zeros

    def full(*args: Any, **options: Any) -> Any:
        if "device" in options and options.get("dtype") is torch.float32:
            raise torch.OutOfMemoryError("tried to allocate too much")
        return zeros(*args, **options)

    results = []
    for mode in ("cpu", "hybrid"):
        params = [torch.nn.Parameter(torch.ones(SIZE)) for _ in range(3)]
        lines: list[str] = []
        optimizer = optimizer_of(params, mode=mode, lr=0.1)
        optimizer.build()
        if mode == "hybrid":
            optimizer._updates.split = HybridSplit(
                SeparateHost(), lambda: Rates(4e9, 45e9), lambda: 1 << 30, lines.append
            )
            monkeypatch.setattr(torch, "zeros", full)
        for _ in range(6):
            for param in params:
                param.grad = torch.ones_like(param)
                optimizer._on_gradient(param)
            optimizer.step()
        optimizer.synchronize()
        results.append(params)
    assert sum("moves no more: device memory has no room" in line for line in lines) == 1
    assert optimizer.state_on_device() == 0
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
