"""FP8: 8-bit floating-point codes (e4m3), scaled per block of 32 or per tile.

    q[i]  = nearest e4m3 value of fp32(w[i]) / scale, ties to even
    value = fp32(e4m3[q[i]] * scale), then rounded to the output dtype

Where a code would decode to infinity in the weight's dtype, the value takes the code below.

Layout "e8m0" (the default; MXFP8 of OCP MX v1.0): blocks of 32 of the flattened tensor; scale = the
smallest power of two for which absmax / scale is at most 448.

Layout "tile": a fp32 scale = absmax / 448 per tile of `rows` x `block_size` of the last two
dimensions; tiles at the right and lower edges may be smaller, and each leading index (an expert)
has tiles of its own. Codes have the weight's shape, scales [..., ceil(N / rows),
ceil(K / block_size)]. 128 x 128 is DeepSeek's block FP8 (their weight_scale_inv multiplies), 1 x K
one scale per row (what FP8 tensor cores of sm_89 and sm_90 take), N x K one per matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ts_quant.codecs import blockwise, channel_scale, outliers
from ts_quant.codecs.base import DEFAULT_BLOCK_SIZE, QuantSpec, register
from ts_quant.codecs.blockwise import BlockwiseCodec, overflow_limit
from ts_quant.codecs.lookup import e4m3_values
from ts_quant.codecs.scales import UnitRange
from ts_quant.codecs.stored import BufferSize
from ts_quant.errors import OptionError

LARGEST = 448.0
_TILE = 128
_LAYOUTS = ("row", "tile", "tensor")
_SMALLEST_NORMAL = 2.0**-126


class Fp8Codec(BlockwiseCodec):
    """8.25 bits per weight in blocks of 32; see the module's docstring."""

    name = "fp8"
    error_rank_order = 2
    scale_layouts: tuple[str, ...] = ("e8m0", "tile")
    code_dtype = torch.uint8
    codes_per_byte = 1
    unit = UnitRange(LARGEST, round_up=False)
    fixed_block_size = 32
    rounds_up = True
    triton_module = "ts_quant.codecs.byte_triton"

    def spec_for(
        self,
        shape: Sequence[int],
        block_size: int = DEFAULT_BLOCK_SIZE,
        double_quant: bool = False,
        layout: str | None = None,
    ) -> QuantSpec:
        if layout not in _LAYOUTS:
            return super().spec_for(shape, block_size, double_quant, layout)
        super().spec_for(shape, block_size, double_quant)
        _, rows, columns = matrices(shape)
        tiles = {"row": (1, columns), "tile": (_TILE, _TILE), "tensor": (rows, columns)}
        height, width = tiles[layout]
        return QuantSpec(self.name, max(width, 1), "tile", max(height, 1))

    def _scales(self, double_quant: bool, layout: str | None) -> str:
        if layout is not None and layout != "e8m0":
            raise OptionError(
                f"layout={layout!r} is not accepted for 'fp8'; expected 'e8m0' (blocks of 32), "
                f"'row', 'tile' (128 x 128), 'tensor', or None"
            )
        return super()._scales(double_quant, layout)

    def buffer_names(self, spec: QuantSpec) -> tuple[str, ...]:
        return ("codes", "scale", *channel_scale.names(spec), *outliers.names(spec))

    def code_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return tuple(shape)

    def buffer_sizes(self, spec: QuantSpec, shape: Sequence[int]) -> list[BufferSize]:
        if spec.scales != "tile":
            return super().buffer_sizes(spec, shape)
        tiles = tile_shape(spec, shape)
        codes, scale = (self.code_dtype, tuple(shape)), (torch.float32, tiles)
        kept = [*channel_scale.sizes(spec, shape), *outliers.sizes(spec, shape)]
        return [codes, scale, *kept, scale]

    def encode_chunk(
        self,
        values: Tensor,
        scales: Tensor,
        codes: Tensor,
        start: int,
        stop: int,
        limit: float | None,
    ) -> None:
        q = e4m3_codes(values.div_(scales))
        codes[start:stop].copy_(_below(q, scales, limit).view(-1))

    def decode_chunk(self, codes: Tensor, start: int, stop: int) -> Tensor:
        return e4m3_values(codes[start:stop])

    def encode_reference(self, weight: Tensor, spec: QuantSpec) -> list[Tensor]:
        if spec.scales != "tile":
            return super().encode_reference(weight, spec)
        codes = weight.new_empty(weight.shape, dtype=torch.uint8)
        absmax = weight.new_zeros(tile_shape(spec, weight.shape), dtype=torch.float32)
        dense = weight.reshape(matrices(weight.shape))
        chunk = blockwise._ENCODE_VALUES_CPU if weight.is_cpu else blockwise._VALUES_GPU
        for part in _bands(spec, weight.shape, chunk):
            values = part.of(dense).to(torch.float32)
            found = part.scales(absmax)
            torch.maximum(found, _tile_absmax(values, spec.block_size), out=found)
        scale = absmax / absmax.new_tensor(LARGEST)
        scale = scale.clamp_(min=_SMALLEST_NORMAL).masked_fill_(absmax == 0, 1.0)
        limit = overflow_limit(absmax, weight.dtype)
        for part in _bands(spec, weight.shape, chunk):
            values = part.of(dense).to(torch.float32)
            spread = _spread(part.scales(scale), spec.block_size, values.shape[-1])
            q = _below(e4m3_codes(values / spread), spread, limit)
            part.of(codes.view(dense.shape)).copy_(q)
        return [codes, scale, absmax]

    def decode_reference(self, buffers: Sequence[Tensor], spec: QuantSpec, out: Tensor) -> None:
        if spec.scales != "tile":
            super().decode_reference(buffers, spec, out)
            return
        codes, scale = buffers
        shape = matrices(out.shape)
        chunk = blockwise._DECODE_VALUES_CPU if out.is_cpu else blockwise._VALUES_GPU
        scale = scale.view(tile_shape(spec, out.shape))
        for part in _bands(spec, out.shape, chunk):
            values = e4m3_values(part.of(codes.view(shape)))
            spread = _spread(part.scales(scale), spec.block_size, values.shape[-1])
            part.of(out.view(shape)).copy_(values.mul_(spread))


