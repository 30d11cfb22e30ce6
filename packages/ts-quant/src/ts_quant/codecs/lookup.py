"""From codes to fp32 values in plain PyTorch, the fastest way a device has.

On a CPU `index_select` is quick but runs on one core, while indexing is three times slower per
element and runs on all of them; so where there are cores enough, four 4-bit codes are looked up at
once by indexing. e4m3 is decoded by integer arithmetic, which is vectorized and uses all cores.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ts_quant.codecs import tables

_THREADS_FOR_INDEXING = 4
_E4M3_IN_FP16 = -16512  # 0xBF80: the sign, and e4m3's exponent and mantissa in fp16's place


def pair_values(codes: Tensor, pairs: Tensor) -> Tensor:
    """The two fp32 values of each byte, flat, in a new tensor.

    Args:
        codes: uint8, flat and contiguous.
        pairs: int64 [256], each two fp32 values side by side; a cached table.
    """
    if (
        codes.device.type == "cpu"
        and torch.get_num_threads() >= _THREADS_FOR_INDEXING
        and codes.numel() % 2 == 0
        and codes.storage_offset() % 2 == 0
        and codes.data_ptr() % 2 == 0
    ):
        index = codes.view(torch.int16).to(torch.int64).bitwise_and_(0xFFFF)
        found: Tensor = torch.view_as_real(_quads(pairs)[index])
        return found.view(-1).view(torch.float32)
    return torch.index_select(pairs, 0, codes.to(torch.int32)).view(torch.float32)


@cache
@torch.inference_mode(False)
def _quads(pairs: Tensor) -> Tensor:
    """For each two bytes, their four fp32 values as one 16-byte number: complex128 [65536]."""
    index = torch.arange(65536, device=pairs.device)
    both = torch.stack([pairs[index & 255], pairs[index >> 8]], dim=1)
    return torch.view_as_complex(both.view(torch.float64))


def e4m3_values(codes: Tensor) -> Tensor:
    """fp32 values of e4m3 codes (uint8), in a new tensor of their shape."""
    if codes.device.type != "cpu":
        flat = torch.index_select(tables.e4m3(codes.device), 0, codes.reshape(-1).to(torch.int32))
        return flat.view(codes.shape)
    if codes.numel() == 0:
        return torch.empty(codes.shape, dtype=torch.float32, device="cpu")
    bits = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7)
    values = bits.bitwise_and_(_E4M3_IN_FP16).view(torch.float16).to(torch.float32).mul_(256.0)
    magnitude = codes & 127
    if int(magnitude.amax()) == 127:
        values.masked_fill_(magnitude == 127, float("nan"))
    return values
