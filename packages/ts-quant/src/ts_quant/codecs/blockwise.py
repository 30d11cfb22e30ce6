"""Formats of one code per value and one scale per block of the flattened tensor.

Block b covers the flattened elements [b * block_size, (b + 1) * block_size); the last block may be
shorter. Its scale comes from its largest magnitude (absmax) and is stored in one of the layouts of
`scales`. A subclass of `BlockwiseCodec` says how a chunk of blocks becomes codes and back.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ts_quant.codecs import channel_scale, outliers
from ts_quant.codecs.base import DEFAULT_BLOCK_SIZE, QuantSpec, check_block_size
from ts_quant.codecs.scales import LAYOUTS, UnitRange
from ts_quant.codecs.stored import BufferSize, StoredCodec
from ts_quant.errors import OptionError

_ENCODE_VALUES_CPU = 1 << 18
_DECODE_VALUES_CPU = 1 << 20
_VALUES_GPU = 1 << 22

_SMALLEST_NORMAL = 2.0**-126
_SCALE_UP = 2.0**64


class BlockwiseCodec(StoredCodec):
    """A format with the buffer `codes` and the scales of a flattened tensor's blocks.

    Attributes:
        code_dtype: dtype of `codes`.
        codes_per_byte: 1 or 2.
        unit: the range of the values that codes stand for.
        fixed_block_size: the format's block size, or None where the user may choose.
        rounds_up: whether a block's largest value may decode to more than itself, beyond the range
            of the weight's dtype if it is near its end; `encode_chunk` then gets a `limit`.
    """

    code_dtype: torch.dtype
    codes_per_byte: int
    unit: UnitRange
    fixed_block_size: int | None = None
    rounds_up = False

    def code_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of `codes` for a tensor of that shape."""
        n_values = 1
        for size in shape:
            n_values *= size
        return (-(-n_values // self.codes_per_byte),)

    @abstractmethod
    def encode_chunk(
        self,
        values: Tensor,
        scales: Tensor,
        codes: Tensor,
        start: int,
        stop: int,
        limit: float | None,
    ) -> None:
        """Write the codes of the elements [start, stop).

        Args:
            values: fp32 scratch [blocks, width]; may be overwritten.
            scales: fp32 [blocks, 1].
            codes: the whole tensor's codes, flat.
            start: a multiple of the block size.
            stop: likewise, or the end of the tensor.
            limit: no decoded magnitude may exceed this; None where none can.
        """

    @abstractmethod
    def decode_chunk(self, codes: Tensor, start: int, stop: int) -> Tensor:
        """A new fp32 tensor [stop - start]: values in units of their block's scale."""

    # -- options -------------------------------------------------------------------------------

    def bytes_per_weight(
        self, block_size: int = DEFAULT_BLOCK_SIZE, double_quant: bool = False
    ) -> float:
        spec = self.spec_for((block_size,), block_size, double_quant)
        return 1 / self.codes_per_byte + LAYOUTS[spec.scales].bytes_per_block / spec.block_size

    def spec_for(
        self,
        shape: Sequence[int],
        block_size: int = DEFAULT_BLOCK_SIZE,
        double_quant: bool = False,
        layout: str | None = None,
    ) -> QuantSpec:
        check_block_size(block_size)
        scales = self._scales(double_quant, layout)
        return QuantSpec(self.name, self.fixed_block_size or block_size, scales)

    def _scales(self, double_quant: bool, layout: str | None) -> str:
        if not isinstance(double_quant, bool):
            raise OptionError(f"double_quant must be True or False, not {double_quant!r}")
        if double_quant and "log8" not in self.scale_layouts:
            raise OptionError(
                f"double_quant=True is not accepted for {self.name!r}, whose scales are one byte "
                f"each already; leave it False (it is for 'int8' and 'nf4')"
            )
        if layout is None:
            return "log8" if double_quant else self.scale_layouts[0]
        if layout not in self.scale_layouts or (double_quant and layout != "log8"):
            raise OptionError(
                f"layout={layout!r} with double_quant={double_quant} is not accepted for "
                f"{self.name!r}; expected one of {list(self.scale_layouts)}, or None"
            )
        return layout

    # -- buffers -------------------------------------------------------------------------------

    def buffer_names(self, spec: QuantSpec) -> tuple[str, ...]:
        scales = LAYOUTS[spec.scales].buffer_names
        return ("codes", *scales, *channel_scale.names(spec), *outliers.names(spec))

    def buffer_sizes(self, spec: QuantSpec, shape: Sequence[int]) -> list[BufferSize]:
        n_values = 1
        for size in shape:
            n_values *= size
        blocks = block_count(n_values, spec.block_size)
        scales = [(dtype, (n,)) for dtype, n in LAYOUTS[spec.scales].sizes(blocks)]
        codes = (self.code_dtype, self.code_shape(shape))
        kept = [*channel_scale.sizes(spec, shape), *outliers.sizes(spec, shape)]
        return [codes, *scales, *kept, (torch.float32, (blocks,))]

    def encode_reference(self, weight: Tensor, spec: QuantSpec) -> list[Tensor]:
        n, block_size = weight.numel(), spec.block_size
        codes = weight.new_empty(self.code_shape(weight.shape), dtype=self.code_dtype)
        absmax = weight.new_empty(block_count(n, block_size), dtype=torch.float32)
        flat, flat_codes = weight.reshape(-1), codes.view(-1)
        chunk = _ENCODE_VALUES_CPU if weight.device.type == "cpu" else _VALUES_GPU
        for start, stop in _chunks(n, block_size, chunk):
            values = _blocks(flat, start, stop, block_size)
            first = start // block_size
            torch.amax(values.abs_(), dim=1, out=absmax[first : first + values.shape[0]])
        buffers, scales = LAYOUTS[spec.scales].encode(absmax, self.unit)
        limit = overflow_limit(absmax, weight.dtype) if self.rounds_up else None
        for start, stop in _chunks(n, block_size, chunk):
            values = _blocks(flat, start, stop, block_size)
            first = start // block_size
            width = scales[first : first + values.shape[0]].view(-1, 1)
            self.encode_chunk(values, width, flat_codes, start, stop, limit)
        # Operators may not return one tensor twice.
        absmax = absmax.clone() if any(buffer is absmax for buffer in buffers) else absmax
        return [codes, *buffers, absmax]

    def decode_reference(self, buffers: Sequence[Tensor], spec: QuantSpec, out: Tensor) -> None:
        codes, *scale_buffers = buffers
        layout, block_size = LAYOUTS[spec.scales], spec.block_size
        flat, flat_codes = out.view(-1), codes.view(-1)
        scale_buffers = [buffer.view(-1) for buffer in scale_buffers]
        chunk = _DECODE_VALUES_CPU if out.device.type == "cpu" else _VALUES_GPU
        for start, stop in _chunks(flat.numel(), block_size, chunk):
            width = min(block_size, stop - start)
            values = self.decode_chunk(flat_codes, start, stop).view(-1, width)
            first = start // block_size
            scales = layout.read(scale_buffers, first, values.shape[0])[:, None]
            target = flat[start:stop].view(values.shape)
            if out.dtype is torch.float32:
                torch.mul(values, scales, out=target)
            else:
                target.copy_(values.mul_(scales))


def block_count(n_values: int, block_size: int) -> int:
    """Number of blocks that cover `n_values`, the last one possibly partial."""
    return -(-n_values // block_size)


def overflow_limit(absmax: Tensor, dtype: torch.dtype) -> float | None:
    """The largest finite value of the dtype (fp32 at most), if some block comes near it."""
    largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    near = absmax.numel() and bool((absmax > largest / 2).any())
    return largest if near else None


def normalize_(values: Tensor, scales: Tensor) -> Tensor:
    """Multiply each block by fp32(1 / scale), in place; blocks of scale 0 become zeros.

    1 / scale overflows for the smallest denormals, so blocks whose scale is denormal are first
    scaled by a power of two, which changes no bit of the result of any other block.

    Args:
        values: fp32 [blocks, width].
        scales: fp32 [blocks, 1].
    """
    up = torch.ones_like(scales).masked_fill_(scales < _SMALLEST_NORMAL, _SCALE_UP)
    inverse = torch.reciprocal(scales * up).masked_fill_(scales == 0, 0.0)
    return values.mul_(up).mul_(inverse)


def _blocks(flat: Tensor, start: int, stop: int, block_size: int) -> Tensor:
    """A fp32 copy of the elements [start, stop) as [blocks, width]."""
    width = min(block_size, stop - start)
    return flat[start:stop].to(torch.float32, copy=True).view(-1, width)


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
