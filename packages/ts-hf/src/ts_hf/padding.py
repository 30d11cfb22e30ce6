"""Batches of few lengths: each padded to a multiple.

What is prepared for a shape (a recording of `cuda_graphs`, a compiled or tuned kernel) can be used
again only when the shape comes again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ts_core.errors import DataError, OptionError
from ts_hf.packing_layout import looks_packed

__all__ = ["PaddedCollator", "check_multiple", "round_up"]

IGNORED = -100


class PaddedCollator:
    """Another collator's batches, padded on the right to a multiple of so many tokens.

    Padding has label -100 and attention 0, so that losses and gradients stay what they were, up to
    the rounding of other shapes. Every batch has an attention mask then.

    Args:
        collator: makes batches with input_ids [B, T], in host memory.
        pad_to_multiple_of: tokens; T is rounded up to it.
        pad_id: the token that fills rows up.
        max_length: of a row that the model can take; padding stops there. None: no limit.

    Raises:
        OptionError: `pad_to_multiple_of` is no int of at least 1.
    """

    def __init__(
        self,
        collator: Callable[[Any], Any],
        pad_to_multiple_of: int,
        pad_id: int = 0,
        max_length: int | None = None,
    ) -> None:
        check_multiple(pad_to_multiple_of)
        self.collator = collator
        self.pad_to_multiple_of = pad_to_multiple_of
        self.pad_id = pad_id
        self.max_length = max_length

    def __repr__(self) -> str:
        return f"PaddedCollator({self.collator!r}, {self.pad_to_multiple_of})"

    def __call__(self, features: Any) -> Any:
        """Collate and pad.

        Args:
            features: of the inner collator.

        Returns:
            Its batch with the columns input_ids, attention_mask, labels, shift_labels,
            position_ids, token_type_ids and those that end in "mask" longer; others as they are.

        Raises:
            DataError: no input_ids [B, T]; another column with a value per token; packed rows.
        """
        batch = self.collator(features)
        ids = batch.get("input_ids") if hasattr(batch, "get") else None
        if not torch.is_tensor(ids) or ids.dim() != 2:
            raise DataError(
                f"pad_to_multiple_of={self.pad_to_multiple_of}: {self.collator!r} makes no "
                f"input_ids [B, T]. Leave pad_to_multiple_of out."
            )
        if looks_packed(batch):
            raise DataError(
                f"pad_to_multiple_of={self.pad_to_multiple_of}: the batches of {self.collator!r} "
                f"are packed rows. Use packing= of TrainStreamTrainer, or let that collator pad "
                f"(PackedCollator(pad_to_multiple_of=...))."
            )
        length = ids.shape[1]
        wanted = round_up(length, self.pad_to_multiple_of)
        if self.max_length is not None:
            wanted = max(length, min(wanted, self.max_length))
        if batch.get("attention_mask") is None:
            batch["attention_mask"] = torch.ones_like(ids)
        for name, value in batch.items():
            if torch.is_tensor(value) and value.dim() >= 2 and value.shape[1] == length:
                batch[name] = self._padded(name, value, wanted - length)
        return batch

    def _padded(self, name: str, value: Tensor, more: int) -> Tensor:
        if value.dim() != 2:
            raise DataError(
                f"pad_to_multiple_of={self.pad_to_multiple_of}: the column {name!r} has shape "
                f"{tuple(value.shape)}, which this does not know how to pad."
            )
        if name == "position_ids":
            further = torch.arange(1, more + 1, dtype=value.dtype, device=value.device)
            return torch.cat([value, value[:, -1:] + further], dim=1)
        if name == "input_ids":
            fill = self.pad_id
        elif name in ("labels", "shift_labels"):
            fill = IGNORED
        elif name == "token_type_ids" or name.endswith("mask"):
            fill = 0
        else:
            raise DataError(
                f"pad_to_multiple_of={self.pad_to_multiple_of}: the column {name!r} has a value "
                f"per token, and this does not know what its padding is. Remove the column, or "
                f"pad in your own collator."
            )
        return F.pad(value, (0, more), value=fill)


def check_multiple(value: Any) -> None:
    """Refuse what is no multiple to pad to.

    Raises:
        OptionError: no int of at least 1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError(f"pad_to_multiple_of={value!r}: expected an int of at least 1.")


def round_up(length: int, multiple: int) -> int:
    """The first multiple that is not below `length`."""
    return -(-length // multiple) * multiple