def e4m3_codes(x: Tensor) -> Tensor:
    """Codes (uint8) of fp32 values in units of their scale; x is overwritten.

    Division by a rounded scale may end just above 448, and what lies beyond 464 has no e4m3 value.
    """
    return x.clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)


def _below(codes: Tensor, scales: Tensor, limit: float | None) -> Tensor:
    """The codes, one lower where they would decode to a magnitude above the limit."""
    if limit is None:
        return codes
    over = e4m3_values(codes).mul_(scales).abs_() > limit
    return codes.sub_(over.to(torch.uint8))


def matrices(shape: Sequence[int]) -> tuple[int, int, int]:
    """A shape as (leading indices, rows, columns); a vector is one row."""
    if len(shape) < 2:
        return 1, 1, shape[0] if shape else 1
    leading = 1
    for size in shape[:-2]:
        leading *= size
    return leading, shape[-2], shape[-1]


def tile_shape(spec: QuantSpec, shape: Sequence[int]) -> tuple[int, int, int]:
    """Shape of the scales of layout "tile": (leading, ceil(N / rows), ceil(K / block_size))."""
    leading, n_rows, n_columns = matrices(shape)
    return leading, -(-n_rows // spec.rows), -(-n_columns // spec.block_size)


class _Band:
    """Consecutive rows of one leading index: whole rows of tiles, or a part of one."""

    def __init__(self, leading: int, first: int, tiles: int, start: int, height: int) -> None:
        self.leading, self.first, self.tiles = leading, first, tiles
        self.start, self.height = start, height

    def of(self, dense: Tensor) -> Tensor:
        """[tiles, height, K] of a contiguous [leading, N, K]."""
        rows = dense[self.leading, self.start : self.start + self.tiles * self.height]
        return rows.view(self.tiles, self.height, rows.shape[-1])

    def scales(self, scale: Tensor) -> Tensor:
        """[tiles, column tiles]."""
        return scale[self.leading, self.first : self.first + self.tiles]


def _bands(spec: QuantSpec, shape: Sequence[int], chunk_values: int) -> Iterator[_Band]:
    """Cut a weight into bands of about that many values, to bound temporary memory."""
    leading, n_rows, n_columns = matrices(shape)
    if n_rows == 0 or n_columns == 0:
        return
    height = spec.rows
    whole = n_rows // height
    at_once = max(chunk_values // n_columns, 1)  # rows
    tiles = at_once // height
    for index in range(leading):
        if tiles:
            for first in range(0, whole, tiles):
                count = min(tiles, whole - first)
                yield _Band(index, first, count, first * height, height)
        # Tiles too tall to be done at once, and the last, lower row of tiles.
        for first in range(whole if tiles else 0, -(-n_rows // height)):
            stop = min((first + 1) * height, n_rows)
            for start in range(first * height, stop, at_once):
                yield _Band(index, first, 1, start, min(at_once, stop - start))


def _tile_absmax(values: Tensor, width: int) -> Tensor:
    """fp32 [tiles, column tiles] of [tiles, height, K]."""
    columns = values.abs().amax(dim=1)
    pad = -columns.shape[1] % width
    columns = torch.nn.functional.pad(columns, (0, pad))
    return columns.view(columns.shape[0], -1, width).amax(dim=2)


def _spread(scales: Tensor, width: int, n_columns: int) -> Tensor:
    """[tiles, 1, K] of [tiles, column tiles]."""
    return scales.repeat_interleave(width, dim=1)[:, None, :n_columns]


class Fp8RowCodec(Fp8Codec):
    """FP8 with a fp32 scale per row: what FP8 tensor cores of sm_89 and sm_90 take as it is.

    8.01 bits per weight for rows of 5120. Another name of `quantize(w, "fp8", layout="row")`: its
    QuantTensors are of codec "fp8".
    """

    name = "fp8_row"
    stored_as = "fp8"
    scale_layouts = ("tile",)

    def spec_for(
        self,
        shape: Sequence[int],
        block_size: int = DEFAULT_BLOCK_SIZE,
        double_quant: bool = False,
        layout: str | None = None,
    ) -> QuantSpec:
        if layout not in (None, "row"):
            raise OptionError(
                f"layout={layout!r} is not accepted for 'fp8_row': it has one scale per row. Use "
                f"'fp8' for other layouts"
            )
        _refuse_double(double_quant)
        return CODEC.spec_for(shape, block_size, False, "row")

    def bytes_per_weight(
        self, block_size: int = DEFAULT_BLOCK_SIZE, double_quant: bool = False
    ) -> float:
        """1.0: scales are left out, 4 bytes a row."""
        _refuse_double(double_quant)
        CODEC.bytes_per_weight(block_size)  # refuses what "fp8" refuses
        return 1.0


def _refuse_double(double_quant: bool) -> None:
    if double_quant:
        raise OptionError(
            "double_quant=True is not accepted for 'fp8_row', which has one scale per row: there "
            "is next to nothing to gain. Leave it False (it is for 'int8' and 'nf4')"
        )


CODEC = register(Fp8Codec())
ROW = register(Fp8RowCodec())
