"""Sequence log-probabilities and their gradients."""

from __future__ import annotations

import itertools

import pytest
import torch

import ts_kernels
from ts_kernels import reference
from ts_kernels.testing import LargestTensor, assert_rounding_tier

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
BATCH, TIME, CLASSES, WIDTH = 3, 11, 211, 37


def make(dtype=torch.float32, batch=BATCH, time=TIME, classes=CLASSES, width=WIDTH):
    hidden = torch.randn(batch, time, width).to(dtype).requires_grad_()
    weight = torch.randn(classes, width).mul(width**-0.5).to(dtype).requires_grad_()
    bias = torch.randn(classes).to(dtype).requires_grad_()
    labels = torch.randint(0, classes, (batch, time))
    labels[torch.rand(batch, time) < 0.3] = -100
    return hidden, weight, labels, bias


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shift, average", list(itertools.product([True, False], repeat=2)))
def test_as_close_to_float64_as_plain_pytorch(dtype, shift, average):
    hidden, weight, labels, bias = make(dtype)
    upstream = torch.tensor([2.0, -0.3, 0.7])
    kw = {"shift": shift, "average": average}
    ours = ts_kernels.sequence_logprobs(hidden, weight, labels, bias, chunk_size=5, **kw)
    plain = reference.sequence_logprobs(hidden, weight, labels, bias, **kw)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    exact = reference.sequence_logprobs(wide[0], wide[1], labels, wide[2], **kw)
    assert ours.shape == (BATCH,) and ours.dtype == torch.float32
    assert_rounding_tier(ours, plain, exact, "logprobs")
    inputs = (hidden, weight, bias)
    for name, a, p, e in zip(
        ("hidden", "weight", "bias"),
        torch.autograd.grad(ours, inputs, upstream),
        torch.autograd.grad(plain, inputs, upstream),
        torch.autograd.grad(exact, wide, upstream.double()),
        strict=True,
    ):
        assert a.dtype == dtype
        assert_rounding_tier(a, p, e, name)


def test_gradcheck_in_float64():
    hidden, weight, labels, bias = make(batch=2, time=4, classes=5, width=3)
    inputs = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    for softcap in (None, 1.5):
        assert torch.autograd.gradcheck(
            lambda h, w, b, softcap=softcap: ts_kernels.sequence_logprobs(
                h, w, labels, b, chunk_size=3, average=True, logit_softcap=softcap
            ),
            inputs,
        )


@pytest.mark.parametrize("average", [True, False])
def test_a_sequence_without_labels_is_zero(average):
    hidden, weight, labels, bias = make()
    labels[1] = -100
    result = ts_kernels.sequence_logprobs(hidden, weight, labels, bias, average=average)
    assert result[1] == 0 and result[0] < 0
    (grad,) = torch.autograd.grad(result.sum(), hidden)
    assert torch.equal(grad[1], torch.zeros_like(grad[1]))
    labels.fill_(-100)
    result = ts_kernels.sequence_logprobs(hidden, weight, labels, bias, average=average)
    grads = torch.autograd.grad(result.sum(), (hidden, weight, bias))
    for tensor in (result, *grads):
        assert torch.equal(tensor, torch.zeros_like(tensor))


def test_it_is_minus_the_summed_cross_entropy():
    hidden, weight, labels, bias = make()
    logprobs = ts_kernels.sequence_logprobs(hidden, weight, labels, bias)
    loss = ts_kernels.causal_lm_loss(hidden, weight, labels, bias, reduction="sum")
    torch.testing.assert_close(logprobs.sum(), -loss)


@pytest.mark.parametrize("batch, time", [(0, 5), (2, 0), (2, 1)])
def test_empty(batch, time):
    hidden, weight, labels, bias = make(batch=batch, time=time)
    result = ts_kernels.sequence_logprobs(hidden, weight, labels, bias, average=True)
    assert torch.equal(result, torch.zeros(batch))
    grads = torch.autograd.grad(result.sum(), (hidden, weight, bias))
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grads)


def test_a_weight_that_moves_between_forward_and_backward():
    """A pager swaps a parameter's storage and the old bytes are used for something else."""
    hidden, weight, labels, bias = make()
    expected = torch.autograd.grad(
        ts_kernels.sequence_logprobs(hidden, weight, labels, bias).sum(), hidden
    )
    moving = torch.nn.Parameter(weight.detach().clone(), requires_grad=False)
    result = ts_kernels.sequence_logprobs(hidden, moving, labels, bias)
    old = moving.data
    moving.data = old.clone()
    old.fill_(float("nan"))
    assert torch.equal(torch.autograd.grad(result.sum(), hidden)[0], expected[0])


