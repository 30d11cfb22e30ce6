"""wrap_hf: ts_core.wrap with the decoder layers of a transformers model as its blocks."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from ts_hf.families import find_decoder_layers

ModelT = TypeVar("ModelT", bound=nn.Module)


def wrap_hf(
    model: ModelT, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> tuple[ModelT, Any]:
    """Make a transformers model, in a PEFT wrapper or not, and its optimizer stream.

    Args:
        model: a causal language model, adapters already added.
        optimizer: as for `ts_core.wrap`.
        **options: as for `ts_core.wrap`; `blocks` defaults to the model's decoder layers.

    Returns:
        The same model, and the OffloadAdamW to train with.

    Raises:
        What `ts_core.wrap` raises.
    """
    from ts_core import wrap

    if options.get("blocks") is None:
        blocks = find_decoder_layers(model)
        if blocks:
            options["blocks"] = blocks
    return wrap(model, optimizer, **options)
