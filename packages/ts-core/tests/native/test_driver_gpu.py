"""The CUDA driver's part on a real GPU: waiting for events."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from ts_core import _native

pytestmark = pytest.mark.gpu
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def delayed_event(seconds: float) -> torch.cuda.Event:
    """An event that is done about `seconds` from now (cycles of a clock near 1.5 to 2 GHz)."""
    event = torch.cuda.Event()
    torch.cuda._sleep(int(seconds * 1.7e9))
    event.record()
    return event


@pytest.fixture
def each_policy() -> Iterator[list[str]]:
    before = _native.event_wait()
    yield ["poll", "spin", "block"]
    _native.set_event_wait(*before)


def test_the_driver_lists_what_torch_sees() -> None:
    info = _native.driver_info()
    assert info.reason == "" and info.version >= 12000
    assert [name for name, _ in info.devices] == [
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
    ]


def test_a_wait_ends_after_the_work_before_the_event(each_policy: list[str]) -> None:
    torch.cuda.synchronize()
    for policy in each_policy:
        _native.set_event_wait(policy)
        event = delayed_event(0.2)
        assert not _native.event_done(event.cuda_event)
        start = time.perf_counter()
        _native.wait_event(event.cuda_event)
        waited = time.perf_counter() - start
        assert event.query() and _native.event_done(event.cuda_event)
        assert waited > 0.02, policy


def test_data_copied_before_the_event_is_there_after_the_wait() -> None:
    """A copy behind slow work, read by a thread that has no CUDA context of its own."""
    source_d = torch.arange(1 << 22, device="cuda", dtype=torch.int32)
    target_h = torch.zeros(1 << 22, dtype=torch.int32, pin_memory=True)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    seen: list[bool] = []
    for round_index in range(4):
        target_h.zero_()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            target_h.copy_(source_d + round_index, non_blocking=True)
            event = torch.cuda.Event()
            event.record()

        def read(round_index: int = round_index, event: torch.cuda.Event = event) -> None:
            _native.wait_event(event.cuda_event)
            expected = torch.arange(1 << 22, dtype=torch.int32) + round_index
            seen.append(torch.equal(target_h, expected))

        reader = threading.Thread(target=read)
        reader.start()
        reader.join(60)
    assert seen == [True] * 4


def test_waiting_takes_little_cpu_time_and_lets_python_run() -> None:
    _native.set_event_wait("poll")
    torch.cuda.synchronize()
    event = delayed_event(1.0)
    ticks = [0]
    used: list[tuple[float, float]] = []

    def wait() -> None:
        wall, cpu = time.perf_counter(), time.thread_time()
        _native.wait_event(event.cuda_event)
        used.append((time.perf_counter() - wall, time.thread_time() - cpu))

    waiter = threading.Thread(target=wait)
    waiter.start()
    while waiter.is_alive():
        ticks[0] += 1
        time.sleep(0.001)
    ((wall, cpu),) = used
    print(f"waited {wall:.3f} s with {cpu * 1000:.1f} ms of CPU time")
    assert wall > 0.2
    assert cpu < 0.3 * wall
    assert ticks[0] > 20


def test_time_limit() -> None:
    torch.cuda.synchronize()
    event = delayed_event(0.5)
    with pytest.raises(TimeoutError):
        _native.wait_event(event.cuda_event, timeout=0.01)
    _native.wait_event(event.cuda_event)
    assert event.query()


def test_an_event_that_was_never_recorded_is_refused() -> None:
    with pytest.raises(ValueError, match="event=0"):
        _native.wait_event(torch.cuda.Event().cuda_event)


def test_a_failed_kernel_is_an_error_in_words(run_python: Run) -> None:
    code = """
import torch
from ts_core import _native
from ts_core.errors import StateError
x = torch.zeros(4, device="cuda")
y = x[torch.tensor([9], device="cuda")]  # a device-side assertion fails
event = torch.cuda.Event()
try:
    event.record()
    _native.wait_event(event.cuda_event)
except StateError as error:
    print(error, flush=True)
except RuntimeError as error:  # torch may be the first to see it
    print("CUDA_ERROR seen by torch:", error, flush=True)
import os; os._exit(0)
"""
    assert "CUDA_ERROR" in run_python(code).stdout


def test_nothing_initializes_cuda_by_itself(run_python: Run) -> None:
    code = """
import ctypes, torch
from ts_core import _native, pinned_stats
from ts_core.memory.arena import default_arena
assert _native.driver_info().devices
default_arena().empty(1000).fill_(1)
assert not torch.cuda.is_initialized() and pinned_stats()["arena_pinned"] == 0
driver, flags, active = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint(), ctypes.c_int(-1)
assert driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0
assert active.value == 0  # no context on the device
"""
    run_python(code)
