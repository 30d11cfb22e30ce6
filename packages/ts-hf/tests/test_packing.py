"""Rows of packed sequences: what goes where, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ts_core.errors import DataError, OptionError
from ts_hf.packing import PackedCollator, best_fit, pack_sequences


@given(
    max_len=st.integers(1, 40),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_best_fit_places_everything_once_and_wastes_little(max_len: int, data: Any) -> None:
    lengths = data.draw(st.lists(st.integers(1, max_len), max_size=40))
    rows = best_fit(lengths, max_len)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    filled = [sum(lengths[index] for index in row) for row in rows]
    assert all(0 < total <= max_len for total in filled)
    # No piece would have fitted into an earlier row, so at most one row is half empty.
    assert sum(total * 2 <= max_len for total in filled) <= 1
    assert best_fit(lengths, max_len) == rows


def test_best_fit_takes_the_tightest_row() -> None:
    # 6 and 5 open rows with 4 and 5 places left; the 4 goes where it fits exactly, not first.
    assert best_fit([4, 6, 5], 10) == [[1, 0], [2]]
    assert best_fit([5, 5, 4, 6], 10) == [[3, 2], [0, 1]]
    assert best_fit([], 8) == []


@pytest.mark.parametrize(
    ("lengths", "max_len", "words"),
    [
        ([3, 9], 8, r"lengths\[1\] is 9; expected 1 to max_len=8"),
        ([0], 8, r"lengths\[0\] is 0"),
        ([1], 0, "max_len=0"),
        ([1], True, "max_len=True"),
        ([1], 2.0, "max_len=2.0"),
    ],
)
def test_best_fit_refuses(lengths: list[int], max_len: Any, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        best_fit(lengths, max_len)


def test_rows_by_hand() -> None:
    batch = pack_sequences([[11, 12, 13], [21, 22], [31, 32, 33, 34]], 9, pad_id=7)
    assert batch["input_ids"].tolist() == [[31, 32, 33, 34, 11, 12, 13, 21, 22]]
    assert batch["labels"].tolist() == [[-100, 32, 33, 34, -100, 12, 13, -100, 22]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1]]
    batch = pack_sequences([torch.tensor([1, 2, 3], dtype=torch.int32), [4]], 6, pad_id=7)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 7, 7]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 0]]
    assert all(tensor.dtype == torch.int64 for tensor in batch.values())


def test_long_sequences_are_split_and_labels_kept() -> None:
    batch = pack_sequences([[1, 2, 3, 4, 5], []], 2, labels=[[-100, -100, 3, 4, 5], []])
    rows = sorted(zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True))
    assert rows == [([1, 2], [-100, -100]), ([3, 4], [-100, 4]), ([5, 0], [-100, -100])]
    assert batch["position_ids"].tolist() == [[0, 1], [0, 1], [0, 0]]


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_nothing_is_lost_or_invented(data: Any) -> None:
    max_len = data.draw(st.integers(1, 12))
    lengths = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=8))
    if not sum(lengths):
        return
    total, sequences = 0, []
    for length in lengths:
        sequences.append(list(range(total, total + length)))  # every token is its own number
        total += length
    batch = pack_sequences(sequences, max_len, pad_id=-1)
    ids, labels, positions = (batch[k] for k in ("input_ids", "labels", "position_ids"))
    real = ids != -1
    assert sorted(ids[real].tolist()) == list(range(total))
    assert (labels[~real] == -100).all() and (positions[~real] == 0).all()
    first = real & (positions == 0)
    assert (labels[first] == -100).all()
    assert torch.equal(labels[real & ~first], ids[real & ~first])
    # A position above 0 follows the token before it.
    rows, places = torch.nonzero(real & ~first, as_tuple=True)
    assert torch.equal(ids[rows, places], ids[rows, places - 1] + 1)
    assert torch.equal(positions[rows, places], positions[rows, places - 1] + 1)
    assert first.sum() == sum(-(-length // max_len) for length in lengths)


def test_collator_one_row_and_rows_of_a_length() -> None:
    rows = [
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "attention_mask": [1, 1, 1], "id": "a"},
        {"input_ids": torch.tensor([0, 8, 9, 0]), "attention_mask": torch.tensor([0, 1, 1, 0])},
        {"input_ids": [3, 4], "token_type_ids": [0, 0], "length": 2},
    ]
    batch = PackedCollator()(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 3, 4]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, 9, -100, 4]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    assert batch["use_cache"] is False
    batch = PackedCollator(5, pad_id=1)(rows)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9], [3, 4, 1, 1, 1]]
    assert PackedCollator()([[1, 2], torch.tensor([3])])["input_ids"].tolist() == [[1, 2, 3]]
    assert repr(PackedCollator(5)) == "PackedCollator(max_len=5, pad_id=0)"


@pytest.mark.parametrize(
    ("features", "words"),
    [
        ([], "no tokens"),
        ([[], []], "the 2 sequences given have no tokens"),
        ([{"text": "a"}], "row 0 has no input_ids, but text"),
        ([[1], [[1, 2]]], r"row 1 has shape \(1, 2\); expected \[T\]"),
        ([[0.5, 1.0]], "row 0 has dtype torch.float32; expected integers"),
        ([["a", "b"]], "row 0 is not a row of integers"),
        ([{"input_ids": [1, 2], "labels": [1]}], "2 tokens and 1 labels"),
        ([{"input_ids": [1, 2], "attention_mask": [1]}], r"attention_mask of shape \(1,\)"),
        ([{"input_ids": [1, 2], "weights": [0.5, 1.0]}], "'weights' for each token"),
    ],
)
def test_collator_refuses(features: list[Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        PackedCollator()(features)


def test_sequences_refused() -> None:
    with pytest.raises(DataError, match="1 rows of labels for 2 sequences"):
        pack_sequences([[1], [2]], 4, labels=[[1]])
    with pytest.raises(OptionError, match="max_len=0"):
        PackedCollator(0)
    with pytest.raises(OptionError, match="max_len='8'"):
        pack_sequences([[1]], "8")  # type: ignore[arg-type]
