"""The Triton kernels, executed on the CPU by Triton's interpreter.

Collected only by test_interpreter.py, which runs this file in a process of its own with
TRITON_INTERPRET=1. The interpreter rounds fp32 to bf16 by truncation, so that a bf16 result may
be one unit in the last place off; the other dtypes are held to the tests' usual limits.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import ts_kernels
from ts_kernels import _rms_norm_launch, _rms_norm_plan, _softmax_rows, reference
from ts_kernels._backend import interpreting, use_triton
from ts_kernels.testing import assert_rounding_tier

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def _launches(monkeypatch):
    """Counts launches, so that no test passes by taking the PyTorch path."""
    assert interpreting()
    count = []
    for module, name in (
        (_rms_norm_launch, "_launch_forward"),
        (_rms_norm_launch, "_launch_backward"),
        (_softmax_rows, "_launch"),
    ):
        launch = getattr(module, name)

        def spy(*args, launch=launch, name=name):
            count.append(name)
            return launch(*args)

        monkeypatch.setattr(module, name, spy)
    yield count
    assert count, "no kernel was launched"


def check(actual, plain, exact, name, log=0.0):
    """The rounding tier, with one unit in the last place more for 16-bit results.

    These cases are so small that plain PyTorch's largest error is a matter of luck; in bf16 the
    interpreter truncates, at two places. Its logarithms are numpy's, four units off on processors
    with AVX-512: `log` is the size of one whose error a whole row shares.
    """
    if actual.dtype == torch.float32 and not log:
        assert_rounding_tier(actual, plain, exact, name)
        return
    units = {torch.bfloat16: 3, torch.float16: 1, torch.float32: 4 * log}[actual.dtype]
    room = units * torch.finfo(actual.dtype).eps * exact.abs().max()
    error = (actual.double() - exact).abs().max()
    assert error <= 2 * (plain.double() - exact).abs().max() + room, name


@pytest.mark.parametrize("x_dtype, weight_dtype", list(itertools.product(FLOATS, FLOATS)))
@pytest.mark.parametrize("shape", [(3, 1), (2, 3, 131)], ids=str)
def test_rms_norm_forward(shape, x_dtype, weight_dtype):
    x = torch.randn(shape).to(x_dtype)
    weight = torch.randn(shape[-1]).to(weight_dtype)
    y = ts_kernels.rms_norm(x, weight, 1e-5)
    expected = reference.rms_norm(x, weight, 1e-5)
    assert y.dtype == expected.dtype and y.shape == expected.shape
    if x_dtype == torch.bfloat16:
        torch.testing.assert_close(y.float(), expected.float(), rtol=2**-6, atol=1e-6)
    else:
        torch.testing.assert_close(y, expected, rtol=2**-9, atol=1e-6)
    if x_dtype == weight_dtype == torch.float32:
        assert_rounding_tier(y, expected, reference.rms_norm(x.double(), weight.double(), 1e-5))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "shape, train_x, train_weight",
    [
        ((3, 577), True, True),
        ((5, 1), True, True),
        ((37, 7), True, True),
        ((2, 3, 131), True, False),
        ((2, 3, 131), False, True),
    ],
    ids=str,
)
def test_rms_norm_backward(_launches, shape, dtype, train_x, train_weight):
    x = torch.randn(shape).to(dtype).requires_grad_(train_x)
    weight = torch.randn(shape[-1]).to(dtype).requires_grad_(train_weight)
    dy = torch.randn(shape).to(dtype)
    inputs = [t for t in (x, weight) if t.requires_grad]
    actual = torch.autograd.grad(ts_kernels.rms_norm(x, weight, 1e-5), inputs, dy)
    assert "_launch_backward" in _launches
    plain = torch.autograd.grad(reference.rms_norm(x, weight, 1e-5), inputs, dy)
    x64 = x.detach().double().requires_grad_(train_x)
    weight64 = weight.detach().double().requires_grad_(train_weight)
    inputs64 = [t for t in (x64, weight64) if t.requires_grad]
    exact = torch.autograd.grad(reference.rms_norm(x64, weight64, 1e-5), inputs64, dy.double())
    for a, p, e in zip(actual, plain, exact, strict=True):
        check(a, p, e, "gradient")


def test_rms_norm_strides():
    wide = torch.randn(6, 3 * 131)
    weight = torch.randn(262)[::2]
    for x in (wide[:, 131:262], torch.randn(131, 6).t(), torch.randn(131).expand(4, 131)):
        x = x.detach().requires_grad_()
        dy = torch.randn(131).expand(x.shape)
        y = ts_kernels.rms_norm(x, weight, 1e-5)
        torch.testing.assert_close(y, reference.rms_norm(x, weight, 1e-5))
        (dx,) = torch.autograd.grad(y, x, dy)
        (expected,) = torch.autograd.grad(reference.rms_norm(x, weight, 1e-5), x, dy)
        torch.testing.assert_close(dx, expected)


def test_weight_gradient_over_many_programs(monkeypatch):
    """More tiles than programs: each program adds up several."""
    x = torch.randn(203, 5)  # 13 tiles of 16 rows: 4 programs of 4, 4, 4 and 1
    weight = torch.randn(5, requires_grad=True)
    plan = _rms_norm_plan.BackwardPlan(8, 0, 16, 4, 4, num_warps=4, stages=3)
    monkeypatch.setattr(_rms_norm_launch, "backward_plan", lambda *args: plan)
    (dw,) = torch.autograd.grad(ts_kernels.rms_norm(x, weight, 1e-5).sum(), weight)
    (expected,) = torch.autograd.grad(reference.rms_norm(x, weight, 1e-5).sum(), weight)
    torch.testing.assert_close(dw, expected)


@pytest.mark.parametrize("rows, hidden", [(11, 320), (7, 64), (1, 131)])
@pytest.mark.parametrize("residual", [False, True])
def test_plans_of_the_norm_that_read_earlier_give_the_same_bits(
    monkeypatch, rows, hidden, residual
):
    """320 columns are two blocks; 11 rows in tiles of 2 leave a tile and a program part empty."""
    x, dy = torch.randn(2, rows, hidden)
    added = torch.randn(rows, hidden) if residual else None
    weight = torch.randn(hidden)
    form = _rms_norm_launch.Form(1e-5)

    def run():
        y, rstd, summed = _rms_norm_launch.forward(x, added, weight, form)
        dsum = dy.flip(0) if residual else None
        return y, *_rms_norm_launch.backward(dy, dsum, summed, weight, rstd, form, True, True)

    forward = _rms_norm_plan.forward_plan(rows, hidden)
    backward = _rms_norm_plan.backward_plan(rows, hidden, True)
    tiles = -(-rows // 2)
    backward = backward._replace(
        rows_per_tile=2, tiles_per_program=4, programs=-(-tiles // 4), stages=1
    )
    monkeypatch.setattr(_rms_norm_launch, "forward_plan", lambda *args: forward)
    monkeypatch.setattr(_rms_norm_launch, "backward_plan", lambda *args: backward)
    expected = run()
    plain = reference.rms_norm(x + added if residual else x, weight, 1e-5)
    torch.testing.assert_close(expected[0], plain)
    for ahead in (1, 2):
        changed = backward._replace(ahead=ahead, unroll=2)
        monkeypatch.setattr(_rms_norm_launch, "backward_plan", lambda *args, p=changed: p)
        early = forward._replace(early_weight=True)
        monkeypatch.setattr(_rms_norm_launch, "forward_plan", lambda *args, p=early: p)
        assert all(map(torch.equal, run(), expected)), ahead
    # another order of the sum: not the same bits
    joined = backward._replace(joined=True, num_warps=1)
    assert hidden != 320 or joined.lanes == 32
    monkeypatch.setattr(_rms_norm_launch, "backward_plan", lambda *args: joined)
    torch.testing.assert_close(run(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "hidden, added, round_first",
    [(4096, True, True), (8192, True, True), (5120, False, True), (4096, False, False)],
)
def test_plans_of_many_rows_give_the_same_bits(monkeypatch, dtype, hidden, added, round_first):
    """The plans of 8192 rows on 5 of them, the last program's tiles part empty."""
    x, r, dy, dsum = torch.randn(4, 5, hidden).to(dtype)
    weight = torch.randn(hidden).to(dtype)
    form = _rms_norm_launch.Form(1e-5, 0.0 if round_first else 1.0, round_first)
    forward = _rms_norm_plan.forward_plan(8192, hidden, not added, round_first)
    backward = _rms_norm_plan.backward_plan(8192, hidden, True, 6 if added else 4, added)
    tiles = -(-5 // backward.rows_per_tile)
    backward = backward._replace(tiles_per_program=2, programs=-(-tiles // 2))
    assert forward.early_weight != added and backward.ahead == added
    results = []
    for plans in (
        (forward, backward),
        (
            forward._replace(early_weight=False, num_warps=4),
            backward._replace(stages=2, ahead=0, unroll=1),
        ),
    ):
        for name, plan in zip(("forward_plan", "backward_plan"), plans, strict=True):
            monkeypatch.setattr(_rms_norm_launch, name, lambda *args, plan=plan: plan)
        y, rstd, summed = _rms_norm_launch.forward(x, r if added else None, weight, form)
        given = (dy, dsum if added else None, summed, weight, rstd, form, True, True)
        results.append((y, rstd, summed, *_rms_norm_launch.backward(*given)))
    assert all(map(torch.equal, *results))
    kw = {"offset": form.offset, "round_first": round_first}
    plain = reference.rms_norm(x + r if added else x, weight, 1e-5, **kw)
    torch.testing.assert_close(results[0][0].float(), plain.float(), rtol=2**-5, atol=1e-3)


def mean_square_as_torch_on_cuda(row, rows):
    """One row of float32 squares, added up thread by thread as torch's CUDA kernel does it."""
    hidden = row.numel()
    width, height, vectorized = _rms_norm_plan.torch_reduction(rows, hidden)
    threads = []
    for y in range(height):
        for x in range(width):
            thread, stride = x + y * width, width * height
            sums = [torch.tensor(0.0)] * 4
            if vectorized:
                group = thread
                while group * 4 + 3 < hidden:
                    for i in range(4):
                        sums[i] = sums[i] + row[group * 4 + i]
                    group += stride
            else:
                position = thread
                while position < hidden:
                    for i in range(4):
                        if position + i * stride < hidden:
                            sums[i] = sums[i] + row[position + i * stride]
                    position += 4 * stride
            threads.append(((sums[0] + sums[1]) + sums[2]) + sums[3])
    grid = torch.stack(threads).reshape(height, width)
    while grid.shape[1] > 1:
        half = grid.shape[1] // 2
        grid = grid[:, :half] + grid[:, half:]
    grid = grid[:, 0]
    while grid.numel() > 1:
        half = grid.numel() // 2
        grid = grid[:half] + grid[half:]
    return grid[0]


@pytest.mark.parametrize(
    "rows, hidden",
    [(16, 576), (17, 128), (1, 640), (2, 1024), (3, 300), (1, 4096), (16, 64), (5, 7), (16, 8704)],
)
def test_squares_are_added_in_the_order_of_torch_on_cuda(rows, hidden):
    """Bit for bit, and different from another order of the same sum."""
    x = torch.randn(rows, hidden)
    rstd = torch.ops.ts_kernels.rms_norm(x, torch.ones(hidden), 1e-5)[1]
    factor = torch.tensor(_rms_norm_plan.mean_factor(rows, hidden))
    sums = torch.stack([mean_square_as_torch_on_cuda(row * row, rows) for row in x[:3]])
    # The interpreter's rsqrt is 1 / sqrt: apply the same to the sum.
    expected = 1 / torch.sqrt(sums * factor + torch.tensor(1e-5))
    assert torch.equal(rstd[:3], expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("classes, frozen", [(1, False), (211, False), (211, True), (8209, True)])
def test_cross_entropy(dtype, softcap, classes, frozen):
    rows, width = 6, 5
    hidden = torch.randn(rows, width).to(dtype).requires_grad_()
    weight = torch.randn(classes, width).to(dtype).requires_grad_()
    bias = torch.randn(classes).to(dtype).requires_grad_()
    targets = torch.randint(0, classes, (rows,))
    targets[2] = -100

    def run(function, h, w, b, **kw):
        if frozen:
            w, b = w.detach(), b.detach()
        loss = function(h, w, targets, b, logit_softcap=softcap, **kw)
        return loss, *torch.autograd.grad(3 * loss, (h,) if frozen else (h, w, b))

    actual = run(ts_kernels.chunked_cross_entropy, hidden, weight, bias, chunk_size=4)
    plain = run(reference.chunked_cross_entropy, hidden, weight, bias)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    exact = run(reference.chunked_cross_entropy, *wide)
    log = math.log(classes) + (softcap or 10)
    for name, a, p, e in zip(("loss", "dh", "dw", "db"), actual, plain, exact):  # noqa: B905
        check(a, p, e, name, log)


def test_kernel_writes_the_gradient_over_the_logits():
    logits = torch.randn(5, 131) * 30
    targets = torch.tensor([3, -100, 130, 0, 7])
    scale = torch.tensor([1.0, 2.0, -0.5, 0.0, 3.0])
    ours, plain = logits.clone(), logits.clone()
    kw = {"ignore_index": -100, "softcap": None, "write_grad": True, "scale": scale}
    losses = _softmax_rows.softmax_rows_(ours, targets, **kw)
    expected = _softmax_rows._in_pytorch(plain, targets, *kw.values())
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-7)
    assert torch.equal(ours[1], torch.zeros(131)) and torch.equal(ours[3], torch.zeros(131))


def test_rows_that_begin_with_minus_infinity():
    logits = torch.randn(3, 8192 * 2 + 5)
    logits[:, :8300] = float("-inf")
    targets = torch.tensor([8300, 16000, 9000])
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    gradient = torch.softmax(logits, 1) - torch.nn.functional.one_hot(targets, logits.shape[1])
    losses = _softmax_rows.softmax_rows_(
        logits, targets, ignore_index=-100, softcap=None, write_grad=True
    )
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(logits, gradient)


def test_without_gradient_the_logits_are_only_read():
    logits = torch.randn(3, 131)
    kept = logits.clone()
    _softmax_rows.softmax_rows_(
        logits, torch.tensor([1, -100, 2]), ignore_index=-100, softcap=None, write_grad=False
    )
    assert torch.equal(logits, kept)


@pytest.mark.parametrize("average", [True, False])
def test_sequence_logprobs(average):
    hidden = torch.randn(2, 5, 7, requires_grad=True)
    weight = torch.randn(131, 7, requires_grad=True)
    labels = torch.randint(0, 131, (2, 5))
    labels[0, :2] = -100
    upstream = torch.tensor([2.0, -0.5])
    kw = {"average": average}
    actual = ts_kernels.sequence_logprobs(hidden, weight, labels, chunk_size=3, **kw)
    expected = reference.sequence_logprobs(hidden, weight, labels, **kw)
    torch.testing.assert_close(actual, expected)
    for a, e in zip(
        torch.autograd.grad(actual, (hidden, weight), upstream),
        torch.autograd.grad(expected, (hidden, weight), upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)


def test_opcheck_with_the_kernels_inside():
    x = torch.randn(3, 131, dtype=torch.float16, requires_grad=True)
    weight = torch.randn(131, requires_grad=True)
    which = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(
        torch.ops.ts_kernels.rms_norm.default, (x, weight, 1e-6), test_utils=which
    )
    rows = (torch.randn(7, 5, requires_grad=True), torch.randn(31, 5, requires_grad=True), None)
    targets = torch.randint(0, 31, (7,))
    torch.library.opcheck(
        torch.ops.ts_kernels.token_logprobs.default,
        (*rows, None, targets, 3, -100, None, torch.float32),
        test_utils=which,
    )


def test_float64_takes_the_pytorch_path(_launches):
    assert not use_triton(torch.ones(1, dtype=torch.float64))
    before = len(_launches)
    ts_kernels.rms_norm(torch.ones(2, 3, dtype=torch.float64), torch.ones(3), 1e-5)
    assert len(_launches) == before
    ts_kernels.rms_norm(torch.ones(2, 3), torch.ones(3), 1e-5)
    assert len(_launches) == before + 1
