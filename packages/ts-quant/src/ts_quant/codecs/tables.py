"""Constant tables: what one-byte scales and small floating-point codes stand for.

Each is made on the CPU in fp64, rounded once to fp32 and copied to the device, so that every
device reads the same values.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

LOG8_STEPS_PER_OCTAVE = 16
"""Codes 1 to 255 of a "log8" scale cover almost 16 octaves below the group's largest scale."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the e2m1 codes 0 to 7; bit 3 is the sign."""


def _table(values: list[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu").to(torch.float32).to(device)


@cache
@torch.inference_mode(False)
def e8m0(device: torch.device) -> Tensor:
    """fp32 [256]: 2^(byte - 127); byte 255 is NaN."""
    return _table([2.0 ** (byte - 127) for byte in range(255)] + [math.nan], device)


@cache
@torch.inference_mode(False)
def e4m3(device: torch.device) -> Tensor:
    """fp32 [256]: sign, 4 bits of exponent (bias 7), 3 of mantissa; 0x7f and 0xff are NaN."""
    magnitudes = []
    for code in range(128):
        exponent, mantissa = code >> 3, code & 7
        fraction = mantissa / 8 + (1 if exponent else 0)
        magnitudes.append(fraction * 2.0 ** (max(exponent, 1) - 7))
    magnitudes[127] = math.nan
    return _table(magnitudes + [-m for m in magnitudes], device)


@cache
@torch.inference_mode(False)
def e2m1(device: torch.device) -> Tensor:
    """fp32 [8]: the magnitudes of the e2m1 codes."""
    return _table(list(E2M1), device)


@cache
@torch.inference_mode(False)
def e2m1_pairs(device: torch.device) -> Tensor:
    """For each byte, its two values, the low nibble's first, as one 8-byte integer: int64 [256]."""
    values = _table([*E2M1, *(-value for value in E2M1)], torch.device("cpu"))
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1)
    return pairs.view(torch.int64).view(-1).to(device)


@cache
@torch.inference_mode(False)
def log8(device: torch.device) -> Tensor:
    """fp32 [256]: 2^((code - 255) / 16), and 0 for code 0."""
    steps = [2.0 ** ((code - 255) / LOG8_STEPS_PER_OCTAVE) for code in range(1, 256)]
    return _table([0.0, *steps], device)


@cache
@torch.inference_mode(False)
def log8_thresholds(device: torch.device, round_up: bool) -> Tensor:
    """fp32 [254]: a ratio above entry k takes at least the code k + 2."""
    table = log8(torch.device("cpu")).double()
    thresholds = table[1:255] if round_up else (table[1:255] + table[2:256]) / 2
    return thresholds.to(torch.float32).to(device)
