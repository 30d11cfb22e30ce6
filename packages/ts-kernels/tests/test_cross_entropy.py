"""Chunked cross-entropy: values, gradients, masks, divisors, autocast."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ts_kernels
from ts_kernels import reference
from ts_kernels._precision import scaled
from ts_kernels.testing import assert_rounding_tier
from ts_kernels.testing import random_head as make

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ROWS, CLASSES, WIDTH = 23, 211, 37


def wide(*tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


def value_and_grads(function, hidden, weight, targets, bias, upstream=1.0, frozen=False, **kw):
    inputs = (hidden,) if frozen else (hidden, weight, bias)
    if frozen:
        weight, bias = weight.detach(), bias.detach()
    loss = function(hidden, weight, targets, bias, **kw)
    return loss, *torch.autograd.grad(loss * upstream, inputs)


def compare(ours, plain, exact):
    assert len(ours) == len(plain) == len(exact)
    for name, a, p, e in zip(NAMES, ours, plain, exact):  # noqa: B905
        assert_rounding_tier(a, p, e, name)


NAMES = ("loss", "hidden gradient", "weight gradient", "bias gradient")


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("chunk_size", [1, 7, 1000])
@pytest.mark.parametrize(
    "kw",
    [{}, {"reduction": "sum"}, {"num_items": 41}, {"logit_softcap": 2.0}],
    ids=["mean", "sum", "num_items", "softcap"],
)
def test_as_close_to_float64_as_plain_pytorch(dtype, chunk_size, kw, frozen):
    hidden, weight, targets, bias = make(dtype)
    kw = {**kw, "upstream": 3.0, "frozen": frozen}
    ours = value_and_grads(
        ts_kernels.chunked_cross_entropy,
        hidden,
        weight,
        targets,
        bias,
        chunk_size=chunk_size,
        **kw,
    )
    plain = value_and_grads(reference.chunked_cross_entropy, hidden, weight, targets, bias, **kw)
    h64, w64, b64 = wide(hidden, weight, bias)
    exact = value_and_grads(reference.chunked_cross_entropy, h64, w64, targets, b64, **kw)
    assert ours[0].dtype == torch.float32
    assert all(g.dtype == dtype for g in ours[1:])
    compare(ours, plain, exact)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.integers(0, 13),
    classes=st.integers(1, 60),
    width=st.integers(1, 17),
    chunk_size=st.integers(1, 15),
    masked=st.floats(0, 1),
    spread=st.sampled_from([1e-3, 1.0, 30.0, 1e4]),
    with_bias=st.booleans(),
    softcap=st.sampled_from([None, 5.0, 30.0]),
    frozen=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_shape_and_spread(
    rows, classes, width, chunk_size, masked, spread, with_bias, softcap, frozen, seed
):
    torch.manual_seed(seed)
    hidden = torch.randn(rows, width, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(classes, width, dtype=torch.float64) * spread
    bias = torch.randn(classes, dtype=torch.float64) if with_bias else None
    targets = torch.randint(0, classes, (rows,))
    targets[torch.rand(rows) < masked] = -100
    inputs = [hidden]
    if not frozen:
        inputs += [t.requires_grad_() for t in (weight, bias) if t is not None]
    kw = {"logit_softcap": softcap}
    ours = ts_kernels.chunked_cross_entropy(
        hidden, weight, targets, bias, chunk_size=chunk_size, **kw
    )
    exact = reference.chunked_cross_entropy(hidden, weight, targets, bias, **kw)
    torch.testing.assert_close(ours, exact)
    for a, e in zip(
        torch.autograd.grad(ours, inputs), torch.autograd.grad(exact, inputs), strict=True
    ):
        torch.testing.assert_close(a, e, atol=1e-9 * spread, rtol=1e-6)


def test_gradcheck_in_float64():
    hidden, weight, targets, bias = make(rows=5, classes=7, width=3)
    h64, w64, b64 = wide(hidden, weight, bias)
    for kw in ({}, {"reduction": "sum"}, {"logit_softcap": 1.5}):

        def loss(h, w, b, kw=kw):
            return ts_kernels.chunked_cross_entropy(h, w, targets, b, chunk_size=2, **kw)

        assert torch.autograd.gradcheck(loss, (h64, w64, b64))
        assert torch.autograd.gradcheck(loss, (h64, w64.detach(), b64.detach()))


@pytest.mark.parametrize("kw", [{}, {"reduction": "sum"}, {"num_items": 0}, {"num_items": 9}])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("frozen", [True, False])
def test_every_label_masked_gives_zero(dtype, kw, frozen):
    hidden, weight, targets, bias = make(dtype)
    targets.fill_(-100)
    kw = {**kw, "frozen": frozen}
    results = value_and_grads(
        ts_kernels.chunked_cross_entropy, hidden, weight, targets, bias, chunk_size=5, **kw
    )
    for result in results:
        assert torch.equal(result, torch.zeros_like(result))
    assert ts_kernels.count_targets(targets).item() == 0


def test_another_ignore_index():
    hidden, weight, targets, bias = make()
    other = targets.clone()
    other[other == -100] = 3
    other[:4] = 3
    targets[other == 3] = -100
    a = ts_kernels.chunked_cross_entropy(hidden, weight, other, bias, ignore_index=3)
    b = ts_kernels.chunked_cross_entropy(hidden, weight, targets, bias)
    assert torch.equal(a, b)


@pytest.mark.parametrize(
    "num_items", [lambda n: n, lambda n: torch.tensor(n), lambda n: torch.tensor([n])]
)
@pytest.mark.parametrize("cuts", [[23], [1, 22], [5, 6, 12], [10, 0, 13], [1] * 23])
def test_loss_does_not_depend_on_how_a_window_is_split(cuts, num_items):
    hidden, weight, targets, bias = make()
    whole = value_and_grads(
        ts_kernels.chunked_cross_entropy, hidden, weight, targets, bias, chunk_size=6
    )
    count = int(ts_kernels.count_targets(targets))
    parts = [
        ts_kernels.chunked_cross_entropy(
            h, weight, t, bias, chunk_size=4, num_items=num_items(count)
        )
        for h, t in zip(hidden.split(cuts), targets.split(cuts), strict=True)
    ]
    loss = torch.stack(parts).sum()
    torch.testing.assert_close(loss, whole[0])
    for a, e in zip(torch.autograd.grad(loss, (hidden, weight, bias)), whole[1:], strict=True):
        torch.testing.assert_close(a, e)


def test_count_targets():
    labels = torch.tensor([[5, -100, 3], [-100, -100, 7]])
    assert ts_kernels.count_targets(labels).item() == 3
    assert ts_kernels.count_targets(labels, shift=True).item() == 2
    assert ts_kernels.count_targets(labels, ignore_index=7).item() == 5


def test_leading_shapes_and_strides():
    hidden, weight, targets, bias = make(rows=24)
    expected = ts_kernels.chunked_cross_entropy(hidden, weight, targets, bias)
    (grad,) = torch.autograd.grad(expected, hidden)
    shuffled = hidden.detach().reshape(2, 12, WIDTH).transpose(0, 1)  # [12, 2, WIDTH]
    spread = torch.randn(12, 2, 2 * WIDTH)
    spread[..., ::2] = shuffled
    view = spread[..., ::2].requires_grad_()
    two = torch.stack([targets, targets], dim=1)[:, 0]  # strided targets
    loss = ts_kernels.chunked_cross_entropy(
        view, weight, two.reshape(2, 12).t(), bias.detach()[:, None].expand(-1, 2)[:, 0]
    )
    torch.testing.assert_close(loss, expected)
    (view_grad,) = torch.autograd.grad(loss, view)
    torch.testing.assert_close(view_grad, grad.reshape(2, 12, WIDTH).transpose(0, 1))


@pytest.mark.parametrize("frozen", [True, False])
def test_empty_batch(frozen):
    hidden, weight, targets, bias = make(rows=0)
    results = value_and_grads(
        ts_kernels.chunked_cross_entropy, hidden, weight, targets, bias, frozen=frozen
    )
    for result in results:
        assert torch.equal(result, torch.zeros_like(result))


def test_int32_targets():
    hidden, weight, targets, bias = make()
    a = ts_kernels.chunked_cross_entropy(hidden, weight, targets.int(), bias)
    assert torch.equal(a, ts_kernels.chunked_cross_entropy(hidden, weight, targets, bias))


def test_classes_ruled_out_by_the_bias():
    hidden, weight, targets, bias = make(masked=0.0)
    targets %= 100
    ruled_out = bias.detach().clone()
    ruled_out[100:] = float("-inf")
    loss = ts_kernels.chunked_cross_entropy(hidden, weight, targets, ruled_out, chunk_size=5)
    expected = ts_kernels.chunked_cross_entropy(
        hidden, weight[:100], targets, bias[:100], chunk_size=5
    )
    torch.testing.assert_close(loss, expected)
    (grad,) = torch.autograd.grad(loss, weight)
    assert torch.equal(grad[100:], torch.zeros(CLASSES - 100, WIDTH))


def test_half_gradients_survive_a_large_batch():
    """1/N times a probability underflows in fp16; with a frozen head the scaling comes last."""
    hidden, weight, targets, bias = make(torch.float16, rows=64, masked=0.0)
    kw = {"upstream": 1e-4, "frozen": True}
    (_, ours) = value_and_grads(
        ts_kernels.chunked_cross_entropy, hidden, weight, targets, bias, **kw
    )
    (_, plain) = value_and_grads(
        reference.chunked_cross_entropy, hidden, weight, targets, bias, **kw
    )
    h64, w64, b64 = wide(hidden, weight, bias)
    (_, exact) = value_and_grads(reference.chunked_cross_entropy, h64, w64, targets, b64, **kw)
    spacing = 2.0**-24  # of the numbers that fp16 has down there
    assert (ours.double() - exact).abs().max() <= 0.51 * spacing
    assert (plain.double() - exact).abs().max() > spacing


def test_true_class_keeps_its_precision_when_nearly_certain():
    """p - 1 of the true class is formed in fp32: in bf16 a p of 0.9995 would have become 1."""
    logits = torch.tensor([[7.6, 0.0]], dtype=torch.bfloat16)
    hidden = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    weight = logits.t().contiguous()
    bias = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    loss = ts_kernels.chunked_cross_entropy(hidden, weight, torch.tensor([0]), bias)
    (grad,) = torch.autograd.grad(loss, bias)
    p = torch.softmax(logits.double(), dim=1)[0]
    torch.testing.assert_close(grad.double(), torch.stack([p[0] - 1, p[1]]), rtol=4e-3, atol=0)
    assert grad[0] != 0


def test_upstream_gradients_scale_and_backward_may_run_twice():
    hidden, weight, targets, bias = make()
    once = value_and_grads(
        ts_kernels.chunked_cross_entropy, hidden, weight, targets, bias, chunk_size=5
    )
    loss = ts_kernels.chunked_cross_entropy(hidden, weight, targets, bias, chunk_size=5)
    for upstream in (3.0, -0.5, 0.0):
        grads = torch.autograd.grad(upstream * loss, (hidden, weight, bias), retain_graph=True)
        for a, e in zip(grads, once[1:], strict=True):
            torch.testing.assert_close(a, upstream * e)
    # the loss enters twice, and an upstream gradient has another reader
    seen = []
    loss.register_hook(seen.append)
    (loss * loss + loss).backward()
    assert torch.equal(seen[0], 2 * loss.detach() + 1)
    torch.testing.assert_close(weight.grad, (2 * loss.detach() + 1) * once[2])


def test_scaling_rounds_once():
    """On CUDA torch itself would first round a 0-d factor to bf16."""
    gradient, factor = torch.randn(1000).bfloat16(), torch.tensor(1 / 3)
    expected = (gradient.double() * factor.double()).float()
    assert torch.equal(scaled(gradient, factor, torch.float32), expected)
    assert torch.equal(scaled(gradient, factor, torch.bfloat16), expected.bfloat16())


def test_hidden_with_other_users_is_left_alone():
    hidden, weight, targets, bias = make()
    kept = hidden.detach().clone()
    scaled = hidden * 1.0
    loss = ts_kernels.chunked_cross_entropy(scaled, weight, targets, bias)
    (loss + scaled.square().sum()).backward()
    assert torch.equal(scaled, kept)
    ours = hidden.grad.clone()
    hidden.grad = None
    scaled = hidden * 1.0
    loss = reference.chunked_cross_entropy(scaled, weight, targets, bias)
    (loss + scaled.square().sum()).backward()
    torch.testing.assert_close(ours, hidden.grad)


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("chunk_size", [5, 100])
def test_autocast_is_that_of_linear(frozen, chunk_size):
    hidden, weight, targets, bias = make()
    arguments = (weight, targets, bias)
    kw = {"frozen": frozen}
    ours_function = partial(ts_kernels.chunked_cross_entropy, chunk_size=chunk_size)
    with torch.autocast("cpu", torch.bfloat16):
        ours = value_and_grads(ours_function, hidden, *arguments, **kw)
        plain = value_and_grads(reference.chunked_cross_entropy, hidden, *arguments, **kw)
    h64, w64, b64 = wide(hidden, weight, bias)
    exact = value_and_grads(reference.chunked_cross_entropy, h64, w64, targets, b64, **kw)
    assert all(t.dtype == torch.float32 for t in ours)
    compare(ours, plain, exact)
    assert not torch.equal(ours[0], ours_function(hidden, *arguments))
