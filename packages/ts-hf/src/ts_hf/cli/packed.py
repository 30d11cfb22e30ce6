"""Several records in one row, for `packing`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ts_hf.cli.rows import Rows
from ts_hf.packing import PackedCollator, best_fit, pack_sequences


def pack_rows(rows: Rows, seq_length: int) -> Rows:
    """Rows that hold several of `rows`, by best fit: `lengths` says how long each one is."""
    bins = best_fit([len(item["input_ids"]) for item in rows.items], seq_length)
    items = tuple(
        {
            "input_ids": torch.cat([rows.items[i]["input_ids"] for i in chosen]),
            "labels": torch.cat([rows.items[i]["labels"] for i in chosen]),
            "lengths": torch.tensor([len(rows.items[i]["input_ids"]) for i in chosen]),
        }
        for chosen in bins
    )
    note = f"packing: {len(rows)} records in {len(items)} rows of {seq_length} tokens"
    of = None if rows.of is None else max(len(items), round(rows.of * len(items) / len(rows)))
    return Rows(items, rows.openings, (*rows.notes, note), of=of, estimated=of is not None)


class BinCollator(PackedCollator):
    """Batches of rows from `pack_rows`, each filled up to `seq_length`."""

    def __init__(self, seq_length: int, pad_id: int) -> None:
        super().__init__(seq_length, pad_id)
        self._seq_length = seq_length

    def __call__(self, features: Sequence[Any]) -> dict[str, Any]:
        packed = [
            pack_sequences(
                _pieces(row, "input_ids"),
                self._seq_length,
                labels=_pieces(row, "labels"),
                pad_id=self.pad_id,
            )
            for row in features
        ]
        batch: dict[str, Any] = {
            name: torch.cat([row[name] for row in packed]) for name in packed[0]
        }
        return {**batch, "use_cache": False}


def _pieces(row: dict[str, Tensor], name: str) -> list[Tensor]:
    return list(row[name].split(row["lengths"].tolist()))
