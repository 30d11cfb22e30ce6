"""How the scales of flattened blocks are stored, and what a stored scale is worth in fp32.

    layout     buffers                                      scale of block i
    float32    absmax fp32 [b]                              absmax[i]
    log8       absmax_codes uint8 [b],                      2^((absmax_codes[i] - 255) / 16)
               absmax_scale fp32 [ceil(b / 256)]              * absmax_scale[i // 256]; code 0: 0
    nested     absmax_codes uint8 [b],                      nested_map[absmax_codes[i]]
               nested_absmax fp32 [ceil(b / 256)],            * nested_absmax[i // 256]
               nested_map fp32 [256], nested_offset fp32 [1]  + nested_offset
    e8m0       scale uint8 [b]                              2^(scale[i] - 127); 255: NaN
    e4m3       scale uint8 (e4m3) [b], global_scale [1]     fp32(scale[i]) * global_scale
    e4m3_div   as e4m3                                      fp32(scale[i]) / global_scale

Each product, sum or quotient is rounded to fp32 once. "float32" is bitsandbytes' plain layout and
int8's, "log8" is trainstream's `double_quant`, "nested" is bitsandbytes' double quantization
(read only), "e8m0" that of the OCP MX formats, "e4m3" ModelOpt's NVFP4 and "e4m3_div" that of
compressed-tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ts_quant.codecs import tables
from ts_quant.errors import OptionError

GROUP = 256
"""Blocks that share the fp32 scale of their one-byte scales."""

_SMALLEST_NORMAL = 2.0**-126
_E4M3_MAX = 448.0
_SMALLEST_E4M3 = 2.0**-9


@dataclass(frozen=True)
class UnitRange:
    """The values that a format's codes stand for before they are scaled.

    Attributes:
        largest: the largest magnitude. A block's scale is meant to be absmax / largest.
        round_up: whether a scale must not be rounded below that, because the step at the top is
            so small that clipping would cost more than a wider step.
    """

    largest: float
    round_up: bool


class ScaleLayout(ABC):
    """One way to store a fp32 scale per block.

    Attributes:
        name: as in the table above.
        buffer_names: of the buffers, in order.
        bytes_per_block: stored bytes per block, for a tensor of many blocks.
    """

    name: str
    buffer_names: tuple[str, ...]
    bytes_per_block: float

    @abstractmethod
    def sizes(self, n_blocks: int) -> list[tuple[torch.dtype, int]]:
        """Dtype and number of elements of each buffer."""

    @abstractmethod
    def encode(self, absmax: Tensor, unit: UnitRange) -> tuple[list[Tensor], Tensor]:
        """The buffers for fp32 absmax [b], and the fp32 scales [b] that they stand for."""

    @abstractmethod
    def read(self, buffers: Sequence[Tensor], first: int, count: int) -> Tensor:
        """fp32 scales of the blocks [first, first + count); may be a view of a buffer."""


class Float32Scales(ScaleLayout):
    name = "float32"
    buffer_names = ("absmax",)
    bytes_per_block = 4.0

    def sizes(self, n_blocks: int) -> list[tuple[torch.dtype, int]]:
        return [(torch.float32, n_blocks)]

    def encode(self, absmax: Tensor, unit: UnitRange) -> tuple[list[Tensor], Tensor]:
        return [absmax], absmax

    def read(self, buffers: Sequence[Tensor], first: int, count: int) -> Tensor:
        return buffers[0][first : first + count]


class Log8Scales(ScaleLayout):
    """One-byte logarithmic scales; the relative error of a scale is at most 2.2 % (nearest) or
    4.4 % (rounded up), down to 2^-15.8 of the group's largest, and scales below that become it.
    """

    name = "log8"
    buffer_names = ("absmax_codes", "absmax_scale")
    bytes_per_block = 1.0 + 4.0 / GROUP

    def sizes(self, n_blocks: int) -> list[tuple[torch.dtype, int]]:
        return [(torch.uint8, n_blocks), (torch.float32, -(-n_blocks // GROUP))]

    def encode(self, absmax: Tensor, unit: UnitRange) -> tuple[list[Tensor], Tensor]:
        groups = -(-absmax.numel() // GROUP)
        padded = torch.nn.functional.pad(absmax, (0, groups * GROUP - absmax.numel()))
        padded = padded.view(groups, GROUP)
        largest = torch.amax(padded, dim=1) if groups else padded.new_empty(0)
        ratio = padded / largest.masked_fill(largest == 0, 1.0)[:, None]
        thresholds = tables.log8_thresholds(absmax.device, unit.round_up)
        codes = torch.bucketize(ratio, thresholds, out_int32=True).add_(1).clamp_(max=255)
        codes = codes.masked_fill_(padded == 0, 0).to(torch.uint8).view(-1)[: absmax.numel()]
        buffers = [codes.clone(), largest]
        return buffers, self.read(buffers, 0, absmax.numel())

    def read(self, buffers: Sequence[Tensor], first: int, count: int) -> Tensor:
        codes, largest = buffers
        factor = torch.index_select(
            tables.log8(codes.device), 0, codes[first : first + count].to(torch.int32)
        )
        return factor.mul_(_of_groups(largest, first, count))


class NestedScales(ScaleLayout):
    name = "nested"
    buffer_names = ("absmax_codes", "nested_absmax", "nested_map", "nested_offset")
    bytes_per_block = 1.0 + 4.0 / GROUP

    def sizes(self, n_blocks: int) -> list[tuple[torch.dtype, int]]:
        groups = -(-n_blocks // GROUP)
        return [
            (torch.uint8, n_blocks),
            (torch.float32, groups),
            (torch.float32, 256),
            (torch.float32, 1),
        ]

    def encode(self, absmax: Tensor, unit: UnitRange) -> tuple[list[Tensor], Tensor]:
        raise OptionError(
            "bitsandbytes' nested scales are read from checkpoints, not written: use "
            "double_quant=True for one-byte scales, or quantize into a new tensor"
        )

    def read(self, buffers: Sequence[Tensor], first: int, count: int) -> Tensor:
        codes, absmax, mapping, offset = buffers
        factor = torch.index_select(mapping, 0, codes[first : first + count].to(torch.int32))
        return factor.mul_(_of_groups(absmax, first, count)).add_(offset)


class E8m0Scales(ScaleLayout):
    """Powers of two, the smallest that holds absmax without clipping."""

    name = "e8m0"
    buffer_names = ("scale",)
    bytes_per_block = 1.0

    def sizes(self, n_blocks: int) -> list[tuple[torch.dtype, int]]:
        return [(torch.uint8, n_blocks)]

    def encode(self, absmax: Tensor, unit: UnitRange) -> tuple[list[Tensor], Tensor]:
        # absmax = 1.m * 2^(e - 127). With largest = 1.t * 2^l the exponent is e - 127 - l, and one
        # more where m > t. Integers only, so the same everywhere.
        top = torch.tensor(unit.largest, dtype=torch.float32, device="cpu").view(torch.int32)
        bits = absmax.view(torch.int32)
        above = (bits & 0x7FFFFF) > (int(top) & 0x7FFFFF)
        byte = (bits >> 23) - (int(top) >> 23) + 127 + above.to(torch.int32)
        scale = byte.clamp_(0, 254).to(torch.uint8)
        return [scale], self.read([scale], 0, absmax.numel())

    def read(self, buffers: Sequence[Tensor], first: int, count: int) -> Tensor:
        byte = buffers[0][first : first + count].to(torch.int32)
        return torch.index_select(tables.e8m0(byte.device), 0, byte)


class E4m3Scales(ScaleLayout):
    """e4m3 scales relative to one fp32 number, so that the largest is 448."""

    buffer_names = ("scale", "global_scale")
    bytes_per_block = 1.0

    def __init__(self, name: str, divide: bool) -> None:
        self.name = name
        self.divide = divide

    def sizes(self, n_blocks: int) -> list[tuple[torch.dtype, int]]:
        return [(torch.uint8, n_blocks), (torch.float32, 1)]

    def encode(self, absmax: Tensor, unit: UnitRange) -> tuple[list[Tensor], Tensor]:
        number = absmax.new_tensor  # tensors: by a Python number torch multiplies on a GPU
        amax = absmax.amax().view(1) if absmax.numel() else absmax.new_zeros(1)
        product = number(unit.largest * _E4M3_MAX)
        if self.divide:
            # 2^120 keeps the quotient finite; scales then end below 448.
            global_scale = (product / amax).clamp_(max=2.0**120)
            scale = absmax * global_scale / number(unit.largest)
        else:
            global_scale = (amax / product).clamp_(min=_SMALLEST_NORMAL)
            scale = absmax / (global_scale * unit.largest)
        scale = scale.clamp_(_SMALLEST_E4M3, _E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
        buffers = [scale, global_scale]
        return buffers, self.read(buffers, 0, absmax.numel())

    def read(self, buffers: Sequence[Tensor], first: int, count: int) -> Tensor:
        scale, global_scale = buffers
        byte = scale[first : first + count].to(torch.int32)
        value = torch.index_select(tables.e4m3(byte.device), 0, byte)
        return value.div_(global_scale) if self.divide else value.mul_(global_scale)


def _of_groups(values: Tensor, first: int, count: int) -> Tensor:
    """values[i // GROUP] for i in [first, first + count)."""
    start = first // GROUP
    stop = -(-(first + count) // GROUP)
    spread = values[start:stop].repeat_interleave(GROUP)
    return spread[first - start * GROUP :][:count]


LAYOUTS: dict[str, ScaleLayout] = {
    layout.name: layout
    for layout in (
        Float32Scales(),
        Log8Scales(),
        NestedScales(),
        E8m0Scales(),
        E4m3Scales("e4m3", divide=False),
        E4m3Scales("e4m3_div", divide=True),
    )
}
