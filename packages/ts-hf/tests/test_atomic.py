"""Folders are written all or nothing."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from ts_core.errors import DataError
from ts_hf.checkpoints import atomic
from ts_hf.checkpoints.atomic import atomic_directory, clean_leftovers


def _content(folder: Path) -> dict[str, str]:
    return {p.name: p.read_text() for p in folder.iterdir()}


def test_new_and_replaced(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "thing"
    for text in ("one", "two"):
        with atomic_directory(target) as aside:
            assert aside != target
            (aside / f"{text}.txt").write_text(text)
            assert not (target / f"{text}.txt").exists()
    assert _content(target) == {"two.txt": "two"}
    assert [p.name for p in target.parent.iterdir()] == ["thing"]


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX systems")
def test_files_made_for_their_owner_alone_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with atomic_directory(tmp_path / "new") as aside:
            os.close(os.open(aside / "weights", os.O_CREAT | os.O_WRONLY, 0o600))
    finally:
        os.umask(before)
    assert (tmp_path / "new" / "weights").stat().st_mode & 0o777 == 0o640


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "thing"
    with atomic_directory(target) as aside:
        (aside / "a").write_text("kept")
    with pytest.raises(RuntimeError, match="boom"), atomic_directory(target) as aside:
        (aside / "b").write_text("half")
        raise RuntimeError("boom")
    assert _content(target) == {"a": "kept"}
    assert [p.name for p in tmp_path.iterdir()] == ["thing"]


def test_a_full_disk_is_told_as_such_whatever_the_library_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "thing"
    with pytest.raises(OSError, match="No space left") as caught, atomic_directory(target):
        raise RuntimeError("I/O error: No space left on device (os error 28)")
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(target))
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    with pytest.raises(OSError, match="No space left"), atomic_directory(target):
        raise RuntimeError("file write failed")
    with pytest.raises(DataError, match="other"), atomic_directory(target):
        raise DataError("other")
    assert list(tmp_path.iterdir()) == []


def test_killed_while_writing(tmp_path: Path) -> None:
    (tmp_path / ".partial-checkpoint-9-abc").mkdir()
    (tmp_path / ".partial-checkpoint-9-abc" / "half").write_text("x")
    (tmp_path / "checkpoint-6").mkdir()
    assert clean_leftovers(tmp_path) == ["removed the half-written .partial-checkpoint-9-abc"]
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-6"]
    assert clean_leftovers(tmp_path / "nowhere") == []


def test_killed_between_the_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "thing"
    with atomic_directory(target) as aside:
        (aside / "a").write_text("old")
    real, calls = atomic.os.replace, []

    def dies_at_the_second(source: Path, destination: Path) -> None:
        calls.append(destination)
        if len(calls) == 2:
            raise KeyboardInterrupt
        real(source, destination)

    monkeypatch.setattr(atomic.os, "replace", dies_at_the_second)
    with pytest.raises(KeyboardInterrupt), atomic_directory(target) as aside:
        (aside / "a").write_text("new")
    monkeypatch.undo()
    assert not target.exists()
    assert "put thing back" in clean_leftovers(tmp_path)
    assert _content(target) == {"a": "old"}
    assert [p.name for p in tmp_path.iterdir()] == ["thing"]


def test_killed_before_the_old_one_is_removed(tmp_path: Path) -> None:
    for name in ("thing", ".replaced-thing"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a").write_text(name)
    clean_leftovers(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thing"]
    assert _content(tmp_path / "thing") == {"a": "thing"}
