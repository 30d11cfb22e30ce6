"""Preference pairs as rows of training; what is wrong with them, by line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ts_core.errors import DataError
from ts_hf.cli.pairs import PairCollator, prepare_pairs, with_reference
from ts_hf.cli.rows import IGNORED, Rows
from ts_hf.cli.sources import read_documents
from ts_hf.testing.letters import Letters, learned_of, text_of


def _jsonl(file: Path, *records: Any) -> str:
    lines = [r if isinstance(r, str) else json.dumps(r, ensure_ascii=False) for r in records]
    file.write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    return str(file)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "a"}', r"method=dpo expects 'prompt', 'chosen' and 'rejected'; found the keys"),
        ('{"prompt": "p", "chosen": "a", "rejected": "a"}', "are the same"),
        ('{"prompt": "p", "chosen": "a", "rejected": ""}', "'rejected' is empty"),
        ('{"chosen": "a", "rejected": "b"}', "there is no 'prompt'"),
        (
            '{"chosen": [{"role": "user", "content": "a"}], '
            '"rejected": [{"role": "user", "content": "b"}]}',
            "share no message",
        ),
    ],
)
def test_broken_pairs_are_named_by_line(line: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "p", "chosen": "a", "rejected": "b"}\n' + line + "\n")
    with pytest.raises(DataError, match=f"line 2: .*{words}"):
        read_documents([str(file)], pairs=True)


def _pairs(tmp_path: Path, *records: Any, seq_length: int = 60) -> Rows:
    documents = read_documents([_jsonl(tmp_path / "pairs.jsonl", *records)], pairs=True)
    return prepare_pairs(documents, Letters(), seq_length=seq_length, wanted=50)


def _side(row: dict[str, torch.Tensor], side: str) -> tuple[str, str]:
    """(text, what counts of it)."""
    plain = {"input_ids": row[f"{side}_input_ids"], "labels": row[f"{side}_labels"]}
    return text_of(plain), learned_of(plain)


def test_pairs_of_texts_and_of_messages(tmp_path: Path) -> None:
    user, good, bad = (
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "good"},
        {"role": "assistant", "content": "bad"},
    )
    rows = _pairs(
        tmp_path,
        {"prompt": "p:", "chosen": "yes", "rejected": "no"},
        {"prompt": [user], "chosen": [good], "rejected": [bad]},
        {"chosen": [user, good], "rejected": [user, bad]},
    )
    assert _side(rows.items[0], "chosen") == ("p:yes\0", "yes\0")
    assert _side(rows.items[0], "rejected") == ("p:no\0", "no\0")
    for row in rows.items[1:]:
        assert _side(row, "chosen") == ("<user>q|\n<assistant>good|\n", "good|\n")
        assert _side(row, "rejected") == ("<user>q|\n<assistant>bad|\n", "bad|\n")
    assert "".join(map(chr, rows.openings[1])) == "<user>q|\n<assistant>"


def test_pairs_that_are_cut_or_left_out_are_counted(tmp_path: Path) -> None:
    rows = _pairs(
        tmp_path,
        {"prompt": "0123456789", "chosen": "a", "rejected": "b"},
        {"prompt": "012345678", "chosen": "ab", "rejected": "b"},
        seq_length=10,
    )
    assert [_side(row, "chosen") for row in rows.items] == [("012345678a", "a")]
    assert rows.notes == (
        "answers of 1 of 1 pairs are cut off at 10 tokens",
        "1 pairs are left out: their prompt alone has 10 tokens",
    )
    with pytest.raises(DataError, match="no pair whose prompt is shorter than seq_length=4"):
        _pairs(tmp_path, {"prompt": "0123", "chosen": "a", "rejected": "b"}, seq_length=4)


def test_batches_of_pairs(tmp_path: Path) -> None:
    rows = _pairs(
        tmp_path,
        {"prompt": "a", "chosen": "1", "rejected": "22"},
        {"prompt": "b", "chosen": "333", "rejected": "4"},
    )
    rows = with_reference(rows, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    batch = PairCollator(9)(rows.items)
    texts = [
        "".join(map(chr, ids[: mask.sum()]))
        for ids, mask in zip(batch["input_ids"].tolist(), batch["attention_mask"], strict=True)
    ]
    assert texts == ["a1\0", "b333\0", "a22\0", "b4\0"]
    assert batch["reference"].tolist() == [1.0, 3.0, 2.0, 4.0]
    assert batch["labels"][0].tolist() == [IGNORED, ord("1"), 0, IGNORED, IGNORED]
