"""Text and JSON lines into rows of tokens, with a part held out."""

from __future__ import annotations

import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ts_core.errors import DataError

IGNORED = -100
_TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".text")
_STDLIB_SKIPPED = {
    *("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"),
    *("encodings", "pydoc_data"),  # tables and one long text, not programs
}
_HELD_OUT_SHARE = 10  # one document in so many
_CHARACTERS_PER_TOKEN = 4  # roughly, to cut texts before they are tokenized


@dataclass(frozen=True)
class Document:
    """A piece of data: plain text, or a record of a JSON-lines file."""

    name: str
    text: str = ""
    record: dict[str, Any] | None = None


@dataclass(frozen=True)
class Rows:
    """Rows for a Trainer: dicts of 1-d tensors input_ids and labels (int64, equal length)."""

    items: tuple[dict[str, Tensor], ...]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.items[index]

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(len(item["input_ids"]) for item in self.items)

    def highest_token(self) -> int:
        """The largest token id of all rows."""
        return max(int(item["input_ids"].max()) for item in self.items)

    def fingerprint(self) -> str:
        """A hash of every token and label, to recognize changed data on resume."""
        digest = hashlib.sha256()
        for item in self.items:
            for name in ("input_ids", "labels"):
                digest.update(item[name].to(torch.int32).numpy().tobytes())
        return digest.hexdigest()[:16]


def prepare_rows(
    sources: Sequence[str],
    held_out: str | None,
    tokenizer: Any,
    *,
    seq_length: int,
    train_rows: int,
    eval_rows: int,
) -> tuple[Rows, Rows]:
    """(training rows, held-out rows), the same for the same arguments on every machine.

    Documents are taken in an order that depends on their names alone, and only as many are
    tokenized as the run needs. Plain text is joined (with an end token after each document) and
    cut into rows of `seq_length`; a record becomes one row, cut off at `seq_length`.

    Args:
        sources: paths, or "stdlib".
        held_out: a path to hold out, or None to hold out a tenth of the documents.
        tokenizer: a transformers tokenizer.
        seq_length: tokens per row.
        train_rows: rows the training will read; more are not made.
        eval_rows: held-out rows wanted.

    Raises:
        DataError: nothing usable; a broken record, by file and line.
    """
    documents = _in_order(read_documents(sources))
    if held_out is not None:
        training, held = documents, _in_order(read_documents([held_out]))
    else:
        training, held = split_documents(documents)
    train = _rows(training, tokenizer, seq_length, train_rows, share=4 * seq_length)
    test = _rows(held, tokenizer, seq_length, eval_rows, share=seq_length)
    for rows, what in ((train, "to train on"), (test, "held out")):
        if not rows:
            raise DataError(
                f"the data {what} ({', '.join(sources)}) has less than one row of {seq_length} "
                f"tokens. Give more data, or a smaller seq_length."
            )
    return Rows(tuple(train)), Rows(tuple(test))


def split_documents(documents: list[Document]) -> tuple[list[Document], list[Document]]:
    """(training, held out): by a hash of the name, or the tail of each text when there are few."""
    held = [item for item in documents if _hash(item.name) % _HELD_OUT_SHARE == 0]
    rest = [item for item in documents if _hash(item.name) % _HELD_OUT_SHARE != 0]
    if len(held) >= 1 and len(documents) >= 2 * _HELD_OUT_SHARE:
        return rest, held
    if all(item.record is None for item in documents):
        cut = 1 - 1 / _HELD_OUT_SHARE
        heads = [Document(d.name, d.text[: int(len(d.text) * cut)]) for d in documents]
        tails = [Document(d.name, d.text[int(len(d.text) * cut) :]) for d in documents]
        return heads, tails
    count = max(1, len(documents) // _HELD_OUT_SHARE)
    return documents[count:], documents[:count]


def check_sources(sources: Sequence[str]) -> None:
    """Refuse a source that is not there; reads nothing.

    Raises:
        DataError: naming it.
    """
    for source in sources:
        if source != "stdlib" and not Path(source).expanduser().exists():
            raise DataError(
                f"data: there is no file or folder {source!r}. Give paths, or 'stdlib'."
            )


def read_documents(sources: Sequence[str]) -> list[Document]:
    """All documents of the sources.

    Raises:
        DataError: a source does not exist, holds nothing, or cannot be read as UTF-8; a broken
            record of a JSON-lines file, by line number.
    """
    found: list[Document] = []
    for source in sources:
        before = len(found)
        if source == "stdlib":
            found += _standard_library()
        else:
            path = Path(source).expanduser()
            if path.is_dir():
                files = sorted(p for p in path.rglob("*") if p.is_file())
                for file in files:
                    if file.suffix in (*_TEXT_SUFFIXES, ".jsonl"):
                        found += _read_file(file, file.relative_to(path).as_posix())
            else:
                check_sources([source])
                found += _read_file(path, path.name)
        if len(found) == before:
            raise DataError(
                f"data: {source!r} holds no text. Files ending in "
                f"{', '.join(_TEXT_SUFFIXES)} or .jsonl are read."
            )
    return found


def _standard_library() -> list[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root)
        if not _STDLIB_SKIPPED & set(relative.parts):
            text = file.read_text(encoding="utf-8", errors="replace")
            if text.strip():
                found.append(Document(relative.as_posix(), text))
    return found


def _read_file(file: Path, name: str) -> list[Document]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"data: {file} is not UTF-8 text (byte {error.start}: {error.reason}). Convert it, or "
            f"leave it out."
        ) from error
    except OSError as error:
        raise DataError(f"data: {file} cannot be read: {error.strerror}.") from error
    if file.suffix == ".jsonl":
        return list(_records(file, name, text))
    return [Document(name, text)] if text.strip() else []


