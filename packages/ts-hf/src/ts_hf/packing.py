"""Packing: several short sequences in one row, without padding and without attention across them.

    row            a a a b b c c c c .        . is padding
    position_ids   0 1 2 0 1 0 1 2 3 0
    labels         . a a . b . c c c .        . is -100: nothing predicts a first token

Position ids that restart are what transformers' masks and flash attention tell the sequences apart
by. They do so only while no key-value cache is made: call the model with `use_cache=False`
(`PackedCollator` puts that in its batches; the Trainers set it). Whether a given model keeps packed
sequences apart is found out by `ts_hf.packing_layout`, which TrainStreamTrainer asks.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ts_core.errors import DataError, OptionError
from ts_hf.padding import check_multiple, round_up

__all__ = ["PackedCollator", "best_fit", "pack_sequences"]

IGNORED = -100
# Columns of a dataset that say nothing more about its tokens once they are packed.
_SPENT = frozenset(("attention_mask", "position_ids", "token_type_ids", "special_tokens_mask"))


def best_fit(lengths: Sequence[int], max_len: int) -> list[list[int]]:
    """Put pieces of the given lengths into as few rows as best fit decreasing finds.

    The longest piece comes first; each goes to the row in which it leaves the least room: at most
    11/9 of the optimum plus four rows (Johnson et al., 1974). O(n log n + n min(n, max_len)).

    Args:
        lengths: of the pieces, each from 1 to `max_len`.
        max_len: of a row.

    Returns:
        For each row the indices of its pieces. The same for the same lengths.

    Raises:
        ValueError: (OptionError) a length that does not fit, or a `max_len` below 1.
    """
    _check_row_length(max_len)
    for index, length in enumerate(lengths):
        if not 1 <= length <= max_len:
            raise OptionError(
                f"lengths[{index}] is {length}; expected 1 to max_len={max_len}. Split longer "
                f"sequences first (pack_sequences does)."
            )
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}  # free places -> rows that have so many
    sizes: list[int] = []  # the keys of with_room, ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        at = bisect_left(sizes, length)
        if at == len(sizes):
            row, room = len(rows), max_len
            rows.append([])
        else:
            room = sizes[at]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], sizes[at]
        rows[row].append(index)
        left = room - length
        if left:
            if left not in with_room:
                insort(sizes, left)
            with_room.setdefault(left, []).append(row)
    return rows


def pack_sequences(
    sequences: Sequence[Any],
    max_len: int,
    *,
    labels: Sequence[Any] | None = None,
    pad_id: int = 0,
) -> dict[str, Tensor]:
    """Pack sequences of tokens into rows of `max_len` (best fit decreasing).

    A sequence longer than `max_len` is split into pieces that are sequences of their own: their
    positions restart and their first tokens are not predicted. Empty sequences add nothing.

    Args:
        sequences: token ids, each a 1-d integer tensor or a list of ints.
        max_len: length of a row.
        labels: None for the tokens themselves, or as many labels for each sequence, not shifted;
            -100 is not trained on.
        pad_id: the token that fills rows up.

    Returns:
        input_ids, labels and position_ids, each int64 [rows, max_len] on the CPU. Labels are -100
        at each sequence's first token and at padding; padding has position 0. Call the model with
        them and `use_cache=False`.

    Raises:
        ValueError: (OptionError) `max_len` below 1; (DataError) no tokens at all, a sequence that
            is no row of integers, or labels that are not as many as the tokens.
    """
    _check_row_length(max_len)
    pieces = _pieces(sequences, labels, max_len)
    return _fill(best_fit([len(ids) for ids, _ in pieces], max_len), pieces, max_len, pad_id)


class PackedCollator:
    """Makes a packed batch of a list of rows of a dataset; a `data_collator` for any Trainer.

    Args:
        max_len: length of the batch's rows, which are as many as it takes; None for one row
            [1, T] with the tokens of all, in the order given, and no padding.
        pad_id: the token that fills rows up.
        pad_to_multiple_of: of the one row: T is rounded up to it, so that few lengths come. None:
            no padding.

    Raises:
        ValueError: (OptionError) `max_len` or `pad_to_multiple_of` below 1, or both given.
    """

    def __init__(
        self, max_len: int | None = None, pad_id: int = 0, pad_to_multiple_of: int | None = None
    ) -> None:
        if max_len is not None:
            _check_row_length(max_len)
        if pad_to_multiple_of is not None:
            check_multiple(pad_to_multiple_of)
            if max_len is not None:
                raise OptionError(
                    f"pad_to_multiple_of={pad_to_multiple_of!r}: rows of max_len={max_len} have "
                    f"one length already. Leave one of them out."
                )
        self.max_len = max_len
        self.pad_id = pad_id
        self.pad_to_multiple_of = pad_to_multiple_of

    def __repr__(self) -> str:
        padded = "" if self.pad_to_multiple_of is None else f", {self.pad_to_multiple_of}"
        return f"PackedCollator(max_len={self.max_len}, pad_id={self.pad_id}{padded})"

    def __call__(self, features: Sequence[Any]) -> dict[str, Any]:
        """Pack `features`.

        Args:
            features: token ids, or mappings with `input_ids` and maybe `labels` (else the tokens
                themselves) and `attention_mask` (tokens under a 0 are left out).

        Returns:
            As `pack_sequences`, and `use_cache` False, so that `model(**batch)` is right.

        Raises:
            ValueError: (DataError) as `pack_sequences`; a column with a value per token, or with
                arrays of several dimensions (images), which packing would lose.
        """
        rows = [_tokens_and_labels(index, feature) for index, feature in enumerate(features)]
        sequences, labels = [ids for ids, _ in rows], [own for _, own in rows]
        if self.max_len is None:
            pieces = _pieces(sequences, labels, None)
            total = sum(len(ids) for ids, _ in pieces)
            length = round_up(total, self.pad_to_multiple_of or 1)
            batch = _fill([list(range(len(pieces)))], pieces, length, self.pad_id)
        else:
            batch = pack_sequences(sequences, self.max_len, labels=labels, pad_id=self.pad_id)
        # A key-value cache would switch off transformers' recognition of packed rows.
        return {**batch, "use_cache": False}


def _check_row_length(max_len: Any) -> None:
    if isinstance(max_len, bool) or not isinstance(max_len, int) or max_len < 1:
        raise OptionError(f"max_len={max_len!r}: expected an int of at least 1.")


def _pieces(
    sequences: Sequence[Any], labels: Sequence[Any] | None, max_len: int | None
) -> list[tuple[Tensor, Tensor]]:
    """(tokens, labels with -100 first) of each piece of at most `max_len`, in order."""
    if labels is not None and len(labels) != len(sequences):
        raise DataError(
            f"{len(labels)} rows of labels for {len(sequences)} sequences; expected as many."
        )
    pieces: list[tuple[Tensor, Tensor]] = []
    for index, sequence in enumerate(sequences):
        ids = _integers(sequence, f"sequence {index}")
        own = ids if labels is None else _integers(labels[index], f"labels of sequence {index}")
        if own.shape != ids.shape:
            raise DataError(
                f"sequence {index} has {len(ids)} tokens and {len(own)} labels; expected as many."
            )
        size = max_len or max(len(ids), 1)
        for part, targets in zip(ids.split(size), own.split(size), strict=True):
            if len(part):
                targets = targets.clone()
                targets[0] = IGNORED  # what precedes it in the row is another sequence
                pieces.append((part, targets))
    if not pieces:
        raise DataError(f"the {len(sequences)} sequences given have no tokens; expected some.")
    return pieces


def _fill(
    rows: list[list[int]], pieces: list[tuple[Tensor, Tensor]], length: int, pad_id: int
) -> dict[str, Tensor]:
    shape = (len(rows), length)
    input_ids = torch.full(shape, pad_id, dtype=torch.int64)
    labels = torch.full(shape, IGNORED, dtype=torch.int64)
    position_ids = torch.zeros(shape, dtype=torch.int64)
    for row, members in enumerate(rows):
        start = 0
        for member in members:
            ids, own = pieces[member]
            end = start + len(ids)
            input_ids[row, start:end] = ids
            labels[row, start:end] = own
            position_ids[row, start:end] = torch.arange(len(ids))
            start = end
    return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids}


def _tokens_and_labels(index: int, feature: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(feature, Mapping):
        ids = _integers(feature, f"row {index}")
        return ids, ids
    if "input_ids" not in feature:
        raise DataError(f"row {index} has no input_ids, but {', '.join(map(str, feature))}.")
    ids = _integers(feature["input_ids"], f"input_ids of row {index}")
    given = feature.get("labels")
    labels = ids if given is None else _integers(given, f"labels of row {index}")
    for name, value in feature.items():
        if name in ("input_ids", "labels") or name in _SPENT or isinstance(value, str):
            continue
        if hasattr(value, "__len__") and len(value) == len(ids):
            raise DataError(
                f"row {index} has a value of {name!r} for each token, which packing would lose. "
                f"Remove the column, or train without packing."
            )
        if _has_rows(value):
            raise DataError(
                f"row {index} has {name!r}, an array of several dimensions such as an image's "
                f"pixels, which packing would lose. Remove the column, or train without packing."
            )
    mask = feature.get("attention_mask")
    if mask is not None and labels.shape == ids.shape:
        keep = torch.as_tensor(mask, device="cpu").bool()
        if keep.shape != ids.shape:
            raise DataError(
                f"row {index} has {len(ids)} tokens and an attention_mask of shape "
                f"{tuple(keep.shape)}; expected as many values."
            )
        ids, labels = ids[keep], labels[keep]
    return ids, labels


def _has_rows(value: Any) -> bool:
    """Whether a column's value is an array of two or more dimensions, or nested lists."""
    if hasattr(value, "ndim"):
        return bool(value.ndim > 1)
    return isinstance(value, (list, tuple)) and any(
        isinstance(item, (list, tuple)) or hasattr(item, "ndim") for item in value
    )


def _integers(values: Any, what: str) -> Tensor:
    """`values` as int64 [T] on the CPU."""
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what} is not a row of integers ({error}).") from error
    if tensor.dim() != 1:
        raise DataError(f"{what} has shape {tuple(tensor.shape)}; expected [T].")
    if tensor.numel() and (tensor.is_floating_point() or tensor.dtype == torch.bool):
        raise DataError(f"{what} has dtype {tensor.dtype}; expected integers.")
    return tensor.to(device="cpu", dtype=torch.int64)
