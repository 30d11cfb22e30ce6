"""RAM of the machine and of the cgroup."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from ts_core.memory import ram
from ts_core.memory.ram import ram_available_bytes, ram_limit_bytes

MIB = 1 << 20


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_a_cgroup_it_is_the_machines(tmp_path: Path) -> None:
    assert ram_limit_bytes(tmp_path) == psutil.virtual_memory().total
    assert 0 < ram_available_bytes(tmp_path) <= ram_limit_bytes(tmp_path)


@pytest.mark.parametrize(
    ("files", "limit", "left"),
    [
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/memory.max": f"{100 * MIB}\n",
                "sys/fs/cgroup/a/memory.current": f"{70 * MIB}\n",
                "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {20 * MIB}\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
            },
            100 * MIB,
            50 * MIB,
        ),
        (
            {
                "proc/self/cgroup": "0::/docker/1234\n",
                "sys/fs/cgroup/memory.max": f"{64 * MIB}\n",
                "sys/fs/cgroup/memory.current": f"{65 * MIB}\n",
            },
            64 * MIB,
            0,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/job\n1:cpu:/x\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{80 * MIB}\n",
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{30 * MIB}\n",
                "sys/fs/cgroup/memory/job/memory.stat": f"total_inactive_file {10 * MIB}\n",
            },
            80 * MIB,
            60 * MIB,
        ),
    ],
)
def test_the_tightest_cgroup_counts(
    tmp_path: Path, files: dict[str, str], limit: int, left: int
) -> None:
    root = tree(tmp_path, files)
    assert ram_limit_bytes(root) == limit
    assert ram_available_bytes(root) == left


def test_an_unlimited_cgroup_is_no_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n0::/\nnonsense\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory.max": "max\n",
    }
    assert ram_limit_bytes(tree(tmp_path, files)) == psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("name", "value", "processes"),
    [
        ("LOCAL_WORLD_SIZE", "4", 4),
        ("SLURM_NTASKS_PER_NODE", "2(x3)", 2),
        ("LOCAL_WORLD_SIZE", "none", 1),
        ("LOCAL_WORLD_SIZE", "0", 1),
    ],
)
def test_processes_of_a_run_share_the_machine(
    name: str, value: str, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ram.psutil, "virtual_memory", lambda: Memory(1000, 800))
    monkeypatch.setenv(name, value)
    assert ram.local_processes() == processes
    assert ram.ram_available_bytes(tmp_path) == 800 // processes
    assert ram.ram_limit_bytes(tmp_path) == 1000  # what the machine has


class Memory:
    def __init__(self, total: int, available: int) -> None:
        self.total, self.available = total, available