def _records(file: Path, name: str, text: str) -> Iterator[Document]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        place = f"data: {file}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{place}: not valid JSON ({error}).") from error
        if not isinstance(record, dict):
            raise DataError(f"{place}: expected a JSON object, found a {type(record).__name__}.")
        _check_record(record, place)
        if "text" in record:
            yield Document(f"{name}:{number}", record["text"])
        else:
            yield Document(f"{name}:{number}", record=record)


def _check_record(record: dict[str, Any], place: str) -> None:
    good = False
    if "text" in record:
        good = isinstance(record["text"], str) and record["text"].strip() != ""
        expected = "'text' with a text that is not empty"
    elif "messages" in record:
        messages = record["messages"]
        good = (
            isinstance(messages, list)
            and len(messages) > 0
            and all(
                isinstance(item, dict)
                and isinstance(item.get("role"), str)
                and isinstance(item.get("content"), str)
                for item in messages
            )
        )
        expected = "'messages', a list of objects with 'role' and 'content'"
    elif "prompt" in record and "completion" in record:
        good = all(isinstance(record[key], str) for key in ("prompt", "completion"))
        good = good and record["completion"] != ""
        expected = "'prompt' and 'completion' with texts"
    else:
        expected = "'text', 'messages', or 'prompt' and 'completion'"
    if not good:
        raise DataError(f"{place}: expected {expected}; found the keys {sorted(record)}.")


def _in_order(documents: Iterable[Document]) -> list[Document]:
    return sorted(documents, key=lambda item: (_hash(item.name), item.name))


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def _rows(
    documents: Sequence[Document], tokenizer: Any, seq_length: int, wanted: int, share: int
) -> list[dict[str, Tensor]]:
    """`wanted` rows, drawn from many documents rather than from the first ones.

    A first pass takes at most `share` tokens of each text (more if there are too few texts), from
    its second third, where a file's header is past; a second pass takes what is left of the texts
    in order.
    """
    rows: list[dict[str, Tensor]] = []
    stream: list[int] = []
    left: list[list[int] | str] = []
    share = max(share, seq_length * wanted // max(1, len(documents)))
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

    def tokens(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def add(ids: list[int]) -> None:
        stream.extend([*ids, *end])
        while len(stream) >= seq_length and len(rows) < wanted:
            row = torch.tensor(stream[:seq_length])
            del stream[:seq_length]
            rows.append({"input_ids": row, "labels": row.clone()})

    for document in documents:
        if len(rows) >= wanted:
            break
        if document.record is not None:
            row = _record_row(document.record, tokenizer, seq_length)
            if bool((row["labels"][1:] != IGNORED).any()):
                rows.append(row)
            continue
        taken, rest = _excerpt(document.text, share * _CHARACTERS_PER_TOKEN)
        ids = tokens(taken)
        left.extend([ids[share:], *rest] if len(ids) > share else rest)
        add(ids[:share])
    for piece in left:
        if len(rows) >= wanted:
            break
        add(tokens(piece) if isinstance(piece, str) else piece)
    return rows


def _excerpt(text: str, characters: int) -> tuple[str, list[str]]:
    """(whole lines from the second third of `text`, the parts before and after them)."""
    if len(text) <= characters:
        return text, []
    start = min(len(text) // 3, len(text) - characters)
    start = text.rfind("\n", 0, start) + 1
    end = text.find("\n", start + characters) + 1 or len(text)
    return text[start:end], [part for part in (text[:start], text[end:]) if part.strip()]


def _record_row(record: dict[str, Any], tokenizer: Any, seq_length: int) -> dict[str, Tensor]:
    if "messages" in record:
        if not getattr(tokenizer, "chat_template", None):
            raise DataError(
                "data: a record has 'messages', but the model's tokenizer has no chat template. "
                "Use 'text', or 'prompt' and 'completion'."
            )
        text = tokenizer.apply_chat_template(record["messages"], tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        masked = 0
    else:
        prompt = tokenizer(record["prompt"], add_special_tokens=False, verbose=False)["input_ids"]
        rest = tokenizer(record["completion"], add_special_tokens=False, verbose=False)["input_ids"]
        end = tokenizer.eos_token_id
        ids, masked = [*prompt, *rest, *([] if end is None else [end])], len(prompt)
    tokens = torch.tensor(ids[:seq_length])
    labels = tokens.clone()
    labels[:masked] = IGNORED
    return {"input_ids": tokens, "labels": labels}


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