def test_a_quantized_weight_whose_buffers_move(quantized):
    hidden, weight, labels, bias = make()
    frozen = quantized(weight.detach())
    result = ts_kernels.sequence_logprobs(hidden, frozen, labels, bias, chunk_size=5)
    old, frozen.codes = frozen.codes, frozen.codes.clone()
    old.zero_()
    upstream = torch.tensor([2.0, -0.3, 0.7])
    ours = torch.autograd.grad(result, (hidden, bias), upstream)
    expected = reference.sequence_logprobs(hidden, frozen.dense(), labels, bias)
    torch.testing.assert_close(result, expected)
    for a, e in zip(ours, torch.autograd.grad(expected, (hidden, bias), upstream), strict=True):
        torch.testing.assert_close(a, e)


@pytest.mark.parametrize("subclass", [True, False])
def test_backward_uses_the_autocast_of_the_forward_pass(quantized, subclass):
    hidden, weight, labels, bias = make()
    head = quantized(weight.detach()) if subclass else weight.detach()
    dense = head.dense() if subclass else head
    if subclass:
        head.scale = head.scale.clone()
    with torch.autocast("cpu", torch.bfloat16):
        ours = ts_kernels.sequence_logprobs(hidden, head, labels, bias.detach())
        plain = reference.sequence_logprobs(hidden, dense, labels, bias.detach())
    (ours_grad,) = torch.autograd.grad(ours.sum(), hidden)
    (plain_grad,) = torch.autograd.grad(plain.sum(), hidden)
    assert ours_grad.dtype == torch.float32
    torch.testing.assert_close(ours_grad, plain_grad, atol=0.02, rtol=0.02)


def test_no_tensor_as_large_as_the_logits():
    from ts_kernels import _logprobs

    hidden, weight, labels, bias = make(batch=4, time=16, classes=1009, width=16)
    rows, targets = hidden.detach().reshape(64, 16), labels.reshape(64)
    arguments = (weight.detach(), bias.detach(), None, targets, 8, -100, None, torch.float32)
    with LargestTensor() as seen:
        _logprobs._forward(rows, *arguments)
        _logprobs._backward_implementation(
            torch.ones(64), rows, *arguments, True, True, True, False
        )
    assert seen.elements <= 1009 * 16 < 64 * 1009


def test_second_derivative_is_refused_by_name():
    hidden, weight, labels, _ = make()
    result = ts_kernels.sequence_logprobs(hidden, weight, labels)
    (grad,) = torch.autograd.grad(result.sum(), hidden, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"reference\.sequence_logprobs"):
        grad.sum().backward()


def test_bad_arguments():
    hidden, weight, labels, _ = make()
    with pytest.raises(ValueError, match=r"\[B, T, D\]"):
        ts_kernels.sequence_logprobs(hidden[0], weight, labels[0])
    with pytest.raises(ValueError, match="one for each row"):
        ts_kernels.sequence_logprobs(hidden, weight, labels[:, 1:])
    with pytest.raises(ValueError, match="at least 1"):
        ts_kernels.sequence_logprobs(hidden, weight, labels, chunk_size=0)
    labels[1, 2] = CLASSES
    with pytest.raises(ValueError, match=f"target {CLASSES} at row"):
        ts_kernels.sequence_logprobs(hidden, weight, labels)


def test_opcheck():
    hidden, weight, labels, bias = make(torch.bfloat16)
    rows, targets = hidden.detach().reshape(-1, WIDTH), labels.reshape(-1)
    rest = (targets, 7, -100, None, torch.bfloat16)
    torch.library.opcheck(
        torch.ops.ts_kernels.token_logprobs.default,
        (rows.requires_grad_(), weight, bias, None, *rest),
    )
    heads = (rows.detach(), weight.detach(), bias.detach())
    for wanted in ((True, True, True, False), (True, False, False, False)):
        torch.library.opcheck(
            torch.ops.ts_kernels.token_logprobs_backward.default,
            (torch.randn(BATCH * TIME), *heads, None, *rest, *wanted),
        )


def test_compiles_without_graph_breaks():
    hidden, weight, labels, bias = make()

    def step(hidden, weight, bias):
        return ts_kernels.sequence_logprobs(hidden, weight, labels, bias, average=True).sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    inputs = (hidden, weight, bias)
    for a, b in zip(
        torch.autograd.grad(compiled(*inputs), inputs),
        torch.autograd.grad(step(*inputs), inputs),
        strict=True,
    ):
        assert torch.equal(a, b)
