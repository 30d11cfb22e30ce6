"""Trials leave no trace in the peak that plans go by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ts_core.device import resolve_device
from ts_core.device.host import HostDevice
from ts_core.engine.attention import AttentionChoice

MIB = 1 << 20


def of(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


@pytest.mark.gpu
def test_what_a_trial_takes_is_of_no_step() -> None:
    device = resolve_device("cuda")
    device.reset_peak()
    before = device.memory()["peak_allocated"]
    del_me = of(64)
    del del_me
    with device.trial():
        del_me = of(512)
        del del_me
    assert device.memory()["peak_allocated"] == before + 64 * MIB  # what came before still counts
    kept = of(256)
    assert device.memory()["peak_allocated"] == before + 256 * MIB
    device.reset_peak()
    assert device.memory()["peak_allocated"] == device.memory()["allocated"]
    with device.trial():
        kept_too = of(128)
        device.reset_peak()  # another model's step begins
    del kept
    assert device.memory()["peak_allocated"] >= device.memory()["allocated"]
    assert device.memory()["peak_allocated"] <= before + (256 + 128) * MIB
    del kept_too


def test_attention_is_timed_within_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """The "math" kernel keeps scores in fp32: 0.67 GB a tensor for 40 heads and 2048 tokens."""
    from ts_core.engine import attention

    open_trials: list[bool] = []

    class Noted(HostDevice):
        separate_memory = True

        @contextmanager
        def trial(self) -> Iterator[None]:
            open_trials.append(True)
            yield
            open_trials.append(False)

    def timed(*args: object) -> dict[str, float]:
        assert open_trials == [True]
        return {"torch": 2.0, "flash": 1.0}

    monkeypatch.setattr(attention, "time_backends", timed)
    choice = AttentionChoice("auto", Noted(), lambda text: None)
    choice._decide(torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 8), {})
    assert open_trials == [True, False] and choice.backend == "flash"
