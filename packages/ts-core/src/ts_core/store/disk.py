"""Images in files: a folder per run, files written whole and read with large reads.

    directory/
        trainstream-run-1234-x7f2/     made by process 1234; removed at its end
            lock.json                  who made it: host, process id, start of the process
            block-0003.bin

A folder whose maker is gone (killed, or the machine was switched off) is removed when the next run
starts in the same directory. Files are mapped shared: what is written through the mapping is in
the file. Reads for the device do not go through the mapping, whose page faults are small and whose
errors would kill the process, but through `pread` on a few threads.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import psutil
import torch

from ts_core.errors import DataError, NotAvailableError, OptionError, OutOfBudgetError
from ts_core.store.run_folders import make_locked_folder, remove_stale_folders

READ_BYTES = 8 << 20
READ_THREADS = 4
_WRITE_BYTES = 16 << 20
_NO_ROOM = (
    "The model is unchanged. Free room there, name a directory on a larger disk, or quantize the "
    "frozen weights."
)


def usable_directory(directory: str | os.PathLike[str]) -> Path:
    """The directory, made when it does not exist.

    Raises:
        OptionError: it cannot be made, or not written to.
        NotAvailableError: the system has no positioned reads (Windows).
    """
    if not hasattr(os, "preadv"):
        raise NotAvailableError("disk_offload needs os.preadv, which this system lacks.")
    place = Path(directory).expanduser()
    try:
        place.mkdir(parents=True, exist_ok=True)
        if not os.access(place, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
    except OSError as error:
        raise _unusable(directory, error) from error
    return place


class DiskFolder:
    """A folder of this process in `directory`, for files that outlive nothing.

    It is removed by `close()`, when the object and its files go, and when the process ends. Folders
    that dead processes of this machine left in `directory` are removed first.

    Args:
        directory: made when it does not exist.

    Attributes:
        path: the folder.
        removed: folders of dead processes that were removed.
        readers: threads that read from it.
        in_memory: whether the file system is one in RAM (tmpfs).

    Raises:
        OptionError: the directory cannot be made or written to.
        NotAvailableError: the system has no positioned reads (Windows).
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        place = usable_directory(directory)
        try:
            self.removed = remove_stale_folders(place)
            self.path, lock = make_locked_folder(place)
        except OSError as error:
            raise _unusable(directory, error) from error
        self.in_memory = _in_memory(self.path)
        self.readers = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="trainstream-disk")
        self._remove = weakref.finalize(
            self, _remove_own, self.path, os.getpid(), lock, self.readers
        )

    def check_room(self, size_bytes: int) -> None:
        """Refuse before anything is written when the disk lacks room for `size_bytes`.

        Raises:
            OutOfBudgetError: it does; by how much.
        """
        free_bytes = shutil.disk_usage(self.path).free
        if size_bytes > free_bytes:
            raise OutOfBudgetError(
                f"disk_offload: {self.path.parent} has {free_bytes} bytes free and "
                f"{size_bytes} are needed, {size_bytes - free_bytes} more. {_NO_ROOM}"
            )

    def write(self, name: str, parts: Iterable[torch.Tensor], size_bytes: int) -> DiskFile:
        """A new file of `size_bytes` with the bytes of `parts`, one after the other.

        Room is taken for the whole file first, and the file is on the disk when this returns.

        Args:
            name: of the file.
            parts: uint8 CPU tensors, contiguous; shorter than `size_bytes` in all leaves zeros.

        Raises:
            OutOfBudgetError: the disk is full, or a quota is.
            DataError: the disk cannot be written to.
        """
        path = self.path / name
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise _write_error(error, path, size_bytes) from error
        try:
            _take_room(descriptor, size_bytes)
            offset = 0
            for part in parts:
                _write_exactly(descriptor, part, offset)
                offset += part.numel()
            os.fsync(descriptor)
            return DiskFile(self, path, descriptor, size_bytes)
        except BaseException as error:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise _write_error(error, path, size_bytes) from error
            raise

    def close(self) -> None:
        """Remove the folder. Files that are open can still be read; their room is free later."""
        self._remove()


