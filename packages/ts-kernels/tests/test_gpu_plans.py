"""Launch plans on a CUDA device: those chosen give the bits of those that came before them."""

from __future__ import annotations

import pytest
import torch

from ts_kernels import _rms_norm_launch, _rotary
from ts_kernels._rms_norm_launch import Form
from ts_kernels._rms_norm_plan import backward_plan, forward_plan
from ts_kernels._rotary_plan import plan_by_groups, rotary_plan

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LLAMA, GEMMA = Form(1e-6), Form(1e-6, 1.0, False)


@pytest.fixture
def plans(monkeypatch):
    """The plans used; `plans.earlier` while the earlier ones are to be used."""

    class Plans(list):
        earlier = False

    used = Plans()

    def watch(module, name, chosen, earlier):
        def choose(*args):
            used.append((earlier if used.earlier else chosen)(*args))
            return used[-1]

        monkeypatch.setattr(module, name, choose)

    def earlier_backward(rows, hidden, want_weight, bytes_per_column, registers):
        plan = backward_plan(rows, hidden, want_weight, bytes_per_column)
        return plan._replace(stages=min(plan.stages, 3), unroll=1)

    watch(_rotary, "rotary_plan", rotary_plan, lambda q, k, pairs, _: plan_by_groups(q, k, pairs))
    watch(_rms_norm_launch, "forward_plan", forward_plan, lambda rows, n, *_: forward_plan(rows, n))
    watch(_rms_norm_launch, "backward_plan", backward_plan, earlier_backward)
    return used


def assert_same_bits(plans, function, *args):
    """Returns the plans that were chosen."""
    plans.clear()
    plans.earlier = False
    results = function(*args)
    chosen = list(plans)
    plans.earlier = True
    for result, expected in zip(results, function(*args), strict=True):
        assert torch.isfinite(expected).all()
        assert torch.equal(result, expected), plans
    return chosen


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "heads, kv_heads, size, dtype, per_token",
    [
        (40, 8, 128, BF16, True),
        (40, 8, 128, FP16, True),
        (40, 8, 128, FP32, False),
        (64, 8, 128, BF16, True),
        (33, 3, 128, BF16, True),
        (7, 1, 128, BF16, True),
        (96, 8, 128, BF16, False),
        (1, 1, 64, BF16, False),
        (14, 2, 64, BF16, True),
        (40, 8, 64, BF16, True),
        (40, 8, 80, BF16, True),
        (7, 1, 256, BF16, True),
        (16, 16, 256, BF16, True),
    ],
    ids=str,
)
def test_rotary(plans, heads, kv_heads, size, dtype, per_token, interleaved):
    for batch, tokens, table_dtype in ((1, 1, dtype), (2, 513, FP32)):
        q, k = (
            torch.randn(batch, tokens, n, size, device="cuda").to(dtype).transpose(1, 2)
            for n in (heads, kv_heads)
        )
        angles = torch.randn(batch, tokens, size, device="cuda")
        cos, sin = angles.cos().to(table_dtype), (angles + 0.1).sin().to(table_dtype)
        for backward in (False, True):
            args = (q, k, cos, sin, interleaved, backward)
            assert assert_same_bits(plans, _rotary._rotate, *args)[0].per_token == per_token
            assert not plans[-1].per_token


@pytest.mark.parametrize("start, rotary_size", [(0, 128), (1, 128), (0, 64)])
def test_rotary_of_other_strides_and_part_of_the_channels(plans, start, rotary_size):
    """Heads outermost, every other token, an address no multiple of 16, channels that pass."""
    wide = torch.randn(2, 48, 75, 136, device="cuda").to(BF16)
    q, k = wide[:, :, ::2, start : start + 128].split((40, 8), 1)
    cos, sin = torch.randn(2, 1, 38, rotary_size, device="cuda").to(BF16)
    chosen = assert_same_bits(plans, _rotary._rotate, q, k, cos, sin, False, False)
    assert chosen[0].per_token == (rotary_size == 128)


def test_rotary_of_no_tokens(plans):
    q, k = (torch.randn(1, n, 0, 128, device="cuda").to(BF16) for n in (40, 8))
    cos, sin = torch.randn(2, 1, 0, 128, device="cuda").to(BF16)
    ours = _rotary._rotate(q, k, cos, sin, False, False)
    assert [t.shape for t in ours] == [q.shape, k.shape] and not plans


def norm_and_gradients(x, added, dy, dsum, weight, form):
    """All results, with both gradients, the weight's alone and x's alone."""
    normed = _rms_norm_launch.forward(x, added, weight, form)
    given = (dy, dsum, normed.summed, weight, normed.rstd, form)
    return (
        *normed,
        *_rms_norm_launch.backward(*given, True, True),
        _rms_norm_launch.backward(*given, False, True)[1],
        _rms_norm_launch.backward(*given, True, False)[0],
    )


@pytest.mark.parametrize("rows", [1, 4099, 8192])
@pytest.mark.parametrize(
    "hidden, added, form, dtype, early_weight, stages, ahead",
    [
        (577, False, LLAMA, BF16, False, 3, 0),
        (3584, False, LLAMA, BF16, True, 3, 0),
        (4096, False, LLAMA, BF16, True, 3, 0),
        (4096, False, GEMMA, BF16, True, 3, 0),
        (4096, False, GEMMA, FP16, True, 3, 0),
        (4608, False, LLAMA, BF16, True, 4, 0),
        (5119, False, LLAMA, BF16, False, 4, 0),
        (5120, False, LLAMA, BF16, True, 4, 0),
        (5120, False, GEMMA, BF16, True, 4, 0),
        (5120, False, LLAMA, FP16, True, 4, 0),
        (5120, False, LLAMA, FP32, False, 2, 0),
        (4096, True, LLAMA, BF16, False, 1, 1),
        (8192, True, LLAMA, BF16, False, 1, 1),
        (8192, True, GEMMA, BF16, False, 2, 0),
        (4096, True, LLAMA, FP16, False, 2, 0),
    ],
    ids=str,
)
def test_norms(plans, rows, hidden, added, form, dtype, early_weight, stages, ahead):
    x, r, dy, dsum = (torch.randn(rows, hidden, device="cuda").to(dtype) for _ in range(4))
    weight = torch.randn(hidden, device="cuda").to(dtype)
    more, dsum = (r, dsum) if added else (None, None)
    chosen = assert_same_bits(plans, norm_and_gradients, x, more, dy, dsum, weight, form)
    if rows > 1:
        assert chosen[0].early_weight == early_weight
        assert (chosen[1].stages, chosen[1].ahead) == (stages, ahead)


@pytest.mark.parametrize("start, dense, ahead", [(8, False, 0), (1, False, 0), (8, True, 1)])
def test_norm_of_gradients_that_lie_apart(plans, start, dense, ahead):
    """Reading ahead into registers is left out where strides or addresses are others."""
    x, wide = (torch.randn(4099, n, device="cuda").to(BF16) for n in (4096, 4104))
    weight = torch.randn(4096, device="cuda").to(BF16)
    rstd = torch.rsqrt(x.float().square().mean(1) + 1e-6)
    dy = wide[:, start : start + 4096]
    args = (dy.contiguous() if dense else dy, x, x, weight, rstd, LLAMA, True, True)
    assert assert_same_bits(plans, _rms_norm_launch.backward, *args)[0].ahead == ahead
