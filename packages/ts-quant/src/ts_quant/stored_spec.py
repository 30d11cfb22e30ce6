"""The arguments of `QuantTensor.from_buffers`, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ts_quant.codecs import channel_scale
from ts_quant.codecs.base import Codec, QuantSpec
from ts_quant.errors import OptionError


def is_floating(dtype: object) -> bool:
    """Whether it is a floating torch.dtype."""
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point


def check_stored(buffers: object, shape: object, layout: object) -> None:
    """Refuse arguments of `from_buffers` that are of another kind."""
    if not isinstance(buffers, Mapping) or not all(
        isinstance(buffer, Tensor) for buffer in buffers.values()
    ):
        raise OptionError(f"buffers={buffers!r} is not accepted: expected tensors by name")
    if layout is not None and not isinstance(layout, Mapping):
        raise OptionError(f"layout={layout!r} is not accepted: expected None or values by name")
    sizes = list(shape) if isinstance(shape, Sequence) else [None]
    if not all(isinstance(size, int | torch.SymInt) and size >= 0 for size in sizes):
        raise OptionError(f"shape={shape!r} is not accepted: expected sizes of at least 0")


def stored_spec(codec: Codec, shape: tuple[int, ...], layout: dict[str, Any]) -> QuantSpec:
    """The spec that `from_buffers` was asked for."""
    default = codec.spec_for(shape)
    scales = layout.pop("scales", default.scales)
    block_size = layout.pop("block_size", default.block_size)
    rows = layout.pop("rows", 1)
    kept = layout.pop("outliers", 0)
    factors = layout.pop("channel_scale", False)
    if layout or scales not in codec.scale_layouts:
        asked = {"scales": scales, **layout}
        raise OptionError(
            f"layout {asked} is not one of {codec.name!r}; expected the keys 'scales' (one of "
            f"{list(codec.scale_layouts)}), 'block_size', 'rows', 'outliers' and 'channel_scale'"
        )
    for name, value in (("block_size", block_size), ("rows", rows)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 62:
            raise OptionError(
                f"layout's {name}={value!r} is not accepted: expected a positive int, at most 2^62"
            )
    if scales != "tile" and (rows != 1 or block_size % 2):
        raise OptionError(
            f"rows={rows} and block_size={block_size} are not accepted with {scales!r} scales: "
            f"expected no 'rows' and an even block_size"
        )
    most = shape[1] if len(shape) == 2 else 0
    if isinstance(kept, bool) or not isinstance(kept, int) or not 0 <= kept <= most:
        raise OptionError(
            f"layout's outliers={kept!r} is not accepted for a weight of shape {shape}: expected "
            f"how many of a matrix's columns are kept apart, 0 to {most}"
        )
    factors = channel_scale.check(factors, shape, kept)
    return QuantSpec(codec.stored_as, block_size, scales, rows, kept, factors)
