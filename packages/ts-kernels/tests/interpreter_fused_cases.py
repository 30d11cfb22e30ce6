"""The fused kernels, executed on the CPU by Triton's interpreter.

Collected only by test_interpreter.py. As in interpreter_cases.py, a bf16 result may be a few units
in the last place off, because the interpreter truncates.
"""

from __future__ import annotations

import pytest
import torch

import ts_kernels
from ts_kernels import _gated_mlp, _rms_norm_launch, _rotary, _rotary_plan, _split, reference
from ts_kernels._backend import interpreting
from ts_kernels.testing import assert_rounding_tier, compare_with_reference

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _launches(monkeypatch):
    """Counts launches, so that no test passes by taking the PyTorch path."""
    assert interpreting()
    count = []
    for module, name in (
        (_rms_norm_launch, "_launch_forward"),
        (_rms_norm_launch, "_launch_backward"),
        (_gated_mlp, "_launch_forward"),
        (_gated_mlp, "_launch_backward"),
        (_rotary, "_launch"),
        (_split, "on_device_of"),
    ):
        launch = getattr(module, name)

        def spy(*args, launch=launch, name=name):
            count.append(name)
            return launch(*args)

        monkeypatch.setattr(module, name, spy)
    yield count
    assert count, "no kernel was launched"


def check(actual, plain, exact, name):
    if actual.dtype == torch.float32:
        assert_rounding_tier(actual, plain, exact, name)
        return
    units = 3 if actual.dtype == torch.bfloat16 else 1
    room = units * torch.finfo(actual.dtype).eps * exact.abs().max()
    error = (actual.double() - exact).abs().max()
    assert error <= 2 * (plain.double() - exact).abs().max() + room, (name, error)


def compare(ours, plain, inputs, upstream):
    compare_with_reference(ours, plain, inputs, upstream, check)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("offset, round_first", [(0.0, True), (1.0, False)])
@pytest.mark.parametrize("shape", [(2, 3, 131), (5, 577)], ids=str)
@pytest.mark.parametrize("residual", [False, True])
def test_norm_forms(dtype, offset, round_first, shape, residual):
    kw = {"offset": offset, "round_first": round_first}
    x, r = torch.randn(2, *shape).to(dtype)
    w = torch.randn(shape[-1]).to(dtype)
    if residual:
        compare(
            lambda x, r, w: ts_kernels.add_rms_norm(x, r, w, 1e-5, **kw),
            lambda x, r, w: reference.add_rms_norm(x, r, w, 1e-5, **kw),
            [t.clone().requires_grad_() for t in (x, r, w)],
            [torch.randn(shape), torch.randn(shape)],
        )
    else:
        compare(
            lambda x, w: ts_kernels.rms_norm(x, w, 1e-5, **kw),
            lambda x, w: reference.rms_norm(x, w, 1e-5, **kw),
            [t.clone().requires_grad_() for t in (x, w)],
            [torch.randn(shape)],
        )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7, 131), (2, 4099)], ids=str)
def test_gated_mlp(dtype, activation, shape):
    compare(
        lambda g, u: ts_kernels.gated_mlp(g, u, activation),
        lambda g, u: reference.gated_mlp(g, u, activation),
        [(2 * torch.randn(shape)).to(dtype).requires_grad_() for _ in range(2)],
        [torch.randn(shape)],
    )


def test_gated_mlp_reads_strides_where_they_lie():
    both = torch.randn(5, 3, 2 * 131)
    dout = torch.randn(3, 5, 131).transpose(0, 1)
    for gate, up in (
        both.chunk(2, -1),
        (both[::2, :, :131], both[1:4, :, 131:]),
        (torch.randn(131, 6).t(), torch.randn(6, 131)),
        (torch.randn(131).expand(4, 131), torch.randn(4, 131)),
    ):
        gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
        if gate.shape != up.shape:
            up = torch.randn(gate.shape, requires_grad=True)
        y, expected = ts_kernels.gated_mlp(gate, up), reference.gated_mlp(gate, up)
        torch.testing.assert_close(y, expected)
        d = dout if dout.shape == y.shape else torch.randn(y.shape)
        ours = torch.autograd.grad(y, (gate, up), d)
        plain = torch.autograd.grad(expected, (gate, up), d)
        torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "heads, kv_heads, size, rotary_size, heads_dim",
    [(3, 1, 6, 6, 1), (5, 5, 10, 6, 2), (2, 2, 40, 32, 1), (33, 3, 64, 64, 2)],
)
def test_rotary(dtype, interleaved, heads, kv_heads, size, rotary_size, heads_dim):
    batch, tokens = 2, 3
    q, k = (
        torch.randn(batch, tokens, n, size).to(dtype).requires_grad_() for n in (heads, kv_heads)
    )
    angles = torch.randn(batch if heads > 2 else 1, tokens, rotary_size)
    # not the same value for both of a pair: the formula must hold for any table
    cos, sin = angles.cos().to(dtype), (angles + 0.1).sin().to(dtype)
    kw = {"interleaved": interleaved, "heads_dim": heads_dim}

    def turned(function):
        def run(q, k):
            if heads_dim == 1:
                q, k = q.transpose(1, 2), k.transpose(1, 2)
            tables = (cos, sin) if q.dtype != torch.float64 else (cos.double(), sin.double())
            return function(q, k, *tables, **kw)

        return run

    shape = (
        (lambda n: (batch, n, tokens, size))
        if heads_dim == 1
        else (lambda n: (batch, tokens, n, size))
    )
    upstream = [torch.randn(shape(n)) for n in (heads, kv_heads)]
    compare(turned(ts_kernels.rotary), turned(reference.rotary), [q, k], upstream)


