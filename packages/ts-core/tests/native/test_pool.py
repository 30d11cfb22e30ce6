"""The thread pool: concurrent callers, sleeping workers, fork, exit."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable

import pytest
import torch

from ts_core import _native

Run = Callable[..., "subprocess.CompletedProcess[str]"]

PREPARE = """
import ctypes, os, sys, threading, time
from ts_core import _native
host = _native.load()
host.override_usable_cores(4)
SIZE = 12 << 20
buffers = [bytearray(os.urandom(1 << 16) * (SIZE >> 16)), bytearray(SIZE)]
a, b = (ctypes.addressof(ctypes.c_char.from_buffer(x)) for x in buffers)
def copy():
    buffers[1][:] = bytes(SIZE)
    _native.copy_bytes(b, a, SIZE)
    assert buffers[0] == buffers[1]
copy()
"""


def test_many_callers_at_once_each_get_their_own_work_done(many_cores: None) -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            for round_index in range(6):
                n = 150_000 + 1_000 * seed + round_index
                source = torch.randn(n, generator=generator)
                target = torch.empty(n)
                _native.copy_bytes(target.data_ptr(), source.data_ptr(), 4 * n)
                assert torch.equal(source, target)
                alone = _native.grad_stats(source.data_ptr(), "float32", n, 1)
                assert _native.grad_stats(source.data_ptr(), "float32", n, 8) == alone
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not errors


def test_the_gil_is_released_while_it_works(many_cores: None) -> None:
    """Another Python thread runs while a long copy is under way."""
    size = 256 << 20
    source, target = torch.ones(2, size, dtype=torch.uint8)
    counted, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1

    counter = threading.Thread(target=count)
    counter.start()
    try:
        end, during = time.monotonic() + 30, 0
        while during <= 100 and time.monotonic() < end:  # the other thread may get no core at once
            before = counted[0]
            _native.copy_bytes(target.data_ptr(), source.data_ptr(), size, threads=1)
            during = counted[0] - before
    finally:
        stop.set()
        counter.join()
    assert during > 100


def test_idle_workers_use_no_cpu_time(run_python: Run) -> None:
    code = (
        PREPARE
        + """
assert host.pool_threads() == 3, host.pool_threads()
before = time.process_time()
time.sleep(1.0)
print(time.process_time() - before)
"""
    )
    assert float(run_python(code).stdout) < 0.2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_child_of_fork_makes_its_own_pool(run_python: Run) -> None:
    code = (
        PREPARE
        + """
stop = False
def busy():
    other = bytearray(SIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(other))
    while not stop:
        _native.copy_bytes(address, a, SIZE)
thread = threading.Thread(target=busy)
thread.start()
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is the point
statuses = []
for _ in range(8):
    child = os.fork()
    if child == 0:
        assert host.pool_threads() == 0
        copy()
        assert host.pool_threads() == 3
        os._exit(7)
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
stop = True
thread.join()
copy()
assert statuses == [7] * 8, statuses
"""
    )
    run_python(code)


def test_the_process_ends_cleanly_with_work_under_way(run_python: Run) -> None:
    code = (
        PREPARE
        + """
def forever():
    while True:
        _native.copy_bytes(b, a, SIZE)
for _ in range(2):
    threading.Thread(target=forever, daemon=True).start()
time.sleep(0.2)
print("end")
"""
    )
    assert run_python(code).stdout == "end\n"


def test_work_after_shutdown_runs_on_its_caller(run_python: Run) -> None:
    run_python(
        PREPARE
        + "host.shutdown_pool(); host.shutdown_pool(); copy()\nassert host.pool_threads() == 0"
    )
