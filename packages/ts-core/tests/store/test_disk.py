"""Files of weights: exact, refused when the disk is full, clear when it fails."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ts_core.errors import DataError, OptionError, OutOfBudgetError
from ts_core.store import disk
from ts_core.store.disk import DiskFile, DiskFolder, usable_directory

Numbers = Callable[[int, int], torch.Tensor]


def read(file: DiskFile, offset: int, size: int) -> torch.Tensor:
    target = torch.zeros(size, dtype=torch.uint8)
    for future in file.start(target, offset):
        future.result()
    return target


def test_written_read_and_mapped(
    tmp_path: Path, numbers: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "READ_BYTES", 700)
    monkeypatch.setattr(disk, "_WRITE_BYTES", 300)
    folder = DiskFolder(tmp_path / "new" / "place")
    data = numbers(0, 10_000)
    file = folder.write("a.bin", [data[:1], data[1:4000], data[4000:]], 10_000)
    assert torch.equal(file.buffer_h, data)
    assert torch.equal(read(file, 0, 10_000), data)
    assert torch.equal(read(file, 1234, 5000), data[1234:6234])
    file.buffer_h[77:80] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    file.flush()
    data[77:80] = file.buffer_h[77:80]
    assert torch.equal(read(file, 0, 10_000), data)
    assert torch.frombuffer(bytearray(file.path.read_bytes()), dtype=torch.uint8).equal(data)
    folder.close()
    assert not folder.path.exists() and torch.equal(file.buffer_h, data)


def test_descriptors_go_with_their_files(
    tmp_path: Path, numbers: Numbers, open_files: Callable[[], list[str]]
) -> None:
    folder = DiskFolder(tmp_path)
    files = [folder.write(f"{k}.bin", [numbers(k, 5000)], 5000) for k in range(3)]
    assert [file for file in open_files() if file.startswith(str(tmp_path))]
    del files, folder
    gc.collect()
    assert not [file for file in open_files() if file.startswith(str(tmp_path))]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync"])
def test_a_full_disk_is_refused_and_leaves_nothing(
    tmp_path: Path, numbers: Numbers, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    folder = DiskFolder(tmp_path)

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OutOfBudgetError, match=r"5000 bytes and \d+ are free.*larger disk"):
        folder.write("a.bin", [numbers(0, 5000)], 5000)
    monkeypatch.undo()
    assert not (folder.path / "a.bin").exists()
    assert folder.write("a.bin", [numbers(0, 5000)], 5000).size_bytes == 5000


def test_room_is_checked_beforehand(tmp_path: Path) -> None:
    with pytest.raises(OutOfBudgetError, match="bytes free and 1152921504606846976 are needed"):
        DiskFolder(tmp_path).check_room(1 << 60)


def test_an_error_of_the_disk_while_writing(
    tmp_path: Path, numbers: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = DiskFolder(tmp_path)

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(DataError, match=r"a\.bin cannot be written.*unchanged"):
        folder.write("a.bin", [numbers(0, 5000)], 5000)


def test_a_file_system_that_cannot_take_room_beforehand(
    tmp_path: Path, numbers: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    file = DiskFolder(tmp_path).write("a.bin", [numbers(0, 5000)], 5000)
    assert torch.equal(file.buffer_h, numbers(0, 5000))


def test_short_writes_go_on(
    tmp_path: Path, numbers: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: whole(fd, data[:999], at))
    file = DiskFolder(tmp_path).write("a.bin", [numbers(0, 5000)], 5000)
    assert torch.equal(read(file, 0, 5000), numbers(0, 5000))


def test_short_reads_go_on_and_a_short_file_is_an_error(
    tmp_path: Path, numbers: Numbers, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = DiskFolder(tmp_path).write("a.bin", [numbers(0, 5000)], 5000)
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: whole(fd, [views[0][:999]], at))
    assert torch.equal(read(file, 0, 5000), numbers(0, 5000))
    os.truncate(file.path, 4000)
    with pytest.raises(DataError, match=r"a\.bin: .*ends 1000 bytes before"):
        read(file, 0, 5000)
    monkeypatch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "bad")))
    with pytest.raises(DataError, match=r"cannot be read from .*a\.bin: .*bad"):
        read(file, 0, 100)
    os.truncate(file.path, 5000)


def test_a_file_that_was_removed_is_still_there_for_us(tmp_path: Path, numbers: Numbers) -> None:
    file = DiskFolder(tmp_path).write("a.bin", [numbers(0, 5000)], 5000)
    file.path.unlink()
    assert torch.equal(read(file, 0, 5000), numbers(0, 5000))


def test_an_unusable_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=r"disk_offload='.*file'.*Name a directory"):
        DiskFolder(tmp_path / "file")


def test_a_directory_that_cannot_be_written_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert usable_directory(tmp_path / "a" / "b").is_dir()
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # root may do all
    with pytest.raises(OptionError, match=r"disk_offload='.*/b' cannot be used: .*denied"):
        usable_directory(tmp_path / "a" / "b")