class DiskFile:
    """One file of a `DiskFolder`, open and mapped.

    Attributes:
        path: where it was made.
        buffer_h: uint8 [size_bytes], the file's bytes, mapped: reads and writes go to the file.
        loaded_bytes: bytes that whole loads have brought to a device so far.
    """

    def __init__(self, folder: DiskFolder, path: Path, descriptor: int, size_bytes: int) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.loaded_bytes = 0
        self._descriptor = descriptor
        self._folder = folder  # which is not removed before
        mapping = mmap.mmap(descriptor, size_bytes)  # shared, with a descriptor of its own
        self.buffer_h = torch.frombuffer(mapping, dtype=torch.uint8)
        self._mapping = weakref.ref(mapping)
        weakref.finalize(self, os.close, descriptor)

    def start(self, target_h: torch.Tensor, offset: int) -> Sequence[Future[None]]:
        """Begin to read the bytes from `offset` on into `target_h`, on several threads.

        The futures raise DataError: an error of the disk, or the file has become shorter.
        """
        size_bytes = target_h.numel()
        return [
            self._folder.readers.submit(
                self._read, target_h[first : first + READ_BYTES], offset + first
            )
            for first in range(0, size_bytes, READ_BYTES)
        ]

    def remove(self) -> None:
        """Remove its name; what is in it stays readable until nobody has it open or mapped."""
        self.path.unlink(missing_ok=True)

    def flush(self) -> None:
        """Write back what was written through the mapping.

        Raises:
            DataError: the disk refused it.
        """
        mapping = self._mapping()
        if mapping is not None:
            try:
                mapping.flush()
            except OSError as error:
                raise DataError(
                    f"weights that were changed cannot be written to {self.path}: {error}. They "
                    f"are in memory still: save the model to another disk."
                ) from error

    def _read(self, target_h: torch.Tensor, offset: int) -> None:
        try:
            _read_exactly(self._descriptor, target_h, offset)
        except OSError as error:
            raise DataError(
                f"weights cannot be read from {self.path}: {error}. Check the disk; training can "
                f"go on from the last checkpoint, with disk_offload on another disk."
            ) from error


def _unusable(directory: str | os.PathLike[str], error: OSError) -> OptionError:
    return OptionError(
        f"disk_offload={str(directory)!r} cannot be used: {error}. Name a directory that can be "
        f"written to, on a local disk."
    )


def _remove_own(path: Path, owner: int, lock: int, readers: ThreadPoolExecutor) -> None:
    if os.getpid() == owner:  # not in a child of fork()
        readers.shutdown(wait=False)
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _take_room(descriptor: int, size_bytes: int) -> None:
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
    os.ftruncate(descriptor, size_bytes)  # a full disk shows while the bytes are written


def _write_exactly(descriptor: int, part: torch.Tensor, offset: int) -> None:
    view = _memory(part)
    written = 0
    while written < len(view):
        written += os.pwrite(descriptor, view[written : written + _WRITE_BYTES], offset + written)


def _read_exactly(descriptor: int, target_h: torch.Tensor, offset: int) -> None:
    view = _memory(target_h)
    filled = 0
    while filled < len(view):
        count = os.preadv(descriptor, [view[filled:]], offset + filled)
        if count == 0:
            raise OSError(
                errno.EIO,
                f"the file ends {len(view) - filled} bytes before what was written to it",
            )
        filled += count


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous uint8 CPU tensor, which the caller keeps alive."""
    return memoryview((ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr())).cast("B")


def _in_memory(path: Path) -> bool:
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    places = (str(place) for place in [path, *path.parents])
    return next((mounts[place] for place in places if place in mounts), "") in ("tmpfs", "ramfs")


def _write_error(error: OSError, path: Path, size_bytes: int) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        try:
            free_bytes = shutil.disk_usage(path.parent).free
        except OSError:
            free_bytes = 0
        return OutOfBudgetError(
            f"disk_offload: {path.parent.parent} is full: a block needs {size_bytes} bytes and "
            f"{free_bytes} are free ({error.strerror}). {_NO_ROOM}"
        )
    return DataError(
        f"disk_offload: {path} cannot be written: {error}. The model is unchanged. Name a "
        f"directory on another disk."
    )
