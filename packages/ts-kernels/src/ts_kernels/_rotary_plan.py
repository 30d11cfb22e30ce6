"""How the rotary kernels divide their work: pure functions of the shape."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ts_kernels._rms_norm_plan import last_power_of_2, next_power_of_2


class RotaryPlan(NamedTuple):
    """Launch parameters. Every plan gives the same bits."""

    per_token: bool  # one program for all heads of a token, or one for each group of heads
    heads: int  # of a group
    num_warps: int


@lru_cache(maxsize=1024)
def rotary_plan(q_heads: int, k_heads: int, pairs: int) -> RotaryPlan:
    """One program for each group of heads; `pairs` is a power of two."""
    most = max(q_heads, k_heads, 1)
    return RotaryPlan(False, min(next_power_of_2(most), last_power_of_2(max(1, 1024 // pairs))), 4)
