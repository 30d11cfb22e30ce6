"""transfer_stats(): every engine counts, and for its own device."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from ts_core import transfer_stats
from ts_core.device import HostDevice
from ts_core.errors import OptionError
from ts_core.transfer import CopyEngine


def engine_of(index: int, max_inflight_bytes: int | None = None) -> CopyEngine:
    """An engine whose copies count for a GPU that no other test has."""
    device = HostDevice()
    device.torch_device = torch.device("cuda", index)
    return CopyEngine(device, max_inflight_bytes)


def test_engines_that_are_gone_count_too() -> None:
    everywhere = transfer_stats()
    for _ in range(2):
        engine = engine_of(61, 1)
        source, target = torch.ones(10), torch.zeros(10)
        engine.h2d(target, source)
        engine.d2h_all([(target, source), (target, source)])
        engine.d2h(target, source)
        engine.synchronize()
        del engine
        gc.collect()
    found = transfer_stats("cuda:61")
    assert 0 <= found["d2h"].pop("limit_waits") <= 2  # the first may have finished by then
    assert found == {
        "h2d": {"bytes": 80, "copies": 2, "limit_waits": 0},
        "d2h": {"bytes": 240, "copies": 6},
    }
    assert transfer_stats()["d2h"]["bytes"] - everywhere["d2h"]["bytes"] >= 240
    assert transfer_stats(torch.device("cuda", 62))["h2d"]["copies"] == 0
    assert set(transfer_stats("host")) == set(transfer_stats("cpu")) == {"h2d", "d2h"}


def test_several_threads() -> None:
    def send() -> None:
        engine = engine_of(63)
        source, target = torch.ones(4), torch.zeros(4)
        for _ in range(50):
            engine.h2d(target, source)
        engine.synchronize()

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    found = transfer_stats("cuda:63")["h2d"]
    assert found == {"bytes": 200 * 16, "copies": 200, "limit_waits": 0}


@pytest.mark.parametrize("device", ["tpu", "meta", "", 1.5])
def test_other_devices_are_refused(device: object) -> None:
    with pytest.raises(OptionError, match="is not accepted"):
        transfer_stats(device)  # type: ignore[arg-type]
