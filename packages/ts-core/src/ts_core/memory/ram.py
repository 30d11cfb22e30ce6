"""How much RAM there is for this process, and how much of it may be page-locked."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil


def ram_limit_bytes(root: Path = Path("/")) -> int:
    """Physical RAM, or the memory limit of the process's cgroup where that is lower.

    Args:
        root: where the system's files are looked for; tests point it at a made-up tree.
    """
    total = int(psutil.virtual_memory().total)
    limits = [limit for limit, _ in _cgroup_limits(root)]
    return min([total, *limits])


def ram_available_bytes(root: Path = Path("/")) -> int:
    """RAM that this process can still take without swapping, within the cgroup's limit too.

    Processes of one run on one machine (see `local_processes`) count on equal shares.
    """
    available = int(psutil.virtual_memory().available)
    left = [max(limit - used, 0) for limit, used in _cgroup_limits(root)]
    return min([available, *left]) // local_processes()


def local_processes() -> int:
    """Processes of this run on this machine (LOCAL_WORLD_SIZE, SLURM_NTASKS_PER_NODE); 1 alone."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"):
        value = os.environ.get(name, "").partition("(")[0]
        if value.isdigit() and int(value) > 0:
            return int(value)
    return 1


def page_lock_limit_bytes() -> int | None:
    """The soft limit of locked memory (`ulimit -l`): bytes, -1 for none, None on Windows."""
    try:
        import resource
    except ImportError:
        return None
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return -1 if limit == resource.RLIM_INFINITY else limit


def in_wsl() -> bool:
    """Whether this is the Windows Subsystem for Linux."""
    return "microsoft" in platform.release().lower()


def in_container() -> bool:
    """Whether the process runs in a Docker or Podman container."""
    return any(Path(path).exists() for path in ("/.dockerenv", "/run/.containerenv"))


def _cgroup_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, bytes used without reclaimable file cache) of the cgroup and its ancestors."""
    found = []
    for directory, version in _cgroup_directories(root):
        limit_name, used_name, cache_key = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        limit = _read_int(directory / limit_name)
        if limit is None or limit >= 1 << 60:  # "max", or v1's way of saying so
            continue
        used = _read_int(directory / used_name) or 0
        found.append((limit, max(used - _read_stat(directory / "memory.stat", cache_key), 0)))
    return found


def _cgroup_directories(root: Path) -> list[tuple[Path, int]]:
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux, or no /proc
        return []
    directories: list[tuple[Path, int]] = []
    for line in lines:
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if not controllers:
            mounts, version = ["sys/fs/cgroup", "sys/fs/cgroup/unified"], 2
        elif "memory" in controllers.split(","):
            mounts, version = [f"sys/fs/cgroup/{controllers}", "sys/fs/cgroup/memory"], 1
        else:
            continue
        for mount in mounts:
            # In a container the path may be the host's and not exist; the mount itself then
            # holds the limit.
            place = Path(path.lstrip("/"))
            for part in [place, *place.parents]:
                directory = root / mount / part
                if directory.is_dir() and (directory, version) not in directories:
                    directories.append((directory, version))
    return directories


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text(encoding="utf-8").strip())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _read_stat(path: Path, key: str) -> int:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    for line in lines:
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0
