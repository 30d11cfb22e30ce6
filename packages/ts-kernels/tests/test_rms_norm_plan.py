"""How the RMSNorm kernels divide their work."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ts_kernels._rms_norm_plan import (
    backward_plan,
    forward_plan,
    mean_factor,
    torch_reduction,
    two_blocks,
)


@pytest.mark.parametrize(
    "rows, hidden, expected",
    [
        # worked out by hand from the rules of torch's setReduceConfig for float32
        (8192, 4096, (32, 1, True)),  # 16 rows a block, 128 values a thread: one warp each
        (512, 5120, (32, 1, True)),
        (8192, 8192, (32, 16, True)),  # 256 values a thread: the whole block on one row
        (1, 4096, (512, 1, True)),
        (2, 4096, (256, 1, True)),
        (2, 8192, (256, 2, True)),  # 32 values a thread is the limit for 2 rows
        (100, 576, (32, 1, True)),
        (100, 128, (32, 1, True)),
        (100, 127, (32, 1, False)),
        (100, 7, (4, 1, False)),
        (5, 1, (1, 1, False)),
    ],
)
def test_torch_reduction(rows, hidden, expected):
    assert torch_reduction(rows, hidden) == expected


def test_mean_factor_is_rounded_as_torch_rounds_it():
    assert mean_factor(3, 4) == 0.25
    rows, hidden = 29127, 577  # 16,806,279 is no float32: torch divides by 16,806,280
    assert mean_factor(rows, hidden) == float(torch.tensor(float(rows)) / torch.tensor(16806280.0))


@pytest.mark.parametrize(
    "length, unit, expected",
    [
        (5120, 128, (32, 8)),
        (576, 128, (4, 1)),
        (7168, 128, (64, 0)),
        (1, 128, (1, 0)),
        (6, 1, (4, 2)),
    ],
)
def test_two_blocks(length, unit, expected):
    assert two_blocks(length, unit) == expected


def is_power_of_2(n):
    return n > 0 and n & (n - 1) == 0


@given(rows=st.integers(1, 2**22), hidden=st.integers(1, 32768))
def test_forward_covers_every_row_and_column(rows, hidden):
    plan = forward_plan(rows, hidden)
    span = plan.reduction.width * plan.reduction.height * 4
    columns = (plan.steps + plan.more_steps) * span
    assert hidden <= columns < max(2 * hidden, 2 * span)
    for size in (span, plan.steps, plan.rows_per_program, plan.num_warps):
        assert is_power_of_2(size)
    assert plan.more_steps == 0 or is_power_of_2(plan.more_steps)
    assert plan.num_warps <= 32


@given(
    rows=st.integers(1, 2**22),
    hidden=st.integers(1, 32768),
    want_weight=st.booleans(),
    itemsize=st.sampled_from([2, 4]),
    registers=st.booleans(),
)
def test_backward_covers_every_row_and_column_once(rows, hidden, want_weight, itemsize, registers):
    plan = backward_plan(rows, hidden, want_weight, 2 * itemsize, registers)
    columns = plan.block + plan.more
    assert hidden <= columns < max(2 * hidden, 64 + hidden)
    tile_rows = plan.rows_per_tile * plan.tiles_per_program
    assert (plan.programs - 1) * tile_rows < rows <= plan.programs * tile_rows
    assert plan.programs <= 256 or not want_weight  # rows of partial sums
    for size in (plan.block, plan.rows_per_tile, plan.num_warps):
        assert is_power_of_2(size)
    assert plan.more == 0 or is_power_of_2(plan.more)
    # the pipeline's buffers fit in the shared memory of every GPU that runs the kernels
    assert (plan.stages - 1) * columns * plan.rows_per_tile * 2 * itemsize <= 66 * 1024
    assert 1 <= plan.stages <= 4
    assert plan.ahead == 0 or (plan.stages == 1 and plan.more == 0)


@pytest.mark.parametrize(
    "rows, hidden, more, stages, ahead",
    [
        (8192, 4096, (6, True), 1, 1),
        (8192, 8192, (6, True), 1, 1),
        (8192, 4096, (6, False), 2, 0),
        (8192, 4096, (4, False), 3, 0),
        (8192, 5120, (6, True), 3, 0),  # two blocks: registers would change bits
        (8192, 5120, (4, False), 4, 0),
        (8192, 5120, (8, False), 2, 0),
        (8192, 6144, (4, False), 3, 0),
        (8192, 4095, (6, True), 2, 0),
        (512, 5120, (4, False), 3, 0),  # 4 tiles a program
        (512, 4096, (6, True), 2, 0),
    ],
)
def test_which_loads_are_early_in_backward(rows, hidden, more, stages, ahead):
    plan = backward_plan(rows, hidden, True, *more)
    assert (plan.stages, plan.ahead) == (stages, ahead)
    plain = backward_plan(rows, hidden, True, more[0])
    unchanged = {"stages": 0, "ahead": 0, "unroll": 0}
    assert plan._replace(**unchanged) == plain._replace(**unchanged)


@pytest.mark.parametrize(
    "rows, hidden, more, num_warps, early",
    [
        (8192, 5120, (True, True), 4, True),
        (8192, 4096, (True, True), 4, True),
        (8192, 4096, (True, False), 2, True),
        (8192, 4096, (False, False), 4, False),
        (8192, 6144, (True, True), 4, False),
        (8192, 4095, (True, False), 4, False),
        (8192, 8192, (True, True), 8, False),
        (8192, 2048, (True, True), 2, False),
        (512, 4096, (True, False), 4, False),
    ],
)
def test_where_forward_reads_the_weight_early(rows, hidden, more, num_warps, early):
    plan = forward_plan(rows, hidden, *more)
    assert (plan.num_warps, plan.early_weight) == (num_warps, early)
    assert plan.reduction == torch_reduction(rows, hidden)
