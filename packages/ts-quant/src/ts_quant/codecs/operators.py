"""The operators `ts_quant::encode`, `ts_quant::decode` and `ts_quant::decode_out`.

    encode(Tensor weight, str codec, int block_size, str scales, int rows) -> Tensor[]
    decode(Tensor[] buffers, str codec, int block_size, str scales, int rows,
           SymInt[] shape, ScalarType dtype) -> Tensor
    decode_out(Tensor[] buffers, str codec, int block_size, str scales, int rows,
               Tensor(a!) out) -> ()

One schema serves every format: the strings and ints are the fields of `QuantSpec`. `encode`
returns the buffers in the order of the codec's `buffer_names`, then each block's absmax (fp32) by
which NaN and infinity are found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ts_quant.codecs.base import QuantSpec, codec_named

if TYPE_CHECKING:
    from ts_quant.codecs.stored import StoredCodec

_SPEC = "str codec, int block_size, str scales, int rows"


def _codec(spec: QuantSpec) -> StoredCodec:
    codec: Any = codec_named(spec.codec)
    found: StoredCodec = codec
    return found


def _encode(weight: Tensor, codec: str, block_size: int, scales: str, rows: int) -> list[Tensor]:
    spec = QuantSpec(codec, block_size, scales, rows)
    return _codec(spec).encode_reference(weight, spec)


def _encode_fake(
    weight: Tensor, codec: str, block_size: int, scales: str, rows: int
) -> list[Tensor]:
    spec = QuantSpec(codec, block_size, scales, rows)
    sizes = _codec(spec).buffer_sizes(spec, weight.shape)
    return [weight.new_empty(shape, dtype=dtype) for dtype, shape in sizes]


def _decode_out(
    buffers: Sequence[Tensor], codec: str, block_size: int, scales: str, rows: int, out: Tensor
) -> None:
    spec = QuantSpec(codec, block_size, scales, rows)
    _codec(spec).run_decode(buffers, spec, out)


def _decode_out_fake(
    buffers: Sequence[Tensor], codec: str, block_size: int, scales: str, rows: int, out: Tensor
) -> None:
    return None


def _decode(
    buffers: Sequence[Tensor],
    codec: str,
    block_size: int,
    scales: str,
    rows: int,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    spec = QuantSpec(codec, block_size, scales, rows)
    out = torch.empty(shape, dtype=dtype, device=buffers[0].device)
    _codec(spec).run_decode(buffers, spec, out)
    return out


def _decode_fake(
    buffers: Sequence[Tensor],
    codec: str,
    block_size: int,
    scales: str,
    rows: int,
    shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    return buffers[0].new_empty(shape, dtype=dtype)


def _define(name: str, schema: str, kernel: Any, fake: Any) -> Any:
    qualified = f"ts_quant::{name}"
    torch.library.define(qualified, schema)
    torch.library.impl(qualified, "CompositeExplicitAutograd", kernel)
    torch.library.register_fake(qualified, fake)
    return getattr(torch.ops.ts_quant, name).default


encode_op = _define("encode", f"(Tensor weight, {_SPEC}) -> Tensor[]", _encode, _encode_fake)
decode_op = _define(
    "decode",
    f"(Tensor[] buffers, {_SPEC}, SymInt[] shape, ScalarType dtype) -> Tensor",
    _decode,
    _decode_fake,
)
decode_out_op = _define(
    "decode_out",
    f"(Tensor[] buffers, {_SPEC}, Tensor(a!) out) -> ()",
    _decode_out,
    _decode_out_fake,
)


def fields(spec: QuantSpec) -> tuple[str, int, str, int]:
    """A spec as the operators take it."""
    return spec.codec, spec.block_size, spec.scales, spec.rows


def eager(tensor: Tensor) -> bool:
    """Whether the operators' dispatch, a large part of a small call's time, may be left out.

    It is needed where something records operators: torch.compile and tensors that are not plain.
    """
    return type(tensor) is Tensor and not torch.compiler.is_compiling()
