"""Scales that are NaN or infinite, as no weight has them: a stored file is damaged then."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ts_quant.errors import CheckpointError


def refuse_bad_scales(name: str, buffers: Mapping[str, Tensor], scales: str) -> None:
    """Refuse scales that are NaN or infinite.

    Args:
        name: of the weight, for the message.
        buffers: of the stored weight, by name; those of codes are not looked at.
        scales: how scales of one byte are kept; see `ts_quant.codecs.scales`.

    Raises:
        CheckpointError: with the name of the buffer and how many there are.
    """
    for buffer, tensor in buffers.items():
        if "codes" in buffer:
            continue
        if tensor.dtype.is_floating_point:
            bad = ~torch.isfinite(tensor.float())
        elif tensor.dtype is not torch.uint8:
            continue
        elif scales == "e8m0":
            bad = tensor == 0xFF
        else:  # e4m3, whose NaN has all bits but the sign
            bad = tensor & 0x7F == 0x7F
        count = int(bad.sum())
        if count:
            raise CheckpointError(
                f"the stored weight {name!r} has {count} scales that are NaN or infinite "
                f"({buffer}): the file is damaged, or was written from such a weight"
            )
