"""RMSNorm: equality with the Llama formula, gradients, and the operator's registration."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import ts_kernels
from ts_kernels import reference
from ts_kernels.testing import assert_rounding_tier

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((577,), (3, 1), (0, 5), (2, 0, 7), (5, 7), (2, 3, 577), (1, 5120), (13, 131))


@pytest.mark.parametrize("x_dtype, weight_dtype", list(itertools.product(FLOATS, FLOATS)))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_the_llama_formula_bit_for_bit(llama_formula, shape, x_dtype, weight_dtype):
    x = torch.randn(shape, dtype=x_dtype)
    weight = torch.randn(shape[-1], dtype=weight_dtype)
    y = ts_kernels.rms_norm(x, weight, 1e-5)
    expected = llama_formula(x, weight, 1e-5)
    assert y.dtype == expected.dtype
    assert torch.equal(y, expected)
    assert torch.equal(y, reference.rms_norm(x, weight, 1e-5))


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.integers(1, 9),
    hidden=st.integers(1, 300),
    exponent=st.integers(-18, 18),
    eps=st.sampled_from([0.0, 1e-12, 1e-6, 1e-5, 1.0]),
    dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 2**31),
)
def test_any_size_and_magnitude(llama_formula, rows, hidden, exponent, eps, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, hidden, generator=generator) * 10.0**exponent).to(dtype)
    weight = torch.randn(hidden, generator=generator).to(dtype)
    y = ts_kernels.rms_norm(x, weight, eps)
    # a half may have become inf or 0 in x itself: then the formula's NaN is ours too
    assert torch.equal(y.nan_to_num(7.0), llama_formula(x, weight, eps).nan_to_num(7.0))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(7, 577), (2, 5, 131), (3, 1), (64, 7)], ids=str)
def test_gradients_are_as_close_to_float64_as_the_formula_is(llama_formula, shape, dtype):
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    weight = torch.randn(shape[-1], dtype=dtype, requires_grad=True)
    dy = torch.randn(shape, dtype=dtype)
    actual = torch.autograd.grad(ts_kernels.rms_norm(x, weight, 1e-5), (x, weight), dy)
    plain = torch.autograd.grad(llama_formula(x, weight, 1e-5), (x, weight), dy)
    x64, weight64 = (t.detach().double().requires_grad_() for t in (x, weight))
    exact = torch.autograd.grad(
        reference.rms_norm(x64, weight64, 1e-5), (x64, weight64), dy.double()
    )
    for name, a, p, e in zip(("dx", "dweight"), actual, plain, exact, strict=True):
        assert a.dtype == dtype
        assert_rounding_tier(a, p, e, name)


def test_gradcheck_in_float64():
    x = torch.randn(3, 2, 7, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: ts_kernels.rms_norm(x, w, 1e-3), (x, weight))
    assert torch.autograd.gradcheck(lambda x, w: reference.rms_norm(x, w, 1e-3), (x, weight))


@pytest.mark.parametrize("dtype, weight_dtype", [(torch.bfloat16, torch.float32)])
def test_gradients_have_the_dtypes_of_their_tensors(dtype, weight_dtype):
    x = torch.randn(5, 7, dtype=dtype, requires_grad=True)
    weight = torch.randn(7, dtype=weight_dtype, requires_grad=True)
    y = ts_kernels.rms_norm(x, weight, 1e-5)
    assert y.dtype == torch.float32
    y.sum().backward()
    assert (x.grad.dtype, weight.grad.dtype) == (dtype, weight_dtype)


def test_strides_do_not_matter(llama_formula):
    wide = torch.randn(6, 3 * 577, dtype=torch.bfloat16)
    weight = torch.randn(2 * 577, dtype=torch.bfloat16)[::2]
    for x in (
        wide[:, 577 : 2 * 577],
        torch.randn(577, 6, dtype=torch.bfloat16).t(),
        torch.randn(2, 577, 3, dtype=torch.bfloat16).transpose(1, 2),
        torch.randn(577, dtype=torch.bfloat16).expand(4, 577),
        wide[::2, ::3],
    ):
        x = x.detach().requires_grad_()
        y = ts_kernels.rms_norm(x, weight, 1e-5)
        assert y.is_contiguous()
        dense = x.detach().contiguous().requires_grad_()
        expected = llama_formula(dense, weight, 1e-5)
        assert torch.equal(y, expected)
        dy = torch.randn_like(y)
        (dx,) = torch.autograd.grad(y, x, dy)
        (dx_dense,) = torch.autograd.grad(ts_kernels.rms_norm(dense, weight, 1e-5), dense, dy)
        assert torch.equal(dx, dx_dense)


def test_empty_batch_has_zero_weight_gradient():
    x = torch.empty(0, 5, requires_grad=True)
    weight = torch.randn(5, requires_grad=True)
    ts_kernels.rms_norm(x, weight, 1e-5).sum().backward()
    assert x.grad.shape == (0, 5)
    assert torch.equal(weight.grad, torch.zeros(5))


class BackwardCalls(TorchDispatchMode):
    """Collects the results of rms_norm_backward."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.ts_kernels.rms_norm_backward.default:
            self.calls.append((args[4:], [t.numel() for t in result]))
        return result


