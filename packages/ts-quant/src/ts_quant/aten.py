"""The operations under which a QuantTensor stays quantized.

Copies and moves act on the inner tensors; a change of dtype changes what the weight decodes to,
not its codes; `copy_` encodes in place. Everything else decodes (`tensor._on_dequantized`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ts_quant.codecs import channel_scale, outliers
from ts_quant.codecs.base import codec_named
from ts_quant.errors import FrozenWeightError
from ts_quant.frozen_view import shown
from ts_quant.tensor import ATEN_HANDLERS, AtenHandler, QuantTensor, _on_dequantized

aten = torch.ops.aten


def _handles(*ops: Any) -> Callable[[AtenHandler], AtenHandler]:
    def add(handler: AtenHandler) -> AtenHandler:
        for op in ops:
            ATEN_HANDLERS[op] = handler
        return handler

    return add


@_handles(aten.detach.default, aten.alias.default)
def _alias(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    source: QuantTensor = args[0]
    made = source.with_buffers([func(buffer) for buffer in source.buffers()])
    made._edits = source._edits
    return made


@_handles(aten.clone.default, aten._pin_memory.default)
def _copy(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    source: QuantTensor = args[0]
    kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
    return source.with_buffers([func(buffer, **kwargs) for buffer in source.buffers()])


@_handles(aten._to_copy.default)
def _to_copy(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    source: QuantTensor = args[0]
    dtype = kwargs.get("dtype") or source.dtype
    wide = dtype.is_floating_point and dtype.itemsize >= 2
    if not wide or kwargs.get("layout") not in (None, torch.strided):
        return _on_dequantized(func, args, kwargs)
    keep = ("device", "pin_memory", "non_blocking")
    moved = {key: value for key, value in kwargs.items() if key in keep}
    return source.with_buffers([func(buffer, **moved) for buffer in source.buffers()], dtype)


@_handles(aten.is_pinned.default)
def _is_pinned(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    source: QuantTensor = args[0]
    return all(func(buffer, *args[1:], **kwargs) for buffer in source.buffers())


@_handles(aten.record_stream.default)
def _record_stream(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    source: QuantTensor = args[0]
    for buffer in source.buffers():
        func(buffer, *args[1:], **kwargs)


@_handles(aten.copy_.default)
def _copy_(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if not isinstance(target, QuantTensor):
        return _on_dequantized(func, args, kwargs)
    pairs = zip(target.buffers(), _encoded_like(target, source), strict=True)
    fitted = [(mine, _fitting(target, mine, new)) for mine, new in pairs]  # all, before any write
    for mine, new in fitted:
        func(mine, new, *args[2:], **kwargs)
    target._edits.count += 1
    return target


def _fitting(target: QuantTensor, mine: Tensor, new: Tensor) -> Tensor:
    """`new` in the shape and dtype that the target's buffer has (checkpoints store their own).

    Raises:
        FrozenWeightError: it holds another number of bytes.
    """
    if new.dtype is not mine.dtype and new.element_size() == mine.element_size():
        new = new.contiguous().view(mine.dtype)
    if new.dtype is not mine.dtype or new.numel() != mine.numel():
        raise FrozenWeightError(
            f"a {target.codec} weight of shape {tuple(target.shape)} keeps a buffer of shape "
            f"{tuple(mine.shape)} ({mine.dtype}) as its checkpoint stored it, and new values "
            f"encode to {tuple(new.shape)} ({new.dtype}). Nothing was written. Replace the "
            f"parameter instead: module.weight = Parameter(quantize(values, {target.codec!r}), "
            f"requires_grad=False)."
        )
    return new.reshape(mine.shape)


def _encoded_like(target: QuantTensor, source: Tensor) -> tuple[Tensor, ...]:
    """Buffers in the target's format that hold the source's values.

    NaN and infinity are refused before the target is touched. The source's values are rounded to
    the target's dtype first, as copy_ between ordinary tensors does.
    """
    if isinstance(source, QuantTensor):
        if source._spec == target._spec and source.shape == target.shape:
            return source.buffers()
        source = source.dequantize()
    device = target.buffers()[0].device
    dense = source.detach().to(device, target.dtype).expand(target.shape)
    codec = codec_named(target.codec)
    if target._spec.outliers:
        channels = target.buffers()[-1].view(-1)
        rest = outliers.without(target._spec)
        return outliers.encode_with(codec, dense, rest, channels, None)[1]
    if target._spec.channel_scale:
        factors = target.buffers()[-1]
        return channel_scale.encode_with(codec, dense, target._spec, factors, None)
    return codec.encode_checked(dense, target._spec, None)


@_handles(aten.select.int)
def _select(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """One matrix of a stack, decoded without the others where its codes stand alone."""
    source, dim, index = args
    if dim != 0 or source.stack_rows() is None:
        return _on_dequantized(func, args, kwargs)
    at = range(source.shape[0])[index]
    return shown(func, lambda: source.stack_part(at, 1).dequantize()[0])


_VALUE_FREE = (
    aten.empty_like.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.new_empty.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
)


@_handles(*_VALUE_FREE)
def _shape_only(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Ordinary tensors shaped like the weight, without decoding it."""
    source: QuantTensor = args[0]
    device = source.buffers()[0].device
    stand_in = torch.empty((), dtype=source.dtype, device=device).expand(source.shape)
    if func in _VALUE_FREE[:6]:
        kwargs = {"memory_format": torch.contiguous_format, **kwargs}
    return func(stand_in, *args[1:], **kwargs)
