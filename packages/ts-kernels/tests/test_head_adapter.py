"""LoRA on the output layer, in the losses that never build the logits."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch

import ts_kernels
from ts_kernels import LoraAdapter, reference
from ts_kernels.testing import LargestTensor, compare_with_reference
from ts_kernels.testing import random_head as make

ROWS, CLASSES, WIDTH, RANK = 23, 211, 37, 5
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def adapter(dtype=torch.float32, rank=RANK):
    a = (torch.randn(rank, WIDTH) * WIDTH**-0.5).to(dtype).requires_grad_()
    return a, torch.randn(CLASSES, rank).to(dtype).requires_grad_()


def losses(targets, **kw):
    def run(function, **more):
        return lambda h, w, a, b, bias: function(
            h, w, targets, bias, lora=LoraAdapter(a, b, 0.7), **kw, **more
        )

    return run


def check_for(dtype):
    """The rounding tier for the root of the mean square.

    (Of a few values the largest error, or of one number any error, may be small by luck.)
    """

    def check(actual, plain, exact, what):
        assert actual.shape == exact.shape
        if exact.numel() > 1:
            room = 1e-6 * exact.norm().clamp(min=1)
            assert (actual - exact).norm() <= 2 * (plain - exact).norm() + room, what
        else:
            room = max(torch.finfo(dtype).eps / 2, 1e-6)
            assert (actual - exact).abs() <= room * exact.abs(), what

    return check


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("chunk_size", [7, 1024])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_cross_entropy(dtype, chunk_size, softcap):
    hidden, weight, targets, bias = make(dtype, rows=101)
    run = losses(targets, logit_softcap=softcap)
    compare_with_reference(
        run(ts_kernels.chunked_cross_entropy, chunk_size=chunk_size),
        run(reference.chunked_cross_entropy),
        [hidden, weight, *adapter(dtype), bias],
        [torch.tensor(3.0)],
        check_for(torch.float32 if dtype == torch.float64 else dtype),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_adapters_on_another_dtype(dtype):
    hidden, weight, targets, bias = make(dtype)
    run = losses(targets)
    compare_with_reference(
        run(ts_kernels.chunked_cross_entropy, chunk_size=7),
        run(reference.chunked_cross_entropy),
        [hidden, weight, *adapter(), bias],
        [torch.tensor(1.0)],
        check_for(dtype),
    )


def test_sequence_logprobs_and_causal_loss():
    hidden, weight, _, bias = make(rows=24)
    labels = torch.randint(0, CLASSES, (2, 12))
    labels[0, :5] = -100
    a, b = adapter()
    given = [hidden.detach().reshape(2, 12, WIDTH).requires_grad_(), weight, a, b, bias]
    for name, upstream in (("sequence_logprobs", torch.tensor([1.0, -2.0])),):
        run = losses(labels)
        compare_with_reference(
            run(getattr(ts_kernels, name), chunk_size=7),
            run(getattr(reference, name)),
            given,
            [upstream],
        )
    lora = LoraAdapter(a, b, 0.7)
    loss = ts_kernels.causal_lm_loss(given[0], weight, labels, bias, lora=lora)
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    expected = reference.chunked_cross_entropy(given[0], weight, shifted, bias, lora=lora)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("train", list(itertools.product([True, False], repeat=5)))
def test_any_part_may_be_frozen(train):
    hidden, weight, targets, bias = make()
    parts = [
        t.detach().requires_grad_(on)
        for t, on in zip((hidden, weight, *adapter(), bias), train, strict=True)
    ]
    wanted = [t for t in parts if t.requires_grad]
    run = losses(targets)
    chunk_size = 7 if train[0] else 1024
    ours = run(ts_kernels.chunked_cross_entropy, chunk_size=chunk_size)(*parts)
    plain = run(reference.chunked_cross_entropy)(*parts)
    torch.testing.assert_close(ours, plain)
    assert ours.requires_grad == any(train)
    if wanted:
        grads = torch.autograd.grad(ours, wanted)
        torch.testing.assert_close(grads, torch.autograd.grad(plain, wanted))


@pytest.mark.parametrize("train_hidden", [True, False])
@pytest.mark.parametrize("function", ["chunked_cross_entropy", "sequence_logprobs"])
def test_a_quantized_output_layer(quantized, function, train_hidden):
    hidden, weight, targets, _ = make()
    held = quantized(weight.detach())
    dense = held.dense()
    a, b = adapter()
    hidden = hidden.detach()
    if function == "sequence_logprobs":
        hidden, targets = hidden[None], targets[None]
    hidden.requires_grad_(train_hidden)
    wanted = [a, b, *([hidden] if train_hidden else [])]
    lora = LoraAdapter(a, b, 0.7)
    ours = getattr(ts_kernels, function)(hidden, held, targets, lora=lora, chunk_size=7)
    plain = getattr(reference, function)(hidden, dense, targets, lora=lora)
    torch.testing.assert_close(ours, plain)
    grads = torch.autograd.grad(ours.sum(), wanted)
    torch.testing.assert_close(grads, torch.autograd.grad(plain.sum(), wanted))


def test_masked_labels_and_no_rows_give_zero():
    hidden, weight, targets, _ = make()
    a, b = adapter()
    for h, t in ((hidden, targets.fill_(-100)), (hidden[:0], targets[:0])):
        for chunk_size in (7, 1024):
            loss = ts_kernels.chunked_cross_entropy(
                h, weight, t, lora=LoraAdapter(a, b), chunk_size=chunk_size
            )
            for tensor in (loss, *torch.autograd.grad(loss, (hidden, weight, a, b))):
                assert torch.equal(tensor, torch.zeros_like(tensor))


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_compiles_without_graph_breaks(autocast, frozen):
    hidden, weight, targets, _ = make()
    weight.requires_grad_(not frozen)
    a, b = adapter()
    inputs = (hidden, a, b) if frozen else (hidden, a, b, weight)

    def step(hidden, weight, a, b):
        lora = LoraAdapter(a, b, 0.7)
        return ts_kernels.chunked_cross_entropy(hidden, weight, targets, chunk_size=7, lora=lora)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        eager_loss, loss = step(hidden, weight, a, b), compiled(hidden, weight, a, b)
    torch.testing.assert_close(loss, eager_loss)
    tolerance = {"rtol": 2e-2, "atol": 1e-3} if autocast else {}
    torch.testing.assert_close(
        torch.autograd.grad(loss, inputs), torch.autograd.grad(eager_loss, inputs), **tolerance
    )


def test_no_logits_and_no_dense_update_of_the_weight():
    """Neither [N, V] nor B A [V, D] is ever made."""
    rows, classes, width, rank, chunk = 512, 400, 64, 4, 16
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(classes, width)
    a, b = torch.randn(rank, width, requires_grad=True), torch.randn(classes, rank)
    b.requires_grad_()
    targets = torch.randint(0, classes, (rows,))
    gc.collect()
    with LargestTensor() as largest:
        ts_kernels.chunked_cross_entropy(
            hidden, weight, targets, lora=LoraAdapter(a, b), chunk_size=chunk
        ).backward()
    assert largest.elements == rows * (width + rank)


@pytest.mark.parametrize(
    "a, b, scaling, message",
    [
        (torch.zeros(5, 36), torch.zeros(CLASSES, 5), 1.0, r"expected \[r, 37\] and \[211, r\]"),
        (torch.zeros(5, WIDTH), torch.zeros(CLASSES, 4), 1.0, r"expected \[r, 37\]"),
        (torch.zeros(0, WIDTH), torch.zeros(CLASSES, 0), 1.0, "r of at least 1"),
        (torch.zeros(5, WIDTH), torch.zeros(CLASSES, 5).double(), 1.0, "one floating dtype"),
        (torch.zeros(5, WIDTH), torch.zeros(CLASSES, 5), None, "expected a number"),
    ],
)
def test_bad_adapters(a, b, scaling, message):
    hidden, weight, targets, _ = make()
    for function in (ts_kernels.chunked_cross_entropy,):
        with pytest.raises(ValueError, match=message):
            function(hidden, weight, targets, lora=LoraAdapter(a, b, scaling))