@pytest.mark.parametrize("train_x, train_weight", [(True, False), (False, True), (True, True)])
def test_only_the_needed_gradients_are_computed(train_x, train_weight):
    x = torch.randn(5, 7, requires_grad=train_x)
    weight = torch.randn(7, requires_grad=train_weight)
    with BackwardCalls() as seen:
        ts_kernels.rms_norm(x, weight, 1e-5).sum().backward()
    assert seen.calls == [((train_x, train_weight), [35 * train_x, 7 * train_weight])]
    assert (x.grad is not None, weight.grad is not None) == (train_x, train_weight)


def test_the_direct_path_and_the_operator_agree():
    x = torch.randn(5, 7, requires_grad=True)
    weight = torch.randn(7, requires_grad=True)
    dy = torch.randn(5, 7)
    direct = ts_kernels.rms_norm(x, weight, 1e-5)
    operator = torch.ops.ts_kernels.rms_norm(x, weight, 1e-5)[0]
    assert type(direct.grad_fn).__name__ != type(operator.grad_fn).__name__
    assert torch.equal(direct, operator)
    for a, b in zip(
        torch.autograd.grad(direct, (x, weight), dy),
        torch.autograd.grad(operator, (x, weight), dy),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_a_subclass_goes_through_the_operator():
    seen = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.randn(5, 7)
    y = ts_kernels.rms_norm(x.as_subclass(Watched), torch.ones(7), 1e-5)
    assert torch.equal(torch.Tensor(y), ts_kernels.rms_norm(x, torch.ones(7), 1e-5))
    assert torch.ops.ts_kernels.rms_norm in seen or torch.ops.ts_kernels.rms_norm.default in seen


def test_backward_twice_and_other_readers_of_the_gradient():
    x = torch.randn(5, 7, requires_grad=True)
    weight = torch.randn(7, requires_grad=True)
    y = ts_kernels.rms_norm(x, weight, 1e-5)
    dy = torch.randn(5, 7)
    kept = dy.clone()
    first = torch.autograd.grad(y, (x, weight), dy, retain_graph=True)
    second = torch.autograd.grad(y, (x, weight), dy)
    assert torch.equal(dy, kept)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_autocast_changes_nothing(llama_formula):
    x = torch.randn(5, 7, dtype=torch.bfloat16)
    weight = torch.randn(7)
    with torch.autocast("cpu", torch.bfloat16):
        y = ts_kernels.rms_norm(x, weight, 1e-5)
        assert torch.equal(y, llama_formula(x, weight, 1e-5))
    assert y.dtype == torch.float32


def test_second_derivative_is_refused_by_name():
    x = torch.randn(5, 7, requires_grad=True)
    y = ts_kernels.rms_norm(x, torch.randn(7), 1e-5)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"reference\.rms_norm"):
        dx.sum().backward()


@pytest.mark.parametrize(
    "x, weight, message",
    [
        (torch.ones(2, 3), torch.ones(4), "same D"),
        (torch.ones(2, 3), torch.ones(1, 3), "same D"),
        (torch.tensor(1.0), torch.ones(1), "same D"),
        (torch.ones(2, 0), torch.ones(0), "at least 1"),
        (torch.ones(2, 3, dtype=torch.int64), torch.ones(3), "floating"),
        (torch.ones(2, 3), torch.ones(3, device="meta"), "one device"),
    ],
)
def test_bad_arguments(x, weight, message):
    with pytest.raises(ValueError, match=message):
        ts_kernels.rms_norm(x, weight, 1e-5)


def test_opcheck():
    x = torch.randn(3, 5, 131, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(131, requires_grad=True)
    torch.library.opcheck(torch.ops.ts_kernels.rms_norm.default, (x, weight, 1e-6))
    x, weight = x.detach().transpose(0, 1), weight.detach()
    y, rstd = torch.ops.ts_kernels.rms_norm(x, weight, 1e-6)
    for want_x, want_weight in itertools.product((True, False), repeat=2):
        torch.library.opcheck(
            torch.ops.ts_kernels.rms_norm_backward.default,
            (torch.randn_like(y), x, weight, rstd, want_x, want_weight),
        )


def test_compiles_without_graph_breaks():
    weight = torch.randn(131, requires_grad=True)
    x = torch.randn(3, 131, requires_grad=True)

    def step(x, weight):
        return ts_kernels.rms_norm(x * 2, weight, 1e-6).square().sum()

    eager = torch.autograd.grad(step(x, weight), (x, weight))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for a, b in zip(eager, torch.autograd.grad(compiled(x, weight), (x, weight)), strict=True):
        assert torch.equal(a, b)
