"""Which files are data: given twice, those of runs, hidden ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from ts_hf.cli.sources import overlaps, read_documents


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(2):
        (folder / f"{index}.txt").write_text("AB"[index] * 100)
    return folder


def test_files_given_more_than_once_are_named(texts: Path, tmp_path: Path) -> None:
    folder = texts
    (folder / "2.txt").write_text("C" * 100)
    one, two, other = (str(folder / f"{index}.txt") for index in range(3))
    (tmp_path / "link.txt").symlink_to(two)
    assert overlaps([one, two]) == [] and overlaps([one], other) == []
    (told,) = overlaps([one, one, two])
    assert told.startswith(f"{Path(one).resolve()} is given more than once")
    (told,) = overlaps([str(folder), one, str(tmp_path / "link.txt")])
    assert "0.txt and 1 more are given more than once" in told
    assert "given more than once" in overlaps(["stdlib", "stdlib"])[0]
    (told,) = overlaps([str(folder)], two)
    assert "1.txt is both trained on and held out" in told
    assert len(read_documents([one, one])) == 2  # it is said, and done as asked


def test_runs_and_hidden_files_in_a_folder_are_no_data(texts: Path) -> None:
    folder = texts
    for name in ("finetune-run/adapter", ".venv/lib"):
        (folder / name).mkdir(parents=True)
        (folder / name / "README.md").write_text("not a text to learn")
    (folder / "finetune-run" / "history.jsonl").write_text('{"kind": "session"}\n')
    (folder / "finetune-run" / "run.lock").touch()
    (folder / ".notes.txt").write_text("hidden")
    (folder / "more").mkdir()
    (folder / "more" / "2.txt").write_text("C")
    names = [document.name for document in read_documents([str(folder)])]
    assert names == ["0.txt", "1.txt", "more/2.txt"]
