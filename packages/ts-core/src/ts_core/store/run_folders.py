"""Folders that belong to one process, and removing those whose process is gone."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

RUN_PREFIX = "trainstream-run-"
LOCK_NAME = "lock.json"
_NEW_PREFIX = "trainstream-new-"


@dataclass(frozen=True)
class _Maker:
    """Who made a folder.

    Attributes:
        host: name of the machine.
        boot: identifies the time since the machine was started.
        namespace: whose process numbers `pid` is one of (containers have their own).
        pid, started: the process; a number alone may be given to another process later.
    """

    host: str
    boot: str
    namespace: str
    pid: int
    started: str


def make_locked_folder(directory: Path) -> tuple[Path, int]:
    """A new folder in `directory` with a lock in it.

    Returns:
        The folder, and the lock's descriptor: open as long as the folder is in use.
    """
    fresh = Path(tempfile.mkdtemp(prefix=_NEW_PREFIX, dir=directory))
    try:
        descriptor = os.open(fresh / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _try_lock(descriptor)
            os.write(descriptor, json.dumps(asdict(_maker(os.getpid()))).encode())
            unique = fresh.name.removeprefix(_NEW_PREFIX)
            # Only now may others judge it: it has its lock.
            return fresh.rename(directory / f"{RUN_PREFIX}{os.getpid()}-{unique}"), descriptor
        except BaseException:
            os.close(descriptor)
            raise
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def remove_stale_folders(directory: str | os.PathLike[str]) -> list[Path]:
    """Remove what processes of this machine that are gone left in `directory`.

    Only folders with a lock of this host that no process holds are touched.

    Returns:
        The folders removed.
    """
    removed = []
    for path in sorted(Path(directory).glob(f"{RUN_PREFIX}*")):
        if _is_stale(path):
            shutil.rmtree(path, ignore_errors=True)  # another process may be at it too
            if not path.exists():
                removed.append(path)
    return removed


def _is_stale(path: Path) -> bool:
    try:
        descriptor = os.open(path / LOCK_NAME, os.O_RDWR)
    except OSError:
        return False  # just removed by its owner, or another user's, or not ours
    try:
        maker = _Maker(**json.loads(os.read(descriptor, 1 << 16)))
        here = _maker(os.getpid())
        if maker.host != here.host:
            return False
        same_numbers = (maker.boot, maker.namespace) == (here.boot, here.namespace)
        if same_numbers and _maker(maker.pid).started == maker.started:
            return False
        held = _try_lock(descriptor)
        return same_numbers if held is None else held
    except (OSError, ValueError, TypeError):
        return False
    finally:
        os.close(descriptor)


def _maker(pid: int) -> _Maker:
    return _Maker(socket.gethostname(), _boot(), _namespace(), pid, _start_of(pid))


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _start_of(pid: int) -> str:
    """When a process was started, empty when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()
        # Clock ticks since the machine was started; a zombie is a process that has ended.
        return "" if fields[0] in "ZX" else fields[19]
    except (FileNotFoundError, ProcessLookupError):
        pass
    try:
        return f"{psutil.Process(pid).create_time():.0f}"
    except psutil.NoSuchProcess:
        return ""


def _try_lock(descriptor: int) -> bool | None:
    """Take the lock if nobody has it; None where the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        return None
    return True
