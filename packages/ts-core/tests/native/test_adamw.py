"""Host AdamW: against torch, across SIMD levels, thread counts, dtypes and addresses."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from ts_core import _native

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2}
# Around vector widths (4, 8, 16) and chunks (65536 elements), primes included.
SIZES = [0, 1, 3, 7, 8, 15, 16, 17, 31, 33, 127, 4099]
LARGE_SIZES = [65536, 65537, 200_003]


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass
class State:
    """A parameter with everything an update reads and writes."""

    param: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    master: torch.Tensor | None

    @classmethod
    def random(
        cls, n: int, param: torch.dtype, grad: torch.dtype, master: bool, offset: int = 0
    ) -> State:
        generator = torch.Generator().manual_seed(n + offset)

        def draw(dtype: torch.dtype) -> torch.Tensor:
            values = torch.randn(n + offset, generator=generator)
            # Spread over many magnitudes, subnormal ones of each dtype among them.
            powers = torch.randint(-30, 4, (n + offset,), generator=generator)
            return (values * 2.0**powers).to(dtype)[offset:]

        value = draw(torch.float32)
        low = value.to(param)
        return cls(
            low.clone() if offset == 0 else torch.cat([low[:offset], low])[offset:],
            draw(grad),
            draw(torch.float32) * 0.1,
            draw(torch.float32).square() * 0.1,
            value.clone() if master else None,
        )

    def clone(self) -> State:
        return State(
            self.param.clone(),
            self.grad.clone(),
            self.exp_avg.clone(),
            self.exp_avg_sq.clone(),
            None if self.master is None else self.master.clone(),
        )

    def update(
        self, step: int, threads: int = 0, grad_scale: float = 1.0, **changes: float
    ) -> None:
        _native.adamw_step(
            self.param.data_ptr(),
            name(self.param.dtype),
            self.grad.data_ptr(),
            name(self.grad.dtype),
            self.exp_avg.data_ptr(),
            self.exp_avg_sq.data_ptr(),
            0 if self.master is None else self.master.data_ptr(),
            self.param.numel(),
            step=step,
            threads=threads,
            grad_scale=grad_scale,
            **{**HYPER, **changes},
        )

    def same_bits(self, other: State) -> bool:
        mine = [self.param, self.exp_avg, self.exp_avg_sq, self.master]
        others = [other.param, other.exp_avg, other.exp_avg_sq, other.master]
        return all(
            (a is None and b is None)
            or (a is not None and b is not None and torch.equal(_bits(a), _bits(b)))
            for a, b in zip(mine, others, strict=True)
        )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.itemsize == 4 else torch.int16)


@pytest.mark.parametrize("lr", [1e-3, 1e-2])
def test_twenty_fp32_steps_agree_with_torch(each_level: str, lr: float) -> None:
    ours, (torch_default,) = _twenty_steps({"lr": lr}, [{}])
    assert (ours.param - torch_default["param"]).abs().max() <= 3e-7
    torch.testing.assert_close(ours.exp_avg, torch_default["exp_avg"], rtol=1e-6, atol=0)
    torch.testing.assert_close(ours.exp_avg_sq, torch_default["exp_avg_sq"], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weight_decay": 0.0},
        {"beta1": 0.0},
        {"beta1": 0.3, "beta2": 0.5},
        {"lr": 0.0},
        {"eps": 1e-3, "weight_decay": 0.5},
    ],
)
def test_any_hyper_parameters_agree_as_torchs_own_variants_do(
    each_level: str, changes: dict[str, float]
) -> None:
    ours, (default, fused) = _twenty_steps(changes, [{}, {"fused": True}])
    between_torchs = (default["param"] - fused["param"]).abs().max().item()
    for theirs in (default, fused):
        assert (ours.param - theirs["param"]).abs().max() <= max(3e-7, between_torchs)


def _twenty_steps(
    changes: dict[str, float], variants: list[dict[str, bool]]
) -> tuple[State, list[dict[str, torch.Tensor]]]:
    """Our state and torch's, by variant, after 20 steps from the same start and gradients."""
    hyper = {**HYPER, **changes}
    n = 10_007
    values = torch.randn(n)
    state = State(values.clone(), torch.empty(0), torch.zeros(n), torch.zeros(n), None)
    parameters = [torch.nn.Parameter(values.clone()) for _ in variants]
    optimizers = [
        torch.optim.AdamW(
            [parameter],
            lr=hyper["lr"],
            betas=(hyper["beta1"], hyper["beta2"]),
            eps=hyper["eps"],
            weight_decay=hyper["weight_decay"],
            **variant,
        )
        for parameter, variant in zip(parameters, variants, strict=True)
    ]
    for step in range(1, 21):
        state.grad = torch.randn(n)
        for parameter, optimizer in zip(parameters, optimizers, strict=True):
            parameter.grad = state.grad.clone()
            optimizer.step()
        state.update(step, **changes)
    return state, [
        {"param": p.detach(), **{k: v for k, v in o.state[p].items() if k != "step"}}
        for p, o in zip(parameters, optimizers, strict=True)
    ]


