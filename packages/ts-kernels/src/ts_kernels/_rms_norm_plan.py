"""How the RMSNorm kernels divide their work: pure functions of the shape."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple


class TorchReduction(NamedTuple):
    """How torch's CUDA reduction spreads the sum of one contiguous row over threads."""

    width: int  # threads along the row
    height: int  # of which as many groups work on one row
    vectorized: bool  # a thread's four accumulators hold neighbours, or values `width` apart


@lru_cache(maxsize=1024)
def torch_reduction(rows: int, hidden: int) -> TorchReduction:
    """The block that torch chooses for a mean over the last of [rows, hidden] float32 values."""
    vectorized = hidden >= 128
    across = min(last_power_of_2(hidden // 4 if vectorized else hidden), 512)
    width = min(across, 32)
    height = min(last_power_of_2(rows), 512 // width)
    width = min(across, 512 // height)
    values_per_thread = -(-hidden // width)
    split = values_per_thread >= min(height * 16, 256)
    return TorchReduction(width, height if split else 1, vectorized)


@lru_cache(maxsize=1024)
def mean_factor(rows: int, hidden: int) -> float:
    """torch's factor of the mean: outputs over inputs, each rounded to float32."""
    return _float32(_float32(rows) / _float32(rows * hidden))


class ForwardPlan(NamedTuple):
    """Launch parameters of the forward kernel. Only `reduction` decides about the bits."""

    reduction: TorchReduction
    steps: int
    more_steps: int
    rows_per_program: int
    num_warps: int
    early_weight: bool = False  # read before the sum is known


@lru_cache(maxsize=1024)
def forward_plan(
    rows: int, hidden: int, plain_16_bit: bool = False, round_first: bool = True
) -> ForwardPlan:
    """Several short rows per program when there are many of them.

    The weight is read early where that was found faster, on an H200 at 8192 rows in bf16:
    43.9 microseconds rather than 45.1 for 5120 columns; for 4096 in Gemma's form 36.2 rather than
    36.7, and 35.8 with 2 warps (which without it take 41.2). 8 warps lose by it: 53.2 for 49.4.

    Args:
        rows, hidden: the shape.
        plain_16_bit: whether x and the weight have 16 bits each, and no residual is added.
        round_first: of the form.
    """
    reduction = torch_reduction(rows, hidden)
    span = reduction.width * reduction.height * 4
    steps, more_steps = two_blocks(hidden, span)
    padded = (steps + more_steps) * span
    rows_per_program = last_power_of_2(max(1, 2048 // padded)) if rows >= 2048 else 1
    num_warps = last_power_of_2(max(1, min(32, rows_per_program * padded // 1024)))
    early = plain_16_bit and rows >= 4096 and 4096 <= padded <= 5120 and hidden % 16 == 0
    if early and padded == 4096 and not round_first:
        num_warps = 2
    return ForwardPlan(reduction, steps, more_steps, rows_per_program, num_warps, early)


class BackwardPlan(NamedTuple):
    """Launch parameters of the backward kernel."""

    block: int  # columns, with those of `more` at least `hidden`
    more: int
    rows_per_tile: int
    tiles_per_program: int
    programs: int
    num_warps: int
    stages: int  # of the pipeline of loads
    ahead: int = 0  # tiles read ahead into registers; with one stage
    unroll: int = 1  # steps of the sum of the programs' parts that are read together
    joined: bool = False  # one reduction for both blocks of columns

    @property
    def lanes(self) -> int:
        """Threads of a joined reduction; 0 where each block has its own."""
        threads = 32 * self.num_warps
        return threads if self.joined and self.more >= threads else 0


@lru_cache(maxsize=1024)
def backward_plan(
    rows: int, hidden: int, want_weight: bool, bytes_per_column: int = 4, registers: bool = False
) -> BackwardPlan:
    """With a weight gradient a program walks many tiles and sums over their rows.

    How many never depends on the GPU, so that the order of the sum is fixed.

    Args:
        rows, hidden: the shape.
        want_weight: whether the weight gradient is computed.
        bytes_per_column: of all that is read of a row; bounds the shared memory of the pipeline.
        registers: whether tiles may be read ahead into registers: see `_compared` of the launch.
    """
    unit = min(64, next_power_of_2(hidden))
    block, more = (unit * blocks for blocks in two_blocks(hidden, unit))
    padded = block + more
    if not want_weight:
        rows_per_tile = last_power_of_2(max(1, min(16, 1024 // padded)))
        tiles = -(-rows // rows_per_tile)
        num_warps = last_power_of_2(max(1, min(32, padded * rows_per_tile // 1024)))
        return BackwardPlan(block, more, rows_per_tile, 1, tiles, num_warps, 1)
    # measured on an H200: larger tiles and fewer, longer walks pay for long rows
    long_rows = padded >= 4096
    rows_per_tile = last_power_of_2(max(1, min(16, (8192 if long_rows else 4096) // padded)))
    tiles = -(-rows // rows_per_tile)
    tiles_per_program = -(-tiles // (128 if long_rows else 256))
    tile_bytes = padded * rows_per_tile * bytes_per_column
    plan = BackwardPlan(
        block,
        more,
        rows_per_tile,
        tiles_per_program,
        -(-tiles // tiles_per_program),
        max(4, min(32, next_power_of_2(-(-padded * rows_per_tile // 1024)))),
        min(3, 1 + (66 * 1024) // tile_bytes) if tiles_per_program > 1 else 1,
    )
    if tiles_per_program < 8:
        return plan
    return _read_earlier(plan, hidden, bytes_per_column, registers)


def _read_earlier(
    plan: BackwardPlan, hidden: int, bytes_per_column: int, registers: bool
) -> BackwardPlan:
    """The plan of a long walk, with the loads that were found faster and gave the same bits.

    On an H200 at 8192 rows in bf16, in microseconds: add_rms_norm with 4096 columns 74.8 rather
    than 86.6, with 8192 141 rather than 162; rms_norm with 5120 75.6 rather than 82.6. Registers
    lose for rms_norm (4096 columns: 60.9 for 57.4) and with two blocks of columns change bits;
    one stage more changes none.
    """
    if registers and hidden in (4096, 8192):
        return plan._replace(stages=1, ahead=1, unroll=4)
    if plan.block == 4096 and 0 < plan.more <= 1024 and bytes_per_column == 4:
        return plan._replace(stages=4, unroll=4)
    return plan


def two_blocks(length: int, unit: int) -> tuple[int, int]:
    """Powers of two (first, second) with (first + second) * unit >= length; second may be 0."""
    count = -(-length // unit)
    first = last_power_of_2(count)
    second = next_power_of_2(count - first) if count > first else 0
    return (2 * first, 0) if second == first else (first, second)


def last_power_of_2(n: int) -> int:
    return 1 << (n.bit_length() - 1)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _float32(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded
