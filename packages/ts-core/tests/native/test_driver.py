"""The CUDA driver's part, against a made-up driver (fake_cuda_driver.c) in a process of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

Run = Callable[..., "subprocess.CompletedProcess[str]"]

PREPARE = """
import ctypes, sys, threading, time
from ts_core import _native
from ts_core.errors import StateError
host = _native.load()
host.use_driver_library(sys.argv[1])
fake = ctypes.CDLL(sys.argv[1])
def event(seconds):
    # An event of the made-up driver is the address of the time at which it is done.
    cell = ctypes.c_double(seconds if seconds < 0 else time.monotonic() + seconds)
    event.kept.append(cell)
    return ctypes.addressof(cell)
event.kept = []
def raises(kind, words, action):
    try:
        action()
    except kind as error:
        assert words in str(error), str(error)
    else:
        raise SystemExit(f"no {kind.__name__}")
"""


def test_no_driver_is_said_in_words(run_python: Run) -> None:
    code = """
import sys
from ts_core import _native
from ts_core.errors import StateError
_native.load().use_driver_library("/nowhere/libcuda.so.1")
info = _native.driver_info()
assert info.reason.startswith("no CUDA driver (") and info.devices == [], info
for call in (lambda: _native.wait_event(8), lambda: _native.event_done(8)):
    try:
        call()
    except StateError as error:
        assert "no CUDA driver" in str(error)
    else:
        raise SystemExit("no error")
assert "no CUDA driver" in _native.register_memory(4096, 4096)
assert "torch" not in sys.modules
"""
    run_python(code)


def test_a_driver_without_a_device_is_said_in_words(run_python: Run, fake_driver: Path) -> None:
    code = PREPARE + "assert _native.driver_info().reason == 'cuInit: CUDA_ERROR_NO_DEVICE'"
    run_python(code, str(fake_driver), FAKE_CUDA_NO_DEVICE="1")


def test_a_driver_that_lacks_a_function_is_said_in_words(run_python: Run) -> None:
    code = """
from ts_core import _native
host = _native.load()
host.use_driver_library("libc.so.6")
assert "the CUDA driver has no cuInit" in _native.driver_info().reason
"""
    run_python(code)


def test_version_and_devices(run_python: Run, fake_driver: Path) -> None:
    code = (
        PREPARE
        + """
assert _native.driver_info() == ("", 13010, [("Made-up GPU", 8 << 30)])
assert fake.fake_retained() == 0  # asking creates no context
"""
    )
    run_python(code, str(fake_driver))


def test_waiting_ends_when_the_event_is_done(run_python: Run, fake_driver: Path) -> None:
    code = (
        PREPARE
        + """
for policy in ("poll", "spin", "block"):
    _native.set_event_wait(policy)
    start = time.monotonic()
    _native.wait_event(event(0.15))
    assert 0.14 < time.monotonic() - start < 30, policy
    _native.wait_event(event(0))
assert not _native.event_done(event(60)) and _native.event_done(event(0))
assert fake.fake_context_depth() == 0  # the context it made current is not left behind
assert fake.fake_retained() == 1
"""
    )
    run_python(code, str(fake_driver))


def test_waiting_takes_little_cpu_time(run_python: Run, fake_driver: Path) -> None:
    code = (
        PREPARE
        + """
before, queries = time.thread_time(), fake.fake_queries()
_native.wait_event(event(1.0))
print(time.thread_time() - before, fake.fake_queries() - queries)
"""
    )
    cpu_s, queries = map(float, run_python(code, str(fake_driver)).stdout.split())
    assert cpu_s < 0.3
    assert 10 < queries < 11_000  # at most every 100 us, after 50 us of spinning


def test_waiting_releases_the_gil_and_runs_on_any_thread(
    run_python: Run, fake_driver: Path
) -> None:
    code = (
        PREPARE
        + """
waiters = [threading.Thread(target=_native.wait_event, args=(event(0.4),)) for _ in range(4)]
for waiter in waiters: waiter.start()
start, turns = time.monotonic(), 0
while any(waiter.is_alive() for waiter in waiters):
    turns += 1
    time.sleep(0.001)
assert turns > 20 and time.monotonic() - start < 30
"""
    )
    run_python(code, str(fake_driver))


def test_time_limits(run_python: Run, fake_driver: Path) -> None:
    code = (
        PREPARE
        + """
start = time.monotonic()
raises(TimeoutError, "not done within 0.2 s", lambda: _native.wait_event(event(60), timeout=0.2))
assert 0.19 < time.monotonic() - start < 30
raises(TimeoutError, "within 0", lambda: _native.wait_event(event(60), timeout=0))
_native.wait_event(event(0.05), timeout=20)
"""
    )
    run_python(code, str(fake_driver))


def test_a_failed_kernel_is_an_error(run_python: Run, fake_driver: Path) -> None:
    code = (
        PREPARE
        + """
for policy in ("poll", "spin", "block"):
    _native.set_event_wait(policy)
    raises(StateError, "CUDA_ERROR_LAUNCH_FAILED", lambda: _native.wait_event(event(-1)))
raises(StateError, "cuEventQuery: CUDA_ERROR_LAUNCH_FAILED", lambda: _native.event_done(event(-1)))
raises(StateError, "CUDA_ERROR_INVALID_VALUE", lambda: _native.event_done(event(0), device=3))
assert fake.fake_context_depth() == 0
"""
    )
    run_python(code, str(fake_driver))


def test_ctrl_c_interrupts_a_wait(run_python: Run, fake_driver: Path) -> None:
    code = (
        PREPARE
        + """
import os, signal
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
start = time.monotonic()
raises(KeyboardInterrupt, "", lambda: _native.wait_event(event(60)))
assert time.monotonic() - start < 30
"""
    )
    run_python(code, str(fake_driver))


def test_memory_is_registered_once_and_given_back(run_python: Run, fake_driver: Path) -> None:
    code = (
        PREPARE
        + """
import mmap
memory = mmap.mmap(-1, 1 << 20)
at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert _native.register_memory(at, 1 << 20) == ""
assert fake.fake_registered_bytes() == 1 << 20
assert "712" in _native.register_memory(at, 1 << 20)  # a name the made-up driver does not know
assert _native.unregister_memory(at) == ""
assert "713" in _native.unregister_memory(at)
assert fake.fake_registered_bytes() == 0 and fake.fake_context_depth() == 0
raises(ValueError, "null", lambda: _native.register_memory(0, 4096))
raises(ValueError, "nbytes=-1", lambda: _native.register_memory(at, -1))
"""
    )
    run_python(code, str(fake_driver))


def test_settings_come_from_the_environment(run_python: Run) -> None:
    code = "from ts_core import _native; print(*_native.event_wait(), _native.simd_level())"
    done = run_python(
        code,
        TRAINSTREAM_EVENT_WAIT="block",
        TRAINSTREAM_EVENT_SPIN_US="7",
        TRAINSTREAM_EVENT_SLEEP_US="11",
        TRAINSTREAM_SIMD="scalar",
    )
    assert done.stdout.split() == ["block", "7", "11", "scalar"]
    for name, value in [
        ("TRAINSTREAM_EVENT_WAIT", "nap"),
        ("TRAINSTREAM_EVENT_SPIN_US", "1.5"),
        ("TRAINSTREAM_EVENT_SLEEP_US", "-1"),
        ("TRAINSTREAM_SIMD", "mmx"),
    ]:
        done = run_python(code, status=1, **{name: value})
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("ts_core.errors.OptionError: ") and value in last
        assert name in last or "TRAINSTREAM_EVENT_WAIT" in last
