"""Write a folder all or nothing: aside first, then renamed into place.

Names: the folder being written is `.partial-NAME-XXXX` beside the final `NAME`; a previous `NAME`
is renamed to `.replaced-NAME` for the instant of the exchange. Neither begins with the prefix that
any reader of checkpoints looks for, so a process killed at any point leaves either the old folder
or the new one, and leftovers that `clean_leftovers` removes.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ts_core.errors import TrainStreamError

_FULL = 1 << 20  # bytes; less than that is free on a disk that a write has just filled
PARTIAL, REPLACED = ".partial-", ".replaced-"


@contextmanager
def atomic_directory(target: Path) -> Iterator[Path]:
    """Yields an empty folder beside `target`; renames it to `target` when the block succeeds.

    When the block raises, the folder is removed and `target` is untouched. An existing `target`
    is replaced. File contents reach the disk before the rename (fsync). Who may read and write a
    file is what the umask says, also of one that a library made for its owner alone (safetensors).

    Raises:
        OSError: ENOSPC where the disk is full, whatever the library that wrote raised at it.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f"{PARTIAL}{target.name}-", dir=target.parent))
    mask = _umask()  # once: asking for it sets it for a moment
    aside.chmod(0o777 & ~mask)
    try:
        yield aside
        for path in aside.rglob("*"):
            path.chmod(path.stat().st_mode | (0o666 & ~mask))
            _sync(path)
        _sync(aside)
    except BaseException as error:
        full = _is_full(target.parent, error)
        shutil.rmtree(aside, ignore_errors=True)
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target)) from error
        raise
    replaced = target.parent / f"{REPLACED}{target.name}"
    if target.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        os.replace(target, replaced)
    os.replace(aside, target)
    shutil.rmtree(replaced, ignore_errors=True)
    _sync(target.parent)


def clean_leftovers(parent: Path) -> list[str]:
    """Tidy up after a process that was killed while writing in `parent`.

    A folder that was complete and only missed its second rename is put back; half-written ones are
    removed. Call it only when no other process writes there.

    Returns:
        What was done, one sentence per folder.
    """
    done: list[str] = []
    if not parent.is_dir():
        return done
    for path in sorted(parent.iterdir()):
        if path.name.startswith(REPLACED) and path.is_dir():
            target = parent / path.name[len(REPLACED) :]
            if target.exists():
                shutil.rmtree(path)
                done.append(f"removed {path.name}, already replaced by {target.name}")
            else:
                os.replace(path, target)
                done.append(f"put {target.name} back")
        elif path.name.startswith(PARTIAL) and path.is_dir():
            shutil.rmtree(path)
            done.append(f"removed the half-written {path.name}")
    return done


def _is_full(folder: Path, error: BaseException) -> bool:
    """Whether `error`, of a library that does not raise OSError, came from a full disk."""
    if not isinstance(error, Exception) or isinstance(error, (OSError, TrainStreamError)):
        return False
    return os.strerror(errno.ENOSPC) in str(error) or shutil.disk_usage(folder).free < _FULL


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync(path: Path) -> None:
    if os.name != "posix":  # a folder cannot be opened there, and rename is the best there is
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
