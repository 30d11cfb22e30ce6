"""How the rotary kernels divide their work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ts_kernels._rotary_plan import RotaryPlan, plan_by_groups, rotary_plan


@pytest.mark.parametrize(
    "q_heads, k_heads, pairs, expected",
    [
        (40, 8, 64, RotaryPlan(True, 8, 2)),  # 5 + 1 groups
        (64, 8, 64, RotaryPlan(True, 16, 4)),  # 9 groups of 8, so 4 + 1 of 16
        (32, 32, 64, RotaryPlan(True, 16, 4)),
        (14, 2, 32, RotaryPlan(True, 16, 2)),
        (16, 16, 128, RotaryPlan(True, 8, 4)),
        (7, 1, 64, RotaryPlan(True, 8, 2)),
        (96, 8, 64, RotaryPlan(False, 16, 4)),  # more than 6 groups either way
        (1, 1, 64, RotaryPlan(False, 1, 4)),  # less than a group
        (40, 8, 16, RotaryPlan(False, 64, 4)),  # small heads
        (8, 1, 256, RotaryPlan(False, 4, 4)),  # large ones
        (0, 0, 64, RotaryPlan(False, 1, 4)),
    ],
)
def test_which_plan(q_heads, k_heads, pairs, expected):
    assert rotary_plan(q_heads, k_heads, pairs, True) == expected
    assert rotary_plan(q_heads, k_heads, pairs) == plan_by_groups(q_heads, k_heads, pairs)


@given(
    q_heads=st.integers(0, 300),
    k_heads=st.integers(0, 300),
    log_pairs=st.integers(0, 12),
    whole=st.booleans(),
)
def test_what_a_program_holds(q_heads, k_heads, log_pairs, whole):
    plan = rotary_plan(q_heads, k_heads, 2**log_pairs, whole)
    assert plan.heads & (plan.heads - 1) == 0 and plan.num_warps in (2, 4)
    if plan.per_token:
        assert plan.heads * 2**log_pairs == 8 * 32 * plan.num_warps  # 8 pairs a thread
        assert -(-q_heads // plan.heads) + -(-k_heads // plan.heads) <= 6
    else:
        assert plan == plan_by_groups(q_heads, k_heads, 2**log_pairs)