def test_fp32_update_is_as_close_to_fp64_as_torch(each_level: str) -> None:
    values = torch.randn(10_007)
    state = State(values.clone(), torch.empty(0), torch.zeros(10_007), torch.zeros(10_007), None)
    theirs, exact = torch.nn.Parameter(values.clone()), torch.nn.Parameter(values.double())
    optimizers = [torch.optim.AdamW([p], lr=1e-2) for p in (theirs, exact)]
    for step in range(1, 21):
        state.grad = torch.randn(10_007)
        theirs.grad, exact.grad = state.grad.clone(), state.grad.double()
        for optimizer in optimizers:
            optimizer.step()
        state.update(step)
    error = (state.param.double() - exact).abs().max()
    torch_error = (theirs.double() - exact).abs().max()
    assert error <= 2 * torch_error + 1e-6


@pytest.mark.parametrize("grad_dtype", DTYPES, ids=name)
@pytest.mark.parametrize("param_dtype", DTYPES, ids=name)
@pytest.mark.parametrize("master", [False, True], ids=["alone", "master"])
def test_every_dtype_is_the_fp32_update_rounded_to_nearest_even(
    each_level: str, param_dtype: torch.dtype, grad_dtype: torch.dtype, master: bool
) -> None:
    state = State.random(4099, param_dtype, grad_dtype, master)
    wide = State(
        state.param.float() if state.master is None else state.master.clone(),
        state.grad.float(),
        state.exp_avg.clone(),
        state.exp_avg_sq.clone(),
        None,
    )
    for step in range(1, 4):
        if state.master is None:
            wide.param = state.param.float()
        state.update(step)
        wide.update(step)
        assert torch.equal(state.param, wide.param.to(param_dtype))
        assert torch.equal(state.exp_avg, wide.exp_avg)
        assert torch.equal(state.exp_avg_sq, wide.exp_avg_sq)
        if state.master is not None:
            assert torch.equal(state.master, wide.param)


@pytest.mark.parametrize(
    ("param_dtype", "grad_dtype", "master"),
    [
        (torch.float32, torch.float32, False),
        (torch.float32, torch.bfloat16, True),
        (torch.bfloat16, torch.bfloat16, True),
        (torch.bfloat16, torch.float32, False),
        (torch.float16, torch.float16, True),
        (torch.float16, torch.float16, False),
    ],
)
def test_levels_give_the_same_bits(
    simd_levels: list[str], param_dtype: torch.dtype, grad_dtype: torch.dtype, master: bool
) -> None:
    for n in SIZES:
        start = State.random(n, param_dtype, grad_dtype, master)
        results = []
        for level in simd_levels:
            _native.set_simd_level(level)
            state = start.clone()
            state.update(1)
            state.update(2, grad_scale=0.37)
            results.append(state)
        assert all(results[0].same_bits(other) for other in results[1:])
        assert n == 0 or not results[0].same_bits(start)


@pytest.mark.parametrize("n", LARGE_SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name)
def test_threads_give_the_same_bits(
    each_level: str, many_cores: None, n: int, dtype: torch.dtype
) -> None:
    start = State.random(n, dtype, dtype, dtype == torch.bfloat16)
    results = []
    for threads in (1, 2, 3, 8):
        state = start.clone()
        state.update(1, threads)
        results.append(state)
    assert all(results[0].same_bits(other) for other in results[1:])
    assert not results[0].same_bits(start)


@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf"), 3e38, 1e-45, -0.0])
def test_levels_agree_on_special_values(simd_levels: list[str], special: float) -> None:
    for dtype in DTYPES:
        start = State.random(67, dtype, dtype, dtype != torch.float32)
        start.grad[::3] = special
        if start.master is not None:
            start.master[1::5] = special
        results = []
        for level in simd_levels:
            _native.set_simd_level(level)
            state = start.clone()
            state.update(1)
            results.append(state)
        for other in results[1:]:
            for a, b in [
                (results[0].param, other.param),
                (results[0].exp_avg, other.exp_avg),
                (results[0].exp_avg_sq, other.exp_avg_sq),
            ]:
                assert torch.equal(a.isnan(), b.isnan())
                assert torch.equal(a.nan_to_num(), b.nan_to_num())


