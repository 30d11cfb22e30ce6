"""Usable cores: affinity and cgroup quotas."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ts_core import _native


def tree(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, 0),
        ({"proc/self/cgroup": "0::/\n"}, 0),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 0),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "50000 50000\n",
            },
            1,
        ),
        # In a container the path is the host's; the mount itself has the limit.
        (
            {
                "proc/self/cgroup": "0::/system.slice/docker-1234.scope\n",
                "sys/fs/cgroup/cpu.max": "300000 100000\n",
            },
            3,
        ),
        (
            {
                "proc/self/cgroup": "9:memory:/m\n3:cpu,cpuacct:/job\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
            },
            2.5,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/job\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000\n",
            },
            0,
        ),
        ({"proc/self/cgroup": "garbage\n\n0:\n", "sys/fs/cgroup/cpu.max": "x y\n"}, 0),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 0\n"}, 0),
    ],
)
def test_the_tightest_quota_counts(tmp_path: Path, files: dict[str, str], quota: float) -> None:
    assert _native.load().cgroup_cpu_quota(tree(tmp_path, files)) == quota


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity masks on this system")
def test_affinity_limits_the_cores() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert _native.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)
    assert 1 <= _native.usable_cores() <= len(allowed)


def test_more_threads_than_usable_cores_are_never_started(run_python: object) -> None:
    code = """
from ts_core import _native
host = _native.load()
host.override_usable_cores(2)
buffers = [bytearray(8 << 20) for _ in range(2)]
import ctypes
a, b = (ctypes.addressof(ctypes.c_char.from_buffer(x)) for x in buffers)
_native.copy_bytes(a, b, 8 << 20, threads=64)
print(host.pool_threads())
"""
    done = run_python(code)  # type: ignore[operator]
    assert done.stdout.split() == ["1"]  # the caller is the other
