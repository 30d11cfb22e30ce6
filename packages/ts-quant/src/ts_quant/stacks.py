"""Stored weights that stack matrices along their first dimension, taken apart without decoding.

Codes of a stack can be split where every matrix begins a block of its own, and a group of one-byte
scales of its own. Buffers that are common to the whole weight (a global scale) stay common.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ts_quant.codecs import channel_scale
from ts_quant.codecs.base import Codec, QuantSpec
from ts_quant.codecs.scales import LAYOUTS
from ts_quant.errors import OptionError

if TYPE_CHECKING:
    from ts_quant.tensor import QuantTensor

LARGE = 1 << 26
"""Values above which a stack is encoded matrix by matrix."""


def stack_rows(stored: QuantTensor) -> tuple[str, ...] | None:
    """Names of the inner tensors that split evenly by matrix; None when the codes cannot be split.

    Args:
        stored: of three or more dimensions (fewer: None).
    """
    names = tuple(stored.__tensor_flatten__()[0])
    common = _common(tuple(stored.shape), stored.spec)
    if common is None:
        return None
    common |= set(channel_scale.names(stored.spec))
    rows = tuple(name for name in names if name not in common)
    even = all(getattr(stored, name).numel() % stored.shape[0] == 0 for name in rows)
    return rows if even else None


def apart(shape: torch.Size, spec: QuantSpec) -> bool:
    """Whether a stack is large enough to encode matrix by matrix, and every matrix can be.

    Encoding needs several times the memory of what it works on.
    """
    large = shape.numel() >= LARGE and spec.scales != "tile"
    return large and _common(tuple(shape), spec) == frozenset()


def encode_apart(
    codec: Codec, weight: Tensor, spec: QuantSpec, name: str | None
) -> tuple[Tensor, ...]:
    """The buffers of a stack, encoded one matrix at a time.

    Raises:
        NonFiniteWeightError: a matrix holds NaN or infinity; it is named by its index.
    """
    count, matrix = weight.shape[0], weight.shape[1:]
    whole: list[Tensor] = []
    for index in range(count):
        label = f"{name or 'weight'}[{index}]"
        for place, part in enumerate(codec.encode_checked(weight[index], spec, label)):
            if index == 0:
                like_weight = part.shape == matrix
                joined = (count * part.shape[0], *part.shape[1:])
                whole.append(part.new_empty((count, *matrix) if like_weight else joined))
            whole[place].view(count, -1)[index] = part.reshape(-1)
    return tuple(whole)


def _common(shape: tuple[int, ...], spec: QuantSpec) -> frozenset[str] | None:
    """Names of the scale buffers that all matrices share; None when codes cannot be split."""
    if len(shape) < 3 or 0 in shape:
        return None
    if spec.scales == "tile":
        return frozenset()
    count = shape[0]
    values = torch.Size(shape).numel() // count
    if values % spec.block_size:
        return None
    blocks = values // spec.block_size
    layout = LAYOUTS[spec.scales]
    one, whole = layout.sizes(blocks), layout.sizes(blocks * count)
    common = set()
    for name, (_, of_one), (_, of_all) in zip(layout.buffer_names, one, whole, strict=True):
        if of_one * count == of_all:
            continue
        if of_one != of_all:
            return None
        common.add(name)
    return frozenset(common)


def stack_like(stored: QuantTensor, buffers: Mapping[str, Tensor], count: int) -> QuantTensor:
    """A stack of `count` matrices in the form of `stored`, over other inner tensors.

    Args:
        stored: the stack it is part of.
        buffers: the inner tensors by name; flat ones are given the shape that `stored` has them in.
        count: matrices in it.

    Raises:
        OptionError: a buffer of another size or dtype.
    """
    from ts_quant.tensor import QuantTensor

    spec = stored.spec
    layout: dict[str, object] = {"scales": spec.scales, "block_size": spec.block_size}
    if spec.channel_scale:
        layout["channel_scale"] = True
    if spec.scales == "tile":
        layout["rows"] = spec.rows
        shaped = stored.scale.shape  # type: ignore[attr-defined]
        buffers = {**buffers, "scale": buffers["scale"].reshape(count, *shaped[1:])}
    made = QuantTensor.from_buffers(
        spec.codec,
        buffers,
        shape=(count, *stored.shape[1:]),
        dtype=stored.dtype,
        layout=layout,
    )
    made._matmul = stored._matmul
    return made


def stack_part(stored: QuantTensor, first: int, count: int) -> QuantTensor:
    """The matrices [first, first + count) of a stack, as views of its inner tensors.

    Raises:
        OptionError: codes that cannot be split, or a range beyond the stack.
    """
    rows = stack_rows(stored)
    total = stored.shape[0]
    if rows is None or not 0 <= first <= first + count <= total:
        raise OptionError(
            f"matrices {first} to {first + count} of a {stored.codec} weight of shape "
            f"{tuple(stored.shape)} cannot be taken apart"
        )
    buffers = {}
    for name in stored.__tensor_flatten__()[0]:
        buffer = getattr(stored, name)
        if name in rows:
            buffer = buffer.reshape(total, -1)[first : first + count].reshape(-1)
        buffers[name] = buffer
    return stack_like(stored, buffers, count)
