"""Copies that another thread queues: waiting, failing, cancelling."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from ts_core.device import HostDevice
from ts_core.transfer import CopyEngine, PendingCopy


def test_compute_waits_until_it_is_queued_and_done() -> None:
    device = HostDevice()
    copies = CopyEngine(device)
    source, target = torch.arange(1000.0), torch.zeros(1000)
    pending = PendingCopy()
    assert not pending.query()

    def fill() -> None:
        time.sleep(0.05)
        device.delay(copies._lanes["h2d"].stream, 0.05)
        pending.finish(copies.h2d(target, source))

    thread = threading.Thread(target=fill)
    thread.start()
    copies.wait_compute(pending)
    assert torch.equal(target, source)
    assert pending.query()
    thread.join()


def test_cancelled_before_it_began() -> None:
    pending = PendingCopy()
    pending.cancel()
    assert not pending.begin() and not pending.query()


def test_an_error_reaches_the_one_who_waits() -> None:
    pending = PendingCopy()
    assert pending.begin()
    pending.fail(OSError("no such disk"))
    with pytest.raises(OSError, match="no such disk"):
        CopyEngine(HostDevice()).wait_compute(pending)
    with pytest.raises(OSError, match="no such disk"):
        pending.synchronize()
    assert not pending.query()
    pending.cancel()


def test_cancelling_waits_for_the_other_thread_to_stop() -> None:
    pending = PendingCopy()
    steps: list[str] = []

    assert pending.begin()

    def fill() -> None:
        while not pending.cancelled:
            time.sleep(0.001)
        steps.append("stopped")
        pending.abandon()

    thread = threading.Thread(target=fill)
    thread.start()
    pending.cancel()
    assert steps == ["stopped"]
    with pytest.raises(RuntimeError, match="cancelled"):
        pending.queued()
    thread.join()