def test_only_the_given_range_is_written(each_level: str) -> None:
    for n in (1, 5, 15, 16, 17, 63):
        buffers = torch.full((3, n + 64), 7.0)
        state = State(
            *(row[32 : 32 + n] for row in buffers[:1]),
            torch.ones(n),
            *buffers[1:, 32 : 32 + n],
            None,
        )
        state.update(1)
        assert (buffers[:, :32] == 7).all() and (buffers[:, 32 + n :] == 7).all()
        assert (buffers[:, 32 : 32 + n] != 7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_addresses_need_no_alignment(each_level: str, dtype: torch.dtype) -> None:
    """Views that start at any byte, as fields of a packed image do."""
    n = 1003
    aligned = State.random(n, dtype, dtype, True)
    assert aligned.master is not None
    names = ["param", "grad", "exp_avg", "exp_avg_sq", "master"]
    raw = {}
    for index, field in enumerate(names):
        tensor = getattr(aligned, field)
        size = tensor.numel() * tensor.itemsize
        buffer = torch.zeros(size + 16, dtype=torch.uint8)
        buffer[index + 1 : index + 1 + size] = tensor.view(torch.uint8)
        raw[field] = buffer
    pointers = {field: raw[field].data_ptr() + index + 1 for index, field in enumerate(names)}
    _native.adamw_step(
        pointers["param"],
        name(dtype),
        pointers["grad"],
        name(dtype),
        pointers["exp_avg"],
        pointers["exp_avg_sq"],
        pointers["master"],
        n,
        step=1,
        **HYPER,
    )
    aligned.update(1)
    for index, field in enumerate(names):
        tensor = getattr(aligned, field)
        size = tensor.numel() * tensor.itemsize
        assert torch.equal(raw[field][index + 1 : index + 1 + size], tensor.view(torch.uint8))


def test_an_infinite_second_moment_leaves_the_parameter_as_torch_does(each_level: str) -> None:
    """g g overflows: v is infinite, so the step is m / inf = 0; it must not become NaN."""
    state = State(torch.ones(33), torch.full((33,), 1e30), *torch.zeros(2, 33), None)
    parameter = torch.nn.Parameter(torch.ones(33))
    parameter.grad = state.grad.clone()
    torch.optim.AdamW([parameter], lr=HYPER["lr"]).step()
    state.update(1)
    assert state.exp_avg_sq.isinf().all()
    assert torch.equal(state.param, parameter.detach())


def test_grad_scale_multiplies_in_fp32(each_level: str) -> None:
    state = State.random(513, torch.bfloat16, torch.bfloat16, True)
    scaled = state.clone()
    scaled.grad = state.grad.float() * 0.3
    state.update(1, grad_scale=0.3)
    scaled.update(1)
    assert state.same_bits(scaled)


def test_subnormal_moments_are_kept_even_where_torch_flushes_them(each_level: str) -> None:
    state = State.random(300_000, torch.float32, torch.float32, False)
    state.exp_avg_sq.fill_(1e-40)
    state.grad.zero_()
    torch.set_flush_denormal(True)
    try:
        state.update(1)
    finally:
        torch.set_flush_denormal(False)
    assert (state.exp_avg_sq > 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=name)
def test_rounding_is_torchs_for_any_value(each_level: str, dtype: torch.dtype) -> None:
    """With lr = 0 an update writes the master's value, rounded, to the parameter."""
    n = 60_000
    generator = torch.Generator().manual_seed(5)
    bits = torch.randint(-(1 << 31), 1 << 31, (n,), generator=generator).to(torch.int32)
    halfway = 1 << (15 if dtype == torch.bfloat16 else 12)
    bits[::3] = bits[::3] & -(2 * halfway) | halfway  # ties
    bits[1::9] += 1
    values = bits.view(torch.float32)
    values[: n // 2].clamp_(-1e5, 1e5)  # where fp16 is not infinite
    values = values[~values.isnan()]
    values[2::7] *= 2.0**-12
    zeros = torch.zeros(values.numel())
    state = State(zeros.to(dtype), zeros.clone(), zeros.clone(), zeros + 1, values.clone())
    state.update(1, lr=0.0)
    assert torch.equal(state.param, values.to(dtype))


def test_every_16_bit_pattern_is_read_as_torch_reads_it(each_level: str) -> None:
    """The gradient's 65,536 patterns, through exp_avg with beta1 = 0 (m = lerp(m, g, 1))."""
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        grad = patterns.view(dtype)
        n = grad.numel()
        state = State(torch.zeros(n), grad, torch.zeros(n), torch.ones(n), None)
        state.update(1, beta1=0.0)
        finite = grad.isfinite()
        assert finite.sum() == 65536 - 2 * (256 if dtype == torch.bfloat16 else 2048) // 2
        assert torch.equal(state.exp_avg[finite], grad.float()[finite])
        assert state.exp_avg[~finite].isnan().all()  # torch.lerp(0, inf, 1) is NaN too
        assert torch.lerp(torch.zeros(1), torch.tensor([float("inf")]), 1.0).isnan()
