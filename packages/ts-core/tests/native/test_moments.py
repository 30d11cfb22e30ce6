"""Moments in bf16 and 8 bits: against a reference, across SIMD levels, threads and splits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from ts_core import _native

BLOCK = _native.MOMENT_BLOCK
TYPES = ["bfloat16", "int8"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.uint8}
HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2}
SIZES = [0, 1, 7, 255, 256, 257, 511, 1023, 1024, 1025, 4099]


@dataclass
class Stored:
    """One moment in stored form."""

    moments: str
    which: str
    values: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def zeros(cls, moments: str, which: str, n: int) -> Stored:
        scales = torch.zeros(-(-n // BLOCK) if moments == "int8" else 0)
        return cls(moments, which, torch.zeros(n, dtype=DTYPES[moments]), scales)

    @classmethod
    def of(cls, moments: str, which: str, numbers: torch.Tensor, **options: int) -> Stored:
        stored = cls.zeros(moments, which, numbers.numel())
        stored.set(numbers, **options)
        return stored

    def set(self, numbers: torch.Tensor, **options: int) -> None:
        _native.moments_from_float32(
            numbers.data_ptr(),
            self.values.data_ptr(),
            self.scales.data_ptr(),
            numbers.numel(),
            moments=self.moments,
            which=self.which,
            **options,
        )

    def numbers(self, threads: int = 0) -> torch.Tensor:
        out = torch.full((self.values.numel(),), 7.0)
        _native.moments_to_float32(
            self.values.data_ptr(),
            self.scales.data_ptr(),
            out.data_ptr(),
            out.numel(),
            moments=self.moments,
            which=self.which,
            threads=threads,
        )
        return out

    def clone(self) -> Stored:
        return Stored(self.moments, self.which, self.values.clone(), self.scales.clone())

    def same_bits(self, other: Stored) -> bool:
        return torch.equal(
            self.values.view(torch.uint8), other.values.view(torch.uint8)
        ) and torch.equal(self.scales.view(torch.int32), other.scales.view(torch.int32))


@dataclass
class State:
    """A parameter, its gradient and stored moments."""

    moments: str
    param: torch.Tensor
    grad: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    master: torch.Tensor | None = None

    def __post_init__(self) -> None:
        n = self.param.numel()
        self.exp_avg = Stored.zeros(self.moments, "exp_avg", n)
        self.exp_avg_sq = Stored.zeros(self.moments, "exp_avg_sq", n)

    def clone(self) -> State:
        master = None if self.master is None else self.master.clone()
        copy = State(self.moments, self.param.clone(), self.grad.clone(), master)
        copy.exp_avg, copy.exp_avg_sq = self.exp_avg.clone(), self.exp_avg_sq.clone()
        return copy

    def update(self, step: int, *, first: int = 0, last: int | None = None, **options) -> None:
        """One update of elements `first` (a multiple of BLOCK) to `last`."""
        last = self.param.numel() if last is None else last

        def at(tensor: torch.Tensor, index: int) -> int:
            return tensor.data_ptr() + index * tensor.itemsize

        _native.adamw_step(
            at(self.param, first),
            str(self.param.dtype).removeprefix("torch."),
            at(self.grad, first),
            str(self.grad.dtype).removeprefix("torch."),
            at(self.exp_avg.values, first),
            at(self.exp_avg_sq.values, first),
            0 if self.master is None else at(self.master, first),
            last - first,
            step=step,
            moments=self.moments,
            exp_avg_scale_ptr=at(self.exp_avg.scales, first // BLOCK),
            exp_avg_sq_scale_ptr=at(self.exp_avg_sq.scales, first // BLOCK),
            base=options.pop("base", first),
            **{**HYPER, **options},
        )

    def same_bits(self, other: State) -> bool:
        view = torch.int32 if self.param.itemsize == 4 else torch.int16
        return (
            torch.equal(self.param.view(view), other.param.view(view))
            and self.exp_avg.same_bits(other.exp_avg)
            and self.exp_avg_sq.same_bits(other.exp_avg_sq)
        )


def spread(n: int, seed: int = 0, low: int = -30, high: int = 4) -> torch.Tensor:
    """Normal numbers over many magnitudes."""
    generator = torch.Generator().manual_seed(seed + n)
    powers = torch.randint(low, high, (n,), generator=generator)
    return torch.randn(n, generator=generator) * 2.0**powers


def narrow(n: int, seed: int = 0) -> torch.Tensor:
    """Numbers of which each block has a least one of its own, 2^-12 to 2^-16 of its largest."""
    generator = torch.Generator().manual_seed(seed + n)
    limits = torch.rand(-(-n // BLOCK), generator=generator) * 4 + 12
    powers = torch.rand(n, generator=generator) * limits.repeat_interleave(BLOCK)[:n]
    signs = torch.randint(0, 2, (n,), generator=generator) * 2 - 1
    return signs * 2.0**-powers


def a_state(moments: str, n: int, dtype: torch.dtype = torch.float32) -> State:
    values = spread(n)
    master = None if dtype == torch.float32 else values.clone()
    return State(moments, values.to(dtype), spread(n, seed=1).to(dtype), master)


# --- against a reference -------------------------------------------------------------------------


def small_floats(exponent_bits: int, top: float) -> torch.Tensor:
    """Every number of a small float with 4 fraction bits, relative to its scale, by code."""
    codes = torch.arange(16 << exponent_bits)
    field_, fraction = codes // 16, codes % 16
    bias = 2**exponent_bits - 1
    normal = (16 + fraction) / 16 * 2.0 ** (field_ - bias)
    numbers = torch.where(field_ == 0, fraction / 16 * 2.0 ** (1 - bias), normal)
    assert numbers.max() == top
    return numbers


EXP_AVG_NUMBERS = small_floats(3, 1.9375)
ROOT_NUMBERS = small_floats(4, 1.9375)[:255]  # the last code is "not finite"


def test_every_code_reads_back_as_the_format_says(each_level: str) -> None:
    scale = 2.0**-7
    codes = torch.arange(256, dtype=torch.uint8)
    exp_avg = Stored("int8", "exp_avg", codes, torch.tensor([scale])).numbers()
    assert torch.equal(exp_avg[:128], EXP_AVG_NUMBERS * scale)
    assert torch.equal(exp_avg[129:], -EXP_AVG_NUMBERS[1:] * scale)
    assert exp_avg[128].isnan()
    exp_avg_sq = Stored("int8", "exp_avg_sq", codes, torch.tensor([scale])).numbers()
    assert torch.equal(exp_avg_sq[:255], (ROOT_NUMBERS * scale) ** 2)
    assert exp_avg_sq[255] == float("inf")


def test_exp_avg_is_the_nearest_number_of_its_block(each_level: str) -> None:
    numbers = spread(64 * BLOCK, low=-14, high=1)
    stored = Stored.of("int8", "exp_avg", numbers)
    for block, scale, got in zip(
        numbers.view(-1, BLOCK), stored.scales, stored.numbers().view(-1, BLOCK), strict=True
    ):
        peak = block.abs().max()
        assert torch.frexp(scale).mantissa == 0.5  # a power of two
        assert peak / 2 < scale <= peak * (1 + 1 / 32)
        grid = EXP_AVG_NUMBERS * scale
        nearest = (block.abs()[:, None] - grid).abs().min(1).values
        assert torch.equal((block - got).abs(), nearest)


def test_exp_avg_sq_is_one_of_the_two_neighbours_and_right_on_average(each_level: str) -> None:
    root = spread(BLOCK, low=-17, high=1).abs()
    root[0] = 1.5  # fixes the scale at 1
    root = root.clamp(max=1.5)
    numbers = root.square()
    draws = torch.stack(
        [Stored.of("int8", "exp_avg_sq", numbers, seed=seed).numbers() for seed in range(1000)]
    ).sqrt()
    above = torch.bucketize(root, ROOT_NUMBERS)
    upper, lower = ROOT_NUMBERS[above], ROOT_NUMBERS[(above - 1).clamp(min=0)]
    # numbers.sqrt() may differ from root in the last place: leave out those on the grid itself.
    inside = (upper - root > 1e-6 * root) & (root - lower > 1e-6 * root)
    assert inside.sum() > 200
    first_step = inside & (lower == 0)  # never rounded to zero
    inside &= lower > 0
    assert first_step.any() and (draws[:, first_step] == ROOT_NUMBERS[1]).all()
    assert ((draws == upper) | (draws == lower))[:, inside].all()
    share = (draws == upper).float().mean(0)[inside]
    wanted = ((root - lower) / (upper - lower))[inside]
    deviation = (wanted * (1 - wanted) / 1000).sqrt()
    z = (share - wanted) / deviation.clamp(min=1e-3)
    assert z.abs().max() < 5  # 250 values of a normal distribution: beyond 5 once in 7,000 runs
    assert 0.7 < z.square().mean() < 1.4


@pytest.mark.parametrize("exponent", [-50, -3, 0, 40, 63])
def test_a_root_just_below_a_power_of_two_is_no_infinity(each_level: str, exponent: int) -> None:
    """Its code in its own binade would be the one of infinity, or it rounds up to the power."""
    scale = 2.0**exponent
    for top in (1.875, 1.9, 1.9375, 1.95, 1.999):
        numbers = torch.full((BLOCK,), (top * scale) ** 2)
        numbers[1:] *= 1e-3
        for seed in range(20):
            root = Stored.of("int8", "exp_avg_sq", numbers, seed=seed).numbers().sqrt()[0] / scale
            wanted = {1.875: [1.875], 1.9: [1.875, 1.9375], 1.9375: [1.9375]}
            above = [1.9375] if exponent == 63 else [1.9375, 2.0]  # 2.0**64 squared overflows
            assert root in wanted.get(top, above)


def test_bfloat16_is_one_of_the_two_neighbours_and_right_on_average(each_level: str) -> None:
    for which in ("exp_avg", "exp_avg_sq"):
        numbers = spread(BLOCK, low=-126, high=100)
        if which == "exp_avg_sq":
            numbers = numbers.abs()
        draws = torch.stack(
            [Stored.of("bfloat16", which, numbers, seed=seed).numbers() for seed in range(1000)]
        )
        bits = numbers.view(torch.int32)
        toward_zero = (bits & -65536).view(torch.float32)
        away = ((bits & -65536) + 65536).view(torch.float32)
        assert ((draws == toward_zero) | (draws == away)).all()
        share = (draws == away).float().mean(0)
        wanted = (bits & 65535).float() / 65536
        z = (share - wanted) / (wanted * (1 - wanted) / 1000).sqrt().clamp(min=1e-3)
        assert z.abs().max() < 5
        assert 0.7 < z.square().mean() < 1.4


@pytest.mark.parametrize("moments", TYPES)
def test_random_bits_differ_by_seed_step_element_and_moment(moments: str) -> None:
    numbers = torch.full((64 * BLOCK,), 1.0 + 1 / 32 + 1 / 512)

    def ups(which: str, **options: int) -> torch.Tensor:
        return Stored.of(moments, which, numbers.square(), **options).numbers() > numbers.square()

    start = ups("exp_avg_sq", seed=5, step=9)
    assert 0.05 < start.float().mean() < 0.95
    for other in (
        ups("exp_avg_sq", seed=6, step=9),
        ups("exp_avg_sq", seed=5, step=10),
        ups("exp_avg_sq", seed=5, step=9, base=BLOCK),
        start.roll(1),
        start.roll(BLOCK),
        *([ups("exp_avg", seed=5, step=9)] if moments == "bfloat16" else []),
    ):
        pair = torch.stack([start, other]).float()
        assert torch.corrcoef(pair)[0, 1].abs() < 5 / (64 * BLOCK) ** 0.5


@pytest.mark.parametrize("moments", TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("special", [None, float("nan"), float("inf"), 3e38, 1e19])
@pytest.mark.parametrize("numbers", [spread, narrow])
def test_an_update_is_that_of_fp32_between_reading_and_rounding(
    each_level: str,
    moments: str,
    dtype: torch.dtype,
    special: float | None,
    numbers: Callable[..., torch.Tensor],
) -> None:
    for n in SIZES if numbers is spread else [64 * BLOCK]:
        state = a_state(moments, n, dtype)
        for step in (1, 2, 3):
            state.grad = numbers(n, seed=step).to(dtype)
            if special is not None:
                state.grad[step::7] = special
            before = state.clone()
            state.update(step, seed=9, grad_scale=0.5, base=3 * BLOCK)
            avg, avg_sq = before.exp_avg.numbers(), before.exp_avg_sq.numbers()
            _native.adamw_step(
                before.param.data_ptr(),
                str(dtype).removeprefix("torch."),
                before.grad.data_ptr(),
                str(dtype).removeprefix("torch."),
                avg.data_ptr(),
                avg_sq.data_ptr(),
                0 if before.master is None else before.master.data_ptr(),
                n,
                step=step,
                grad_scale=0.5,
                **HYPER,
            )
            for stored, fp32 in ((before.exp_avg, avg), (before.exp_avg_sq, avg_sq)):
                stored.set(fp32, seed=9, step=step, base=3 * BLOCK)
            assert state.exp_avg.same_bits(before.exp_avg)
            assert state.exp_avg_sq.same_bits(before.exp_avg_sq)
            torch.testing.assert_close(state.param, before.param, rtol=0, atol=0, equal_nan=True)
            if state.master is not None:
                torch.testing.assert_close(
                    state.master, before.master, rtol=0, atol=0, equal_nan=True
                )


# --- the same bits everywhere --------------------------------------------------------------------


@pytest.mark.parametrize("moments", TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_levels_give_the_same_bits(
    simd_levels: list[str], moments: str, dtype: torch.dtype
) -> None:
    for n in SIZES:
        start = a_state(moments, n, dtype)
        results = []
        for level in simd_levels:
            _native.set_simd_level(level)
            state = start.clone()
            for step in range(1, 5):
                state.update(step, seed=3, grad_scale=1.0 / step)
            results.append(state)
        assert all(results[0].same_bits(other) for other in results[1:])
        assert n == 0 or not results[0].same_bits(start)


@pytest.mark.parametrize("moments", TYPES)
def test_levels_agree_on_special_values(simd_levels: list[str], moments: str) -> None:
    special = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 1e-30, 3e38, -3e38, 1e20])
    special = torch.cat([special, torch.tensor([float("inf"), -float("inf"), float("nan")])])
    for index in range(len(special)):
        start = a_state(moments, 3 * BLOCK + 5)
        start.grad[: 2 * BLOCK] = special[index]
        start.grad[2 * BLOCK :: 3] = special[index]
        results = []
        for level in simd_levels:
            _native.set_simd_level(level)
            state = start.clone()
            state.update(1)
            state.update(2)
            state.param.nan_to_num_(nan=123.0)  # a NaN's payload is not compared
            results.append(state)
        assert all(results[0].same_bits(other) for other in results[1:])


@pytest.mark.parametrize("moments", TYPES)
def test_threads_and_splits_give_the_same_bits(
    each_level: str, many_cores: None, moments: str
) -> None:
    n = 200_003
    start = a_state(moments, n)
    whole = start.clone()
    for step in (1, 2):
        whole.update(step, threads=1, seed=11)
    for cuts in ([], [BLOCK], [65536, 131072], [17 * BLOCK, 400 * BLOCK]):
        parts = start.clone()
        for step in (1, 2):
            for first, last in zip([0, *cuts], [*cuts, n], strict=True):
                parts.update(step, first=first, last=last, threads=8, seed=11)
        assert parts.same_bits(whole), cuts
    elsewhere = start.clone()
    for step in (1, 2):
        elsewhere.update(step, seed=11, base=BLOCK)
    assert not elsewhere.same_bits(whole)


@pytest.mark.parametrize("moments", TYPES)
def test_only_the_given_range_is_written(each_level: str, moments: str) -> None:
    for n in (1, 255, 257):
        state = a_state(moments, n + BLOCK)
        before = state.clone()
        state.update(1, last=n)
        blocks = -(-n // BLOCK) if moments == "int8" else 0
        for mine, old in (
            (state.param[n:], before.param[n:]),
            (state.exp_avg.values[n:], before.exp_avg.values[n:]),
            (state.exp_avg_sq.values[n:], before.exp_avg_sq.values[n:]),
            (state.exp_avg.scales[blocks:], before.exp_avg.scales[blocks:]),
            (state.exp_avg_sq.scales[blocks:], before.exp_avg_sq.scales[blocks:]),
        ):
            assert torch.equal(mine, old)
        assert not torch.equal(state.exp_avg_sq.values[:n], before.exp_avg_sq.values[:n])


def test_scales_need_no_alignment(each_level: str) -> None:
    start = a_state("int8", 3 * BLOCK + 9)
    start.update(1)
    moved = start.clone()
    packed = torch.zeros(4 * 4 + 1, dtype=torch.uint8)
    packed[1:] = moved.exp_avg.scales.view(torch.uint8)
    values, out = moved.exp_avg.values, torch.empty(3 * BLOCK + 9)
    _native.moments_to_float32(
        values.data_ptr(),
        packed.data_ptr() + 1,
        out.data_ptr(),
        out.numel(),
        moments="int8",
        which="exp_avg",
    )
    assert torch.equal(out, start.exp_avg.numbers())


# --- state dicts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("moments", ["float32", *TYPES])
@pytest.mark.parametrize("magnitude", [1e-42, 1e-36, 1e-20, 1e-8, 1.0, 1e15, 1e30])
def test_storing_what_was_loaded_gives_the_same_bytes(
    each_level: str, moments: str, magnitude: float
) -> None:
    state = State(moments, torch.randn(5 * BLOCK + 3))
    for step in range(1, 4):
        state.grad = spread(5 * BLOCK + 3, seed=step, low=-20, high=2) * magnitude
        state.grad[: BLOCK + 9] = 0.0
        state.update(step)
        for stored in (state.exp_avg, state.exp_avg_sq):
            again = Stored.of(moments, stored.which, stored.numbers(), seed=99, step=step)
            assert again.same_bits(stored)


@pytest.mark.parametrize("moments", TYPES)
@pytest.mark.parametrize("which", ["exp_avg", "exp_avg_sq"])
def test_every_stored_value_survives(each_level: str, moments: str, which: str) -> None:
    if moments == "int8":
        codes = torch.arange(256, dtype=torch.uint8)
        least = -116 if which == "exp_avg" else -56
        for exponent in (least, -20, 0, 60):
            stored = Stored(moments, which, codes, torch.tensor([2.0**exponent]))
            assert Stored.of(moments, which, stored.numbers(), seed=1).same_bits(stored)
    else:
        patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
        patterns = torch.where(patterns.isnan(), torch.full_like(patterns, float("nan")), patterns)
        stored = Stored(moments, which, patterns, torch.empty(0))
        assert Stored.of(moments, which, stored.numbers(), seed=1).same_bits(stored)


@pytest.mark.parametrize("moments", TYPES)
def test_conversion_in_parts_and_on_threads_is_the_same(many_cores: None, moments: str) -> None:
    n = 150_001
    numbers = spread(n).abs()
    for which in ("exp_avg", "exp_avg_sq"):
        whole = Stored.of(moments, which, numbers, seed=4, threads=1)
        assert whole.same_bits(Stored.of(moments, which, numbers, seed=4, threads=8))
        cut = 100 * BLOCK
        first = Stored.of(moments, which, numbers[:cut], seed=4)
        second = Stored.of(moments, which, numbers[cut:], seed=4, base=cut)
        assert torch.equal(whole.values, torch.cat([first.values, second.values]))
        assert torch.equal(whole.scales, torch.cat([first.scales, second.scales]))
        assert torch.equal(whole.numbers(threads=1), whole.numbers(threads=8))


# --- what odd gradients do -----------------------------------------------------------------------


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("moments", TYPES)
def test_a_nonfinite_gradient_touches_its_own_element_only(
    each_level: str, moments: str, special: float
) -> None:
    n = 2 * BLOCK
    clean, dirty = a_state(moments, n), a_state(moments, n)
    clean.grad[17] = dirty.grad[17] = 0.0
    dirty.grad[17] = special
    for step in (1, 2):
        clean.update(step)
        dirty.update(step)
        dirty.grad[17] = clean.grad[17]
    others = torch.arange(n) != 17
    assert torch.equal(clean.param[others], dirty.param[others])
    for mine, theirs in ((clean.exp_avg, dirty.exp_avg), (clean.exp_avg_sq, dirty.exp_avg_sq)):
        assert torch.equal(mine.values[others], theirs.values[others])
        assert torch.equal(mine.scales, theirs.scales)
    assert dirty.param[17].isnan()
    assert not dirty.exp_avg.numbers()[17].isfinite()
    assert not dirty.exp_avg_sq.numbers()[17].isfinite()


def test_a_huge_gradient_only_makes_its_neighbours_steps_smaller(each_level: str) -> None:
    for huge in (1e4, 1e12, 1e18, 1e25):
        plain, state = a_state("float32", BLOCK), a_state("int8", BLOCK)
        state.grad[3] = plain.grad[3] = huge
        before = state.param.clone()
        for step in range(1, 6):
            plain.update(step)
            state.update(step)
            assert state.param.isfinite().all()
            state.grad[3] = plain.grad[3] = 1.0
        lr = 1e-3
        assert (
            state.param - before
        ).abs().max() < 5 * lr * 1.1 + 5 * lr * 1e-2 * before.abs().max()


def test_zero_gradients_leave_zero_moments(each_level: str) -> None:
    for moments in TYPES:
        state = a_state(moments, 300)
        state.grad.zero_()
        state.update(1, weight_decay=0.0)
        assert state.same_bits(State(moments, spread(300), state.grad))


# --- drift ---------------------------------------------------------------------------------------


def train(moments: str, seed: int, batch: int | None, steps: int = 30) -> list[torch.Tensor]:
    """Parameters of an MLP before and after AdamW steps by the native core."""
    torch.manual_seed(1000)
    model = nn.Sequential(
        nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 16)
    )
    inputs = torch.randn(1024, 64)
    targets = torch.tanh(inputs @ torch.randn(64, 16) / 4)
    states = [State(moments, p.detach().view(-1)) for p in model.parameters()]
    before = torch.cat([s.param.clone() for s in states])
    for step in range(1, steps + 1):
        chosen = slice(None) if batch is None else torch.arange(batch) * step % 1024
        model.zero_grad()
        (model(inputs[chosen]) - targets[chosen]).square().mean().backward()
        for index, (parameter, state) in enumerate(zip(model.parameters(), states, strict=True)):
            state.grad = parameter.grad.view(-1)
            state.update(step, seed=seed * 100 + index)
    return [before, torch.cat([s.param for s in states])]


@pytest.mark.parametrize("batch", [None, 32], ids=["full-batch", "minibatch"])
@pytest.mark.parametrize(("moments", "most"), [("bfloat16", 0.01), ("int8", 0.05)])
def test_thirty_steps_end_near_those_with_fp32_moments(
    moments: str, most: float, batch: int | None
) -> None:
    before, exact = train("float32", 0, batch)
    for seed in (1, 2, 3):
        _, got = train(moments, seed, batch)
        drift = (got - exact).norm() / (exact - before).norm()
        assert 0 < drift <= most
    assert torch.equal(train(moments, 1, batch)[1], train(moments, 1, batch)[1])
