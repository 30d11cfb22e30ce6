"""Text and JSON lines into rows, with a part held out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ts_core.errors import DataError
from ts_hf.cli.data import (
    IGNORED,
    PadCollator,
    prepare_rows,
    read_documents,
    split_documents,
)


class Letters:
    """One token per character; 0 ends a text."""

    eos_token_id = 0
    pad_token_id = 0
    chat_template = "made by hand"

    def __call__(self, text: str, **kwargs: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def apply_chat_template(self, messages: Any, tokenize: bool) -> str:
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)


def _text(row: dict[str, torch.Tensor]) -> str:
    return "".join(chr(token) for token in row["input_ids"])


def _folder(tmp_path: Path, count: int, length: int = 100) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(count):
        letter = chr(ord("A") + index)
        (folder / f"{index}.txt").write_text(letter * length)
    return folder


def _rows(sources: list[str], **changes: Any) -> Any:
    options = {"seq_length": 10, "train_rows": 50, "eval_rows": 8, **changes}
    held_out = options.pop("held_out", None)
    return prepare_rows(sources, held_out, Letters(), **options)


def test_documents_are_held_out_whole(tmp_path: Path) -> None:
    train, held = _rows([str(_folder(tmp_path, 40))])
    assert len(train) == 50 and len(held) == 8
    assert train.tokens == 500
    letters = {c for row in train.items for c in _text(row)} - {"\0"}
    others = {c for row in held.items for c in _text(row)} - {"\0"}
    assert letters and others and not letters & others
    for row in (*train.items, *held.items):
        assert torch.equal(row["input_ids"], row["labels"])


def test_rows_come_from_many_documents(tmp_path: Path) -> None:
    train, held = _rows([str(_folder(tmp_path, 60, length=4000))], train_rows=20, eval_rows=4)
    assert len({_text(row)[0] for row in held.items}) == 4  # a row per document, not four of one
    assert len({_text(row)[0] for row in train.items}) >= 4


def test_second_pass_uses_what_the_first_left(tmp_path: Path) -> None:
    """More rows wanted than the excerpts give: all of the text is used, none of it twice."""
    folder = tmp_path / "t"
    folder.mkdir()
    text = "".join(f"{number:06d}\n" for number in range(400))
    (folder / "a.txt").write_text(text)
    train, held = _rows([str(folder)], seq_length=7, train_rows=10_000, eval_rows=10_000)
    lines = [_text(row) for row in (*train.items, *held.items)]
    whole = "".join(lines).replace("\0", "")
    numbers = [n for n in whole.split("\n") if len(n) == 6]
    assert len(set(numbers)) == len(numbers) > 380


def test_few_texts_hold_out_their_tails(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 900 + "y" * 100)
    train, held = _rows([str(tmp_path / "a.txt")])
    assert "y" not in "".join(_text(row) for row in train.items)
    assert "x" not in "".join(_text(row) for row in held.items)


def test_held_out_path(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 300)
    (tmp_path / "b.txt").write_text("y" * 300)
    train, held = _rows([str(tmp_path / "a.txt")], held_out=str(tmp_path / "b.txt"))
    assert {_text(row).strip("\0")[0] for row in train.items} == {"x"}
    assert {_text(row).strip("\0")[0] for row in held.items} == {"y"}


def test_same_rows_every_time_and_fingerprint(tmp_path: Path) -> None:
    folder = _folder(tmp_path, 30)
    marks = []
    for content in (None, None, "changed " * 20):
        if content is not None:
            (folder / "3.txt").write_text(content)
        train, held = _rows([str(folder)], train_rows=10_000, eval_rows=10_000)
        marks.append((train.fingerprint(), held.fingerprint()))
    assert marks[0] == marks[1] != marks[2]


def test_standard_library() -> None:
    documents = read_documents(["stdlib"])
    names = {document.name for document in documents}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not any(name.startswith(("test/", "encodings/", "site-packages/")) for name in names)
    train, held = split_documents(documents)
    assert 0.05 < len(held) / len(documents) < 0.16
    assert not {d.name for d in train} & {d.name for d in held}


def test_records(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    records = [
        {"text": "plain"},
        {"prompt": "ab", "completion": "cde"},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"prompt": "longer than the row", "completion": "x"},
    ]
    file.write_text("\n".join(json.dumps(record) for record in records) + "\n\n")
    documents = read_documents([str(file)])
    assert [d.name for d in documents] == [f"data.jsonl:{n}" for n in (1, 2, 3, 4)]
    held = tmp_path / "held.txt"
    held.write_text("z" * 30)
    train, _ = _rows([str(file)], held_out=str(held))
    by_text = {_text(row): row for row in train.items}
    # The prompt counts for nothing, the completion and the end do.
    row = by_text["abcde\0"]
    assert row["labels"].tolist() == [IGNORED, IGNORED, ord("c"), ord("d"), ord("e"), 0]
    assert "<user>hi" in by_text
    assert "longer than"[:10] not in by_text  # nothing of its completion is left in the row


def test_messages_need_a_chat_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Letters, "chat_template", None)
    file = tmp_path / "data.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    with pytest.raises(DataError, match="no chat template"):
        _rows([str(file)], held_out=str(file))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "a"', "line 2: not valid JSON"),
        ("[1, 2]", "line 2: expected a JSON object, found a list"),
        ('{"txt": "a"}', r"line 2: expected 'text', 'messages'.*found the keys \['txt'\]"),
        ('{"text": "  "}', "line 2: expected 'text' with a text that is not empty"),
        ('{"text": 3}', "line 2: expected 'text'"),
        ('{"messages": []}', "line 2: expected 'messages', a list"),
        ('{"messages": [{"role": "user"}]}', "line 2: expected 'messages', a list"),
        ('{"prompt": "a", "completion": ""}', "line 2: expected 'prompt' and 'completion'"),
    ],
)
def test_broken_records_are_named_by_line(line: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=words) as caught:
        read_documents([str(file)])
    assert str(file) in str(caught.value)


def test_sources_that_are_not_usable(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no file or folder '/no/such'"):
        read_documents(["/no/such"])
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "picture.png").write_bytes(b"\x89PNG")
    with pytest.raises(DataError, match="holds no text"):
        read_documents([str(tmp_path / "empty")])
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"latin\.txt is not UTF-8 text \(byte 3"):
        read_documents([str(tmp_path / "latin.txt")])
    (tmp_path / "short.txt").write_text("ab")
    with pytest.raises(DataError, match="less than one row of 10"):
        _rows([str(tmp_path / "short.txt")])


def test_collator_pads_to_the_longest() -> None:
    rows = [
        {"input_ids": torch.tensor([1, 2, 3]), "labels": torch.tensor([1, 2, 3])},
        {"input_ids": torch.tensor([4]), "labels": torch.tensor([4])},
    ]
    batch = PadCollator(9)(rows)
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 9, 9]]
    assert batch["labels"].tolist() == [[1, 2, 3], [4, IGNORED, IGNORED]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert "attention_mask" not in PadCollator(9)(rows[:1])
