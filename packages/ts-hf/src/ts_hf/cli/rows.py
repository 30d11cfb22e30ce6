"""Documents into rows of tokens for a Trainer."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ts_core.errors import DataError
from ts_hf.cli.chat import answer_spans, encode, encode_marked, render, split_answer
from ts_hf.cli.problems import Problems, RecordError
from ts_hf.cli.records import Completion, Conversation, Record, Text
from ts_hf.cli.sources import Document, in_order, read_documents, split_documents

IGNORED = -100
_CHARACTERS_PER_TOKEN = 4  # roughly, to cut texts before they are tokenized
OPENINGS = 8  # kept for samples, at most
_OPENING_TOKENS = 32  # of a plain text, for a sample to go on from


@dataclass(frozen=True)
class Rows:
    """Rows for a Trainer: dicts of 1-d int64 tensors, and what was noticed while making them.

    Attributes:
        items: input_ids and labels of equal length; for pairs see `ts_hf.cli.pairs`.
        openings: tokens that a sample can go on from, of the first rows.
        notes: sentences, such as how many records were cut off.
        of: rows that the data would give in all, where not all of them were made.
        estimated: whether `of` is an estimate (what was not tokenized can only be estimated).
    """

    items: tuple[dict[str, Tensor], ...]
    openings: tuple[list[int], ...] = ()
    notes: tuple[str, ...] = ()
    of: int | None = None
    estimated: bool = False

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.items[index]

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(len(value) for item in self.items for value in _ids(item))

    def counted(self) -> str:
        """How many rows, and of how many: "20 of 201"."""
        about = "about " if self.estimated else ""
        return f"{len(self)}" if self.of is None else f"{len(self)} of {about}{self.of:,}"

    def highest_token(self) -> int:
        """The largest token id of all rows."""
        return max(int(value.max()) for item in self.items for value in _ids(item))

    def fingerprint(self) -> str:
        """A hash of every token and label, to recognize changed data on resume."""
        digest = hashlib.sha256()
        for item in self.items:
            for name in sorted(item):
                digest.update(item[name].to(torch.int32).numpy().tobytes())
        return digest.hexdigest()[:16]


def _ids(item: dict[str, Tensor]) -> Iterator[Tensor]:
    return (value for name, value in item.items() if name.endswith("input_ids"))


def split_sources(
    sources: Sequence[str], held_out: str | None, share: float, *, pairs: bool = False
) -> tuple[list[Document], list[Document]]:
    """(training documents, held-out documents), the same on every machine.

    Args:
        sources: paths, or "stdlib".
        held_out: a path to hold out, or None to hold out a share of the documents.
        share: that share.
        pairs: whether the records are pairs (method dpo).

    Raises:
        DataError: nothing usable; records that cannot be used, by file and line.
    """
    documents = in_order(read_documents(sources, pairs=pairs))
    if held_out is not None:
        return documents, in_order(read_documents([held_out], pairs=pairs))
    return split_documents(documents, share)


def prepare_rows(
    documents: Sequence[Document],
    tokenizer: Any,
    *,
    seq_length: int,
    wanted: int,
    share: int,
    assistant_only: bool = False,
    full_rows: bool = False,
    what: str = "to train on",
    problems: Problems | None = None,
) -> Rows:
    """At most `wanted` rows; only as many documents are tokenized as they need.

    Plain text is joined (with an end token after each document) and cut into rows of
    `seq_length`; a record becomes one row, cut off at `seq_length`.

    Args:
        documents: in the order to take them.
        tokenizer: a transformers tokenizer.
        seq_length: tokens per row.
        wanted: rows that will be read; more are not made.
        share: tokens to take of each text in a first pass, so that rows come from many texts.
        assistant_only: of conversations, only the assistant's turns count in the loss.
        full_rows: as many rows as make `wanted` full ones when they are packed.
        what: what the rows are for, for the message.
        problems: gets the records that the chat template refuses, for the caller to raise; None
            raises them here.

    Raises:
        DataError: less than one row; records that the chat template refuses, by file and line.
    """
    maker = _Maker(tokenizer, seq_length, wanted, assistant_only, full_rows, problems)
    maker.make(documents, max(share, seq_length * wanted // max(1, len(documents))))
    if problems is None or not maker.rows:
        maker.problems.raise_any()
    if not maker.rows:
        raise DataError(_too_little(maker, documents, seq_length, what))
    of, estimated = maker.all_rows(documents)
    return Rows(
        tuple(maker.rows), tuple(maker.openings), tuple(maker.notes()), of=of, estimated=estimated
    )


def no_documents(what: str) -> str:
    """What to tell when nothing is left for one side of the split."""
    return (
        f"there is no record {what}: the data has one only, and one is held out. Give more data, "
        f"or name a held_out file."
    )


def _too_little(maker: _Maker, documents: Sequence[Document], length: int, what: str) -> str:
    if not documents:
        return no_documents(what)
    if maker.without_labels:
        return (
            f"within seq_length={length} tokens, nothing is to be learned from any of the "
            f"{maker.without_labels} records {what}. Use a larger seq_length, or give others."
        )
    return (
        f"the data {what} has less than one row of {length} tokens, in {len(documents)} "
        f"document(s). Give more data, or a smaller seq_length."
    )


class _Maker:
    """Makes rows until there are enough.

    A first pass takes at most `share` tokens of each text, from its second third, where a file's
    header is past; a second pass takes what is left of the texts in order.
    """

    def __init__(
        self,
        tokenizer: Any,
        seq_length: int,
        wanted: int,
        assistant_only: bool,
        full_rows: bool,
        problems: Problems | None,
    ) -> None:
        self.tokenizer = tokenizer
        self.seq_length = seq_length
        self.wanted = wanted
        self.assistant_only = assistant_only
        self.full_rows = full_rows
        self.tokens = 0
        self.rows: list[dict[str, Tensor]] = []
        self.openings: list[list[int]] = []
        self.problems = problems or Problems()
        self.read_characters = self.read_tokens = self.read_records = 0
        self.cut = self.records = self.without_labels = 0
        end = tokenizer.eos_token_id
        self._end = [] if end is None else [end]
        self._stream: list[int] = []

    def make(self, documents: Sequence[Document], share: int) -> None:
        left: list[list[int] | str] = []
        for document in documents:
            if self.enough():
                break
            if not isinstance(document.record, Text):
                self._add_record(document)
                continue
            taken, rest = _excerpt(document.record.text, share * _CHARACTERS_PER_TOKEN)
            ids = self._encode(taken)
            left.extend([ids[share:], *rest] if len(ids) > share else rest)
            self._add_text(ids[:share])
        for piece in left:
            if self.enough():
                break
            self._add_text(self._encode(piece) if isinstance(piece, str) else piece)

    def _encode(self, text: str) -> list[int]:
        ids = encode(self.tokenizer, text)
        self.read_characters += len(text)
        self.read_tokens += len(ids)
        return ids

    def all_rows(self, documents: Sequence[Document]) -> tuple[int | None, bool]:
        """(rows that the documents would give, or None if these are all; whether estimated)."""
        texts = [item.record.text for item in documents if isinstance(item.record, Text)]
        unread = len(documents) - len(texts) - self.read_records
        found = len(self.rows) + unread
        if texts and self.enough():
            per_character = self.read_tokens / max(1, self.read_characters)
            tokens = per_character * sum(map(len, texts)) + len(self._end) * len(texts)
            from_records = self.records - self.without_labels
            found = (
                from_records
                + unread
                + max(len(self.rows) - from_records, int(tokens / self.seq_length))
            )
        return (found, bool(texts)) if found > len(self.rows) else (None, False)

    def enough(self) -> bool:
        if self.full_rows:
            return self.tokens >= self.wanted * self.seq_length
        return len(self.rows) >= self.wanted

    def notes(self) -> list[str]:
        told = []
        if self.cut:
            told.append(
                f"{self.cut} of {self.records} records are longer than seq_length="
                f"{self.seq_length} tokens and are cut off there"
            )
        if self.without_labels:
            told.append(
                f"{self.without_labels} records are left out: within seq_length={self.seq_length} "
                f"tokens nothing of them is to be learned"
            )
        return told

    def _add_row(self, row: dict[str, Tensor]) -> None:
        self.rows.append(row)
        self.tokens += len(row["input_ids"])

    def _add_text(self, ids: list[int]) -> None:
        self._stream.extend([*ids, *self._end])
        while len(self._stream) >= self.seq_length and not self.enough():
            row = torch.tensor(self._stream[: self.seq_length])
            del self._stream[: self.seq_length]
            self._add_row({"input_ids": row, "labels": row.clone()})
            if len(self.openings) < OPENINGS:
                opening = row[: min(_OPENING_TOKENS, self.seq_length // 2)]
                self.openings.append(opening.tolist())

    def _add_record(self, document: Document) -> None:
        self.read_records += 1
        try:
            ids, counts = tokens_of(
                document.record, self.tokenizer, assistant_only=self.assistant_only
            )
        except RecordError as error:
            self.problems.add(document.place, str(error), document.number)
            return
        self.records += 1
        self.cut += len(ids) > self.seq_length
        tokens = torch.tensor(ids[: self.seq_length], dtype=torch.int64)
        mask = torch.tensor(counts[: self.seq_length], dtype=torch.bool)
        if not bool(mask[1:].any()):
            self.without_labels += 1
            return
        self._add_row({"input_ids": tokens, "labels": tokens.masked_fill(~mask, IGNORED)})
        if len(self.openings) < OPENINGS:
            opening = self._opening(document.record, ids, counts)
            self.openings.append(opening[: self.seq_length])

    def _opening(self, record: Record, ids: list[int], counts: list[bool]) -> list[int]:
        """What comes before the last answer."""
        if isinstance(record, Conversation) and not self.assistant_only:
            text, spans = answer_spans(self.tokenizer, record.messages)
            _, counts = encode_marked(self.tokenizer, text, spans)
        last = len(counts) - 1
        while last > 0 and not counts[last]:
            last -= 1
        while last > 0 and counts[last - 1]:
            last -= 1
        return ids[:last] if last else ids[: min(_OPENING_TOKENS, max(1, len(ids) // 2))]


def tokens_of(
    record: Record, tokenizer: Any, *, assistant_only: bool = False
) -> tuple[list[int], list[bool]]:
    """Tokens of a record, and which of them count in the loss.

    Raises:
        RecordError: the chat template refuses it.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if isinstance(record, Conversation):
        if not assistant_only:
            ids = encode(tokenizer, render(tokenizer, record.messages))
            return ids, [True] * len(ids)
        text, spans = answer_spans(tokenizer, record.messages)
        if not spans:
            raise RecordError("assistant_only=true, but no turn of it is the assistant's")
        return encode_marked(tokenizer, text, spans)
    assert isinstance(record, Completion)
    if isinstance(record.prompt, list) and isinstance(record.completion, list):
        before, after = split_answer(tokenizer, record.prompt, record.completion)
        prompt, answer = encode(tokenizer, before), encode(tokenizer, after)
    else:
        prompt = encode(tokenizer, str(record.prompt))
        answer = [*encode(tokenizer, str(record.completion)), *end]
    return [*prompt, *answer], [False] * len(prompt) + [True] * len(answer)


def _excerpt(text: str, characters: int) -> tuple[str, list[str]]:
    """(whole lines from the second third of `text`, the parts before and after them)."""
    if len(text) <= characters:
        return text, []
    start = min(len(text) // 3, len(text) - characters)
    start = text.rfind("\n", 0, start) + 1
    end = text.find("\n", start + characters) + 1 or len(text)
    return text[start:end], [part for part in (text[:start], text[end:]) if part.strip()]


class PadCollator:
    """Pads rows to the longest of the batch; labels of padding count for nothing."""

    def __init__(self, pad_id: int) -> None:
        self.pad_id = pad_id

    def __call__(self, rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        ids = torch.full((len(rows), longest), self.pad_id)
        labels = torch.full((len(rows), longest), IGNORED)
        mask = torch.zeros((len(rows), longest), dtype=torch.int64)
        for index, row in enumerate(rows):
            length = len(row["input_ids"])
            ids[index, :length] = row["input_ids"]
            labels[index, :length] = row["labels"]
            mask[index, :length] = 1
        batch = {"input_ids": ids, "labels": labels}
        if not bool(mask.all()):
            batch["attention_mask"] = mask
        return batch
