"""Pairs of answers into rows, and batches of them, for preference training (DPO)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ts_core.errors import DataError
from ts_hf.cli.chat import encode, split_answer
from ts_hf.cli.problems import Problems, RecordError
from ts_hf.cli.records import Pair
from ts_hf.cli.rows import IGNORED, OPENINGS, PadCollator, Rows, no_documents
from ts_hf.cli.sources import Document

SIDES = ("chosen", "rejected")


def prepare_pairs(
    documents: Sequence[Document],
    tokenizer: Any,
    *,
    seq_length: int,
    wanted: int,
    what: str = "to train on",
    problems: Problems | None = None,
) -> Rows:
    """At most `wanted` pairs.

    Args:
        documents: with Pair records, in the order to take them.
        tokenizer: a transformers tokenizer.
        seq_length: tokens of prompt and answer together, at most; answers are cut off there.
        wanted: pairs that will be read.
        what: what they are for, for the message.
        problems: as for `prepare_rows`.

    Returns:
        Rows with chosen_input_ids, chosen_labels, rejected_input_ids and rejected_labels: 1-d
        int64; labels are -100 over the prompt.

    Raises:
        DataError: no pair; records that the chat template refuses, by file and line.
    """
    items: list[dict[str, Tensor]] = []
    openings: list[list[int]] = []
    noted = problems or Problems()
    cut = left_out = read = 0
    for document in documents:
        if len(items) >= wanted:
            break
        read += 1
        assert isinstance(document.record, Pair)
        try:
            prompt, answers = _tokens(document.record, tokenizer)
        except RecordError as error:
            noted.add(document.place, str(error), document.number)
            continue
        if len(prompt) >= seq_length:
            left_out += 1
            continue
        item: dict[str, Tensor] = {}
        for side, answer in zip(SIDES, answers, strict=True):
            ids = torch.tensor([*prompt, *answer][:seq_length], dtype=torch.int64)
            labels = ids.clone()
            labels[: max(1, len(prompt))] = IGNORED  # nothing predicts the first token
            item[f"{side}_input_ids"], item[f"{side}_labels"] = ids, labels
        cut += any(len(prompt) + len(answer) > seq_length for answer in answers)
        items.append(item)
        if len(openings) < OPENINGS:
            openings.append(prompt)
    if problems is None or not items:
        noted.raise_any()
    if not documents:
        raise DataError(no_documents(what))
    if not items:
        raise DataError(
            f"the data {what} has no pair whose prompt is shorter than seq_length={seq_length} "
            f"tokens, in {len(documents)} record(s). Give more data, or a larger seq_length."
        )
    notes = []
    if cut:
        notes.append(f"answers of {cut} of {len(items)} pairs are cut off at {seq_length} tokens")
    if left_out:
        notes.append(f"{left_out} pairs are left out: their prompt alone has {seq_length} tokens")
    of = len(items) + len(documents) - read
    return Rows(tuple(items), tuple(openings), tuple(notes), of=of if of > len(items) else None)


def _tokens(pair: Pair, tokenizer: Any) -> tuple[list[int], list[list[int]]]:
    """(tokens of the prompt, tokens of both answers)."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if isinstance(pair.prompt, list):
        texts = []
        for answer in (pair.chosen, pair.rejected):
            assert isinstance(answer, list)
            texts.append(split_answer(tokenizer, pair.prompt, answer))
        (before, chosen), (other, rejected) = texts
        if before != other:
            raise RecordError("the chat template shows the prompt differently for the two answers")
        answers = [encode(tokenizer, chosen), encode(tokenizer, rejected)]
    else:
        before = pair.prompt
        answers = [
            [*encode(tokenizer, str(answer)), *end] for answer in (pair.chosen, pair.rejected)
        ]
    return encode(tokenizer, before), answers


class PairCollator:
    """Batches of pairs: the chosen sequences [B, T], below them the rejected ones.

    The batch has input_ids, labels and attention_mask [2B, T] and, where the rows have it,
    `reference` [2B] float32.
    """

    def __init__(self, pad_id: int) -> None:
        self._pad = PadCollator(pad_id)

    def __call__(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        sequences = [
            {"input_ids": row[f"{side}_input_ids"], "labels": row[f"{side}_labels"]}
            for side in SIDES
            for row in rows
        ]
        batch = self._pad(sequences)
        batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
        if all("reference" in row for row in rows):
            batch["reference"] = torch.stack([row["reference"] for row in rows], dim=1).reshape(-1)
        return batch


def with_reference(rows: Rows, reference: Tensor) -> Rows:
    """`rows` with what the reference model gives: [N, 2] float32, chosen and rejected."""
    items = tuple(
        {**item, "reference": values} for item, values in zip(rows.items, reference, strict=True)
    )
    return dataclasses.replace(rows, items=items)


def batches(rows: Rows, size: int, pad_id: int) -> Iterator[dict[str, Tensor]]:
    """The pairs in order, `size` at a time."""
    collate = PairCollator(pad_id)
    for begin in range(0, len(rows), size):
        yield collate(rows.items[begin : begin + size])
