"""Chunked cross-entropy: what it computes, holds, accepts and refuses, and its registration."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import ts_kernels
from ts_kernels import _cross_entropy, _logprobs, reference
from ts_kernels._chunks import Options, walk_chunks
from ts_kernels._heads import DenseHead, Wanted
from ts_kernels.testing import LargestTensor
from ts_kernels.testing import random_head as make

ROWS, CLASSES, WIDTH = 23, 211, 37


@pytest.mark.parametrize("chunk_size", [7, 1024])
@pytest.mark.parametrize("train", list(itertools.product([True, False], repeat=3)))
def test_only_the_needed_gradients_are_computed(train, chunk_size, monkeypatch):
    hidden, weight, targets, bias = make()
    asked = []

    class Spy(DenseHead):
        def __init__(self, weight, bias, compute_dtype, wanted, *rest):
            asked.append(tuple(wanted[:3]))
            super().__init__(weight, bias, compute_dtype, wanted, *rest)

    monkeypatch.setattr(_cross_entropy, "DenseHead", Spy)
    monkeypatch.setattr(_logprobs, "DenseHead", Spy)
    inputs = [
        t.detach().requires_grad_(on) for t, on in zip((hidden, weight, bias), train, strict=True)
    ]
    kw = {"chunk_size": chunk_size}
    loss = ts_kernels.chunked_cross_entropy(inputs[0], inputs[1], targets, inputs[2], **kw)
    assert loss.requires_grad == any(train)
    if any(train):
        loss.backward()
    assert [t.grad is not None for t in inputs] == list(train)
    nothing = (False, False, False)
    computed_again = train[1] and chunk_size > ROWS
    assert asked == ([nothing, train] if computed_again else [train])
    asked.clear()
    with torch.no_grad():
        ts_kernels.chunked_cross_entropy(inputs[0], inputs[1], targets, inputs[2])
    assert asked == [nothing]


def test_nothing_refers_to_the_weight_after_the_forward_pass():
    hidden, weight, targets, _ = make()
    frozen = weight.detach().clone()
    gone = weakref.ref(frozen)
    loss = ts_kernels.chunked_cross_entropy(hidden, frozen, targets)
    del frozen
    gc.collect()
    assert gone() is None
    loss.backward()
    ours, hidden.grad = hidden.grad, None
    reference.chunked_cross_entropy(hidden, weight.detach(), targets).backward()
    torch.testing.assert_close(ours, hidden.grad)


def test_a_quantized_weight_is_multiplied_by_linear_alone(quantized):
    hidden, weight, targets, bias = make()
    frozen = torch.nn.Parameter(quantized(weight.detach()), requires_grad=False)
    for head_bias in (None, bias.detach(), bias):
        inputs = (hidden, bias) if head_bias is bias else (hidden,)
        loss = ts_kernels.chunked_cross_entropy(hidden, frozen, targets, head_bias, chunk_size=5)
        in_forward = frozen.decoded
        grads = torch.autograd.grad(2 * loss, inputs, retain_graph=True)
        if head_bias is not bias:
            assert frozen.decoded == in_forward, "backward has no use for a frozen weight"
        assert all(map(torch.equal, grads, torch.autograd.grad(2 * loss, inputs)))
        expected = reference.chunked_cross_entropy(hidden, frozen.dense(), targets, head_bias)
        torch.testing.assert_close(loss, expected)
        for a, e in zip(grads, torch.autograd.grad(2 * expected, inputs), strict=True):
            torch.testing.assert_close(a, e)


def test_a_trainable_subclass_weight_receives_its_gradient():
    class Named(torch.Tensor):
        """A subclass with no maths of its own."""

    hidden, weight, targets, bias = make()
    named = weight.detach().clone().as_subclass(Named).requires_grad_()
    loss = ts_kernels.chunked_cross_entropy(hidden, named, targets, bias, chunk_size=5)
    ours = torch.autograd.grad(loss, (hidden, named, bias))
    expected = reference.chunked_cross_entropy(hidden, weight, targets, bias)
    for a, e in zip(ours, torch.autograd.grad(expected, (hidden, weight, bias)), strict=True):
        torch.testing.assert_close(a.as_subclass(torch.Tensor), e)


def test_no_tensor_as_large_as_the_logits():
    rows, classes, width = 64, 1009, 16
    hidden, weight, targets, bias = make(
        torch.bfloat16, rows=rows, classes=classes, width=width, masked=0.0
    )
    with LargestTensor() as ours, torch.no_grad():  # the operator's inside, which modes see
        _cross_entropy._implementation(
            hidden, weight, bias, None, targets, 8, -100, None, torch.bfloat16, [True] + 3 * [False]
        )
    assert ours.elements <= max(8 * classes, classes * width) < rows * classes
    with LargestTensor() as plain:
        reference.chunked_cross_entropy(hidden, weight, targets, bias)
    assert plain.elements == rows * classes


@pytest.mark.slow
@pytest.mark.parametrize("frozen", [True, False])
def test_peak_memory_is_below_the_logits(frozen):
    """As the allocator saw it, through the public function and its backward."""
    rows, classes, width = 512, 8192, 32
    hidden, weight, targets, _ = make(rows=rows, classes=classes, width=width, masked=0.0)
    weight.requires_grad_(not frozen)

    def peak_bytes(function, **kw):
        hidden.grad = weight.grad = None
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            function(hidden, weight, targets, **kw).backward()
        live = peak = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                peak = max(peak, live)
        return peak

    logits = rows * classes * 4
    plain = peak_bytes(reference.chunked_cross_entropy)
    ours = peak_bytes(ts_kernels.chunked_cross_entropy, chunk_size=32)
    assert plain >= 2 * logits  # what the measurement must be able to see
    assert ours < logits / 4


def test_masked_rows_cost_nothing_on_the_cpu():
    hidden, weight, targets, _ = make(masked=0.0)
    targets[3:] = -100
    with FlopCounterMode(display=False) as flops, torch.no_grad():
        walk_chunks(
            hidden,
            DenseHead(weight, None, torch.float32, Wanted(True, False, False)),
            CLASSES,
            targets,
            Options(2, -100, None),
            Wanted(True, False, False),
            torch.float32,
        )
    assert flops.get_total_flops() == 2 * (2 * 3 * CLASSES * WIDTH)


def test_second_derivatives_are_refused_by_name(quantized):
    hidden, weight, targets, bias = make()
    for head in (weight.detach(), quantized(weight.detach())):
        loss = ts_kernels.chunked_cross_entropy(hidden, head, targets)
        with pytest.raises(NotImplementedError, match=r"reference\.chunked_cross_entropy"):
            torch.autograd.grad(loss, hidden, create_graph=True)
    loss = ts_kernels.chunked_cross_entropy(hidden, weight, targets, bias)
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"ts_kernels\.reference"):
        grad.sum().backward()
    loss = ts_kernels.chunked_cross_entropy(hidden, weight, targets, bias, chunk_size=7)
    with pytest.raises(NotImplementedError, match=r"reference\.chunked_cross_entropy"):
        torch.autograd.grad(loss, hidden, create_graph=True)


@pytest.mark.parametrize("target", [CLASSES, -1, -101, 10**9])
def test_target_out_of_range(target, quantized):
    hidden, weight, targets, _ = make()
    targets[5] = target
    for head in (weight, quantized(weight.detach())):
        with pytest.raises(ValueError, match=rf"target {target} at row 5 .* < {CLASSES}"):
            ts_kernels.chunked_cross_entropy(hidden, head, targets)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"reduction": "none"}, "'mean' or 'sum'"),
        ({"chunk_size": 0}, "at least 1"),
        ({"chunk_size": True}, "at least 1"),
        ({"chunk_size": 2.0}, "at least 1"),
        ({"num_items": -1}, "at least 0"),
        ({"num_items": 2.5}, "at least 0"),
        ({"num_items": True}, "at least 0"),
        ({"num_items": torch.tensor([1, 2])}, "one element"),
        ({"logit_softcap": 0.0}, "above 0"),
        ({"targets": torch.zeros(ROWS + 1, dtype=torch.int64)}, "one for each row"),
        ({"targets": torch.zeros(ROWS)}, "int64 or int32"),
        ({"targets": torch.zeros(ROWS, dtype=torch.int64, device="meta")}, "one device"),
        ({"weight": torch.zeros(CLASSES, WIDTH + 1)}, "same D"),
        ({"weight": torch.zeros(WIDTH)}, "same D"),
        ({"weight": torch.zeros(0, WIDTH)}, "at least one class"),
        ({"weight": torch.zeros(CLASSES, WIDTH, dtype=torch.bfloat16)}, "one dtype"),
        ({"hidden": torch.zeros(ROWS, WIDTH, dtype=torch.int64)}, "floating dtype"),
        ({"bias": torch.zeros(CLASSES - 1)}, "one per class"),
    ],
)
def test_bad_arguments(change, message):
    hidden, weight, targets, bias = make()
    arguments = {"hidden": hidden, "weight": weight, "targets": targets, "bias": bias, **change}
    with pytest.raises(ValueError, match=message):
        ts_kernels.chunked_cross_entropy(**arguments)


def test_opcheck():
    hidden, weight, targets, bias = make(torch.bfloat16)
    operator = torch.ops.ts_kernels.head_cross_entropy.default
    lora_b = torch.randn(CLASSES, 3, dtype=torch.bfloat16)
    for wanted, softcap in (
        ((True, False, False, False), 5.0),
        ((False, False, False, False), None),
        ((True, True, True, True), None),
    ):
        width = WIDTH - 3 if wanted[3] else WIDTH
        heads = [hidden, weight[:, :width], bias, lora_b if wanted[3] else None]
        heads = [
            None if t is None else t.detach().contiguous().requires_grad_(want)
            for t, want in zip(heads, wanted, strict=True)
        ]
        rest = (targets, 7, -100, softcap, torch.bfloat16, list(wanted))
        torch.library.opcheck(operator, (*heads, *rest))


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_compiles_without_graph_breaks(autocast, frozen):
    hidden, weight, targets, bias = make()
    weight.requires_grad_(not frozen)
    bias.requires_grad_(not frozen)
    inputs = (hidden,) if frozen else (hidden, weight, bias)

    def step(hidden, weight, bias):
        return 2 * ts_kernels.chunked_cross_entropy(hidden, weight, targets, bias, chunk_size=7)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        eager_loss, loss = step(hidden, weight, bias), compiled(hidden, weight, bias)
    assert torch.equal(loss, eager_loss)
    for a, b in zip(
        torch.autograd.grad(loss, inputs), torch.autograd.grad(eager_loss, inputs), strict=True
    ):
        assert torch.equal(a, b)


def test_under_activation_checkpointing():
    hidden, weight, targets, bias = make()

    def loss_of(hidden):
        return ts_kernels.chunked_cross_entropy(hidden * 2, weight, targets, bias)

    loss = torch.utils.checkpoint.checkpoint(loss_of, hidden, use_reentrant=False)
    ours = torch.autograd.grad(loss, (hidden, weight))
    expected = torch.autograd.grad(loss_of(hidden), (hidden, weight))
    assert all(map(torch.equal, ours, expected))
