"""NF4: 4-bit codes at the quantiles of a normal distribution, one fp32 absmax per block.

The codebook and the idea are from QLoRA (Dettmers et al. 2023, arXiv:2305.14314, appendix E);
codes, packing and scales are byte for byte those of bitsandbytes.

    q[i]  = number of thresholds strictly below fp32(w[i]) * fp32(1 / absmax)
    bytes = (q[2j] << 4) | q[2j + 1]             uint8 [ceil(n / 2), 1]
    value = fp32(code[q[i]]) * absmax, then rounded to the output dtype

A threshold is the fp32 midpoint of two neighbouring codes, so a tie takes the lower code. An odd
tensor's last low nibble is 7 (the code of zero). A block of zeros is stored as 0x77 on every
device; bitsandbytes writes 0x77 on a CPU and 0x00 on CUDA, and both decode to zeros. With one-byte
scales ("log8") absmax is the scale as it decodes, so codes fit the scale that is really used.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ts_quant.codecs.base import register
from ts_quant.codecs.blockwise import BlockwiseCodec, normalize_
from ts_quant.codecs.lookup import pair_values
from ts_quant.codecs.scales import UnitRange

CODEBOOK: tuple[float, ...] = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The 16 values; each is exactly representable in fp32."""

_ZERO_CODE = 7
_HALF_BINS = 512.0


@cache
@torch.inference_mode(False)
def _codebook_pairs(device: torch.device) -> Tensor:
    """For each byte, the fp32 values of its two codes, as one 8-byte integer: int64 [256].

    One lookup per byte instead of two, and 8-byte elements are copied whole by index_select.
    """
    code = torch.tensor(CODEBOOK, dtype=torch.float32, device="cpu")
    pairs = torch.stack([code.repeat_interleave(16), code.repeat(16)], dim=1)
    return pairs.view(torch.int64).view(-1).to(device)


@cache
@torch.inference_mode(False)
def _threshold_bins(device: torch.device) -> tuple[Tensor, Tensor]:
    """Per bin of `_bins`: the code at its lower end (uint8) and the threshold inside it (fp32).

    Bins are narrower than the gap between thresholds, so a bin holds one threshold at most
    (infinity where it holds none). Binning is monotonic, so a value in a higher bin than a
    threshold is above it and one in a lower bin is below it; within the same bin one comparison
    decides. That is exact and takes two small lookups instead of fifteen comparisons.
    """
    code = torch.tensor(CODEBOOK, dtype=torch.float32, device="cpu")
    thresholds = (code[1:] + code[:-1]) / 2
    bins = _bins(thresholds).long()
    n_bins = int(2 * _HALF_BINS) + 2
    lower = (bins[None, :] < torch.arange(n_bins, device="cpu")[:, None]).sum(dim=1).to(torch.uint8)
    inside = torch.full((n_bins,), float("inf"), dtype=torch.float32, device="cpu")
    inside[bins] = thresholds
    return lower.to(device), inside.to(device)


def _bins(x: Tensor) -> Tensor:
    """Bin number of each x in [-1, 1], from 0 to 1025 whatever x holds (NaN included)."""
    top = int(2 * _HALF_BINS) + 1
    return (x * _HALF_BINS).add_(_HALF_BINS).to(torch.int32).clamp_(0, top)


def _codes(x: Tensor) -> Tensor:
    """Codes (uint8, flat) of normalized values: how many thresholds are strictly below each."""
    lower, inside = _threshold_bins(x.device)
    x = x.view(-1)
    bins = _bins(x)
    above = x > torch.index_select(inside, 0, bins)
    return torch.index_select(lower, 0, bins).add_(above.view(torch.uint8))


class Nf4Codec(BlockwiseCodec):
    """4.5 bits per weight at the default block size; see the module's docstring."""

    name = "nf4"
    error_rank_order = 3
    scale_layouts = ("float32", "log8", "nested")
    code_dtype = torch.uint8
    codes_per_byte = 2
    unit = UnitRange(1.0, round_up=False)
    triton_module = "ts_quant.codecs.shuffle_triton"

    def code_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (*super().code_shape(shape), 1)

    def encode_chunk(
        self,
        values: Tensor,
        scales: Tensor,
        codes: Tensor,
        start: int,
        stop: int,
        limit: float | None,
    ) -> None:
        q = _codes(normalize_(values, scales))
        target = codes[start // 2 : (stop + 1) // 2]
        torch.bitwise_left_shift(q[0::2], 4, out=target)
        target[: q.numel() // 2].bitwise_or_(q[1::2])
        if q.numel() % 2:
            target[-1:].bitwise_or_(_ZERO_CODE)

    def decode_chunk(self, codes: Tensor, start: int, stop: int) -> Tensor:
        part = codes[start // 2 : (stop + 1) // 2]
        return pair_values(part, _codebook_pairs(codes.device))[: stop - start]


CODEC = register(Nf4Codec())
