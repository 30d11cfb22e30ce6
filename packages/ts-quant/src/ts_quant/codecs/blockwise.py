"""Formats of one code per value and one fp32 scale per block: their operators and their loops.

A tensor is flattened; block b covers the elements [b * block_size, (b + 1) * block_size), the
last block may be shorter, and the scale of a block is its largest magnitude (absmax). A subclass
of `BlockwiseCodec` says how a chunk of blocks becomes codes and back; this module makes of it the
operators `ts_quant::NAME_encode`, `NAME_decode` and `NAME_decode_out`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ts_quant.codecs.backend import cuda_decoder
from ts_quant.codecs.base import Codec

_ENCODE_VALUES_CPU = 1 << 18
_DECODE_VALUES_CPU = 1 << 20
_VALUES_GPU = 1 << 22

_SMALLEST_NORMAL = 2.0**-126
_SCALE_UP = 2.0**64


class BlockwiseCodec(Codec):
    """A format with the buffers `codes` and `absmax`, fp32 [ceil(n / block_size)].

    Attributes:
        code_dtype: dtype of `codes`.
        triton_module: module with the Triton decoder,
            `decode_out(codes, absmax, block_size, out)`; imported at the first CUDA decode.
    """

    code_dtype: torch.dtype
    triton_module: str

    def __init__(self) -> None:
        _define_operators(self)
        ops = torch.ops.ts_quant
        self._encode_op: Any = getattr(ops, f"{self.name}_encode").default
        self._decode_op: Any = getattr(ops, f"{self.name}_decode").default
        self._decode_out_op: Any = getattr(ops, f"{self.name}_decode_out").default

    @abstractmethod
    def code_shape(self, n_values: int) -> tuple[int, ...]:
        """Shape of `codes` for a tensor of that many elements."""

    @abstractmethod
    def encode_chunk(
        self, values: Tensor, scales: Tensor, codes: Tensor, start: int, stop: int
    ) -> None:
        """Write the codes of the elements [start, stop).

        Args:
            values: fp32 scratch [blocks, width]; may be overwritten.
            scales: fp32 [blocks, 1].
            codes: the whole tensor's codes, flat.
            start: a multiple of the block size.
            stop: likewise, or the end of the tensor.
        """

    @abstractmethod
    def decode_chunk(self, codes: Tensor, start: int, stop: int) -> Tensor:
        """A new fp32 tensor [stop - start]: values in units of their block's scale."""

    def encode_buffers(self, weight: Tensor, block_size: int) -> tuple[Tensor, ...]:
        codes, absmax = self._encode_op(weight, block_size)
        return codes, absmax

    def decode(
        self, buffers: Sequence[Tensor], block_size: int, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        codes, absmax = buffers
        if _eager(codes):
            out = torch.empty(shape, dtype=dtype, device=codes.device)
            self.run_decode(codes, absmax, block_size, out)
            return out
        decoded: Tensor = self._decode_op(codes, absmax, block_size, shape, dtype)
        return decoded

    def decode_out(self, buffers: Sequence[Tensor], block_size: int, out: Tensor) -> None:
        codes, absmax = buffers
        if _eager(codes) and _eager(out):
            self.run_decode(codes, absmax, block_size, out)
        else:
            self._decode_out_op(codes, absmax, block_size, out)

    def run_decode(self, codes: Tensor, absmax: Tensor, block_size: int, out: Tensor) -> None:
        """Decode plain tensors: the Triton kernel on a GPU that has one, else the reference."""
        kernel = cuda_decoder(self.triton_module, out.dtype) if codes.is_cuda else None
        (kernel or self.decode_reference)(codes, absmax, block_size, out)

    def encode_reference(self, weight: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        """The encoder, in plain PyTorch on every device: the same bytes everywhere."""
        n = weight.numel()
        codes = weight.new_empty(self.code_shape(n), dtype=self.code_dtype)
        absmax = weight.new_empty(block_count(n, block_size), dtype=torch.float32)
        flat, flat_codes = weight.reshape(-1), codes.view(-1)
        chunk = _ENCODE_VALUES_CPU if weight.device.type == "cpu" else _VALUES_GPU
        for start, stop in _chunks(n, block_size, chunk):
            width = min(block_size, stop - start)
            values = flat[start:stop].to(torch.float32, copy=True).view(-1, width)
            first = start // block_size
            scales = absmax[first : first + values.shape[0]]
            torch.amax(values.abs(), dim=1, out=scales)
            self.encode_chunk(values, scales.view(-1, 1), flat_codes, start, stop)
        return codes, absmax

    def decode_reference(self, codes: Tensor, absmax: Tensor, block_size: int, out: Tensor) -> None:
        """The decoder in plain PyTorch: any device, any floating dtype; `out` contiguous."""
        flat, flat_codes = out.view(-1), codes.view(-1)
        chunk = _DECODE_VALUES_CPU if out.device.type == "cpu" else _VALUES_GPU
        for start, stop in _chunks(flat.numel(), block_size, chunk):
            width = min(block_size, stop - start)
            values = self.decode_chunk(flat_codes, start, stop).view(-1, width)
            first = start // block_size
            scales = absmax[first : first + values.shape[0], None]
            target = flat[start:stop].view(values.shape)
            if out.dtype is torch.float32:
                torch.mul(values, scales, out=target)
            else:
                target.copy_(values.mul_(scales))


def _eager(tensor: Tensor) -> bool:
    """Whether the operators' dispatch, a large part of a small call's time, may be left out.

    It is needed where something records operators: torch.compile and tensors that are not plain.
    """
    return type(tensor) is Tensor and not torch.compiler.is_compiling()


def block_count(n_values: int, block_size: int) -> int:
    """Number of blocks that cover `n_values`, the last one possibly partial."""
    return -(-n_values // block_size)


def normalize_(values: Tensor, scales: Tensor) -> Tensor:
    """Multiply each block by fp32(1 / absmax), in place; blocks of zeros stay zeros.

    1 / absmax overflows for the smallest denormals, so blocks whose absmax is denormal are first
    scaled by a power of two, which changes no bit of the result of any other block.

    Args:
        values: fp32 [blocks, width].
        scales: fp32 [blocks, 1].
    """
    up = torch.ones_like(scales).masked_fill_(scales < _SMALLEST_NORMAL, _SCALE_UP)
    inverse = torch.reciprocal(scales * up).masked_fill_(scales == 0, 0.0)
    return values.mul_(up).mul_(inverse)


def _chunks(n_values: int, block_size: int, chunk_values: int) -> Iterator[tuple[int, int]]:
    """Cut [0, n_values) into (start, stop) ranges, to bound temporary memory.

    Every range is rectangular: whole blocks, or the one partial block at the end.
    """
    step = max(chunk_values // block_size, 1) * block_size
    whole = n_values - n_values % block_size
    for start in range(0, whole, step):
        yield start, min(start + step, whole)
    if whole < n_values:
        yield whole, n_values


def _define_operators(codec: BlockwiseCodec) -> None:
    """Schema, fake and default implementation of a codec's operators."""
    define, library = torch.library.define, torch.library
    name = f"ts_quant::{codec.name}"

    define(f"{name}_encode", "(Tensor weight, int block_size) -> (Tensor codes, Tensor absmax)")

    def encode_fake(weight: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
        n = weight.numel()
        codes = weight.new_empty(codec.code_shape(n), dtype=codec.code_dtype)
        return codes, weight.new_empty((block_count(n, block_size),), dtype=torch.float32)

    library.register_fake(f"{name}_encode", encode_fake)
    library.impl(f"{name}_encode", "CompositeExplicitAutograd", codec.encode_reference)

    define(
        f"{name}_decode_out",
        "(Tensor codes, Tensor absmax, int block_size, Tensor(a!) out) -> ()",
    )

    def decode_out_fake(codes: Tensor, absmax: Tensor, block_size: int, out: Tensor) -> None:
        return None

    library.register_fake(f"{name}_decode_out", decode_out_fake)
    library.impl(f"{name}_decode_out", "CompositeExplicitAutograd", codec.decode_reference)
    library.impl(f"{name}_decode_out", "CUDA", codec.run_decode)

    define(
        f"{name}_decode",
        "(Tensor codes, Tensor absmax, int block_size, SymInt[] shape, ScalarType dtype) -> Tensor",
    )

    def decode_fake(
        codes: Tensor, absmax: Tensor, block_size: int, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        return codes.new_empty(shape, dtype=dtype)

    def decode(
        codes: Tensor, absmax: Tensor, block_size: int, shape: Sequence[int], dtype: torch.dtype
    ) -> Tensor:
        out = torch.empty(shape, dtype=dtype, device=codes.device)
        codec.run_decode(codes, absmax, block_size, out)
        return out

    library.register_fake(f"{name}_decode", decode_fake)
    library.impl(f"{name}_decode", "CompositeExplicitAutograd", decode)