def test_rotary_with_channels_apart_in_memory():
    q = torch.randn(1, 2, 3, 16)[..., ::2]
    k = torch.randn(1, 8, 3, 2).transpose(1, 3)
    angles = torch.randn(3, 8)
    ours = ts_kernels.rotary(q, k, angles.cos(), angles.sin())
    plain = reference.rotary(q, k, angles.cos(), angles.sin())
    torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "heads, kv_heads, size, rotary_size",
    [(8, 4, 8, 8), (5, 3, 8, 8), (1, 9, 10, 6), (3, 0, 16, 4)],
    ids=str,
)
def test_every_plan_of_rotary_gives_the_same_bits(
    monkeypatch, dtype, interleaved, heads, kv_heads, size, rotary_size
):
    q, k = (torch.randn(2, 3, n, size).to(dtype).transpose(1, 2) for n in (heads, kv_heads))
    angles = torch.randn(2, 3, rotary_size)
    cos, sin = angles.cos(), (angles + 0.1).sin()
    for backward in (False, True):
        expected = _rotary._rotate(q, k, cos, sin, interleaved, backward)
        for plan in (
            _rotary_plan.RotaryPlan(False, 2, 4),
            _rotary_plan.RotaryPlan(True, 1, 1),
            _rotary_plan.RotaryPlan(True, 4, 2),
            _rotary_plan.RotaryPlan(True, 16, 8),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(_rotary, "rotary_plan", lambda *args, plan=plan: plan)
                actual = _rotary._rotate(q, k, cos, sin, interleaved, backward)
            assert all(map(torch.equal, actual, expected)), plan


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "heads, kv_heads, size",
    [(1, 1, 64), (14, 2, 64), (9, 3, 80), (7, 1, 128), (40, 8, 128), (64, 8, 128), (16, 16, 256)],
    ids=str,
)
def test_the_plan_of_rotary_gives_the_bits_of_one_by_groups(
    monkeypatch, dtype, heads, kv_heads, size
):
    plans = []

    def choose(function):
        def chosen(*args):
            plans.append(function(*args))
            return plans[-1]

        return chosen

    for tokens in (1, 3):
        q, k = (
            torch.randn(1, tokens, n, size).to(dtype).transpose(1, 2) for n in (heads, kv_heads)
        )
        angles = torch.randn(1, tokens, size)
        cos, sin = angles.cos().to(dtype), (angles + 0.1).sin().to(dtype)
        for interleaved, backward in ((False, False), (False, True), (True, False), (True, True)):
            results = []
            for function in (
                _rotary_plan.rotary_plan,
                lambda q, k, pairs, _: _rotary_plan.plan_by_groups(q, k, pairs),
            ):
                with monkeypatch.context() as patch:
                    patch.setattr(_rotary, "rotary_plan", choose(function))
                    results.append(_rotary._rotate(q, k, cos, sin, interleaved, backward))
            assert all(map(torch.equal, *results)), plans[-2:]
    assert not any(plan.per_token for plan in plans[1::2])
    if (heads, kv_heads) == (40, 8):
        assert all(plan.per_token == (dtype != torch.float32) for plan in plans[::2])


def test_split_halves_hold_sixteen_bits():
    for function, dim in ((_split.factor_rows, 0), (_split.factor_columns, 1)):
        matrix = torch.randn(7, 131)
        high, again, low = function(matrix).float().chunk(3, dim)
        assert high.shape == matrix.shape and torch.equal(high, again)
        assert ((high + low) - matrix).abs().max() <= 2**-14 * matrix.abs().max()
        assert ((high - matrix) / matrix).abs().max() <= 2**-7
    parts = torch.randn(5, 6)
    high, low, again = _split.merge_and_split(parts, 0.5).float().chunk(3, 1)
    expected = 0.5 * (parts[:, :3] + parts[:, 3:])
    assert torch.equal(high, again)
    assert ((high + low) - expected).abs().max() <= 2**-14 * expected.abs().max()


def test_opcheck_with_the_kernels_inside():
    which = ("test_schema", "test_faketensor", "test_autograd_registration")
    ops = torch.ops.ts_kernels
    x, r = torch.randn(2, 3, 131).requires_grad_()
    w = torch.randn(131, requires_grad=True)
    q, k = torch.randn(2, 1, 2, 3, 8).requires_grad_()
    angles = torch.randn(1, 3, 8)
    for op, args in (
        (ops.add_rms_norm, (x, r, w, 1e-5, 1.0, False)),
        (ops.gated_mlp, (x, r, True)),
        (ops.rotary, (q, k, angles.cos(), angles.sin(), True, False)),
    ):
        torch.library.opcheck(op.default, args, test_utils=which)
