"""The kernels on a CUDA device."""

from __future__ import annotations

import itertools
import subprocess
import sys
import warnings

import pytest
import torch

import ts_kernels
from ts_kernels import _rms_norm_launch, _softmax_rows, reference
from ts_kernels.testing import assert_rounding_tier

pytestmark = pytest.mark.gpu

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
GIB = 2**30


@pytest.fixture
def cuda():
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def _full_precision_matmul():
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.fixture
def no_host_sync():
    """Any operation that would make the host wait for the device raises."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def wide(*tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


def norm_inputs(shape, x_dtype, weight_dtype, device):
    x = torch.randn(shape, device=device).to(x_dtype).requires_grad_()
    weight = torch.randn(shape[-1], device=device).to(weight_dtype).requires_grad_()
    return x, weight


def head_inputs(dtype, device, rows=513, classes=32003, width=129):
    hidden = torch.randn(rows, width, device=device).to(dtype).requires_grad_()
    weight = torch.randn(classes, width, device=device).mul(width**-0.5).to(dtype)
    bias = torch.randn(classes, device=device).to(dtype).requires_grad_()
    targets = torch.randint(0, classes, (rows,), device=device)
    targets.masked_fill_(torch.rand(rows, device=device) < 0.3, -100)
    return hidden, weight.requires_grad_(), targets, bias


# --- rms_norm -----------------------------------------------------------------------------------


@pytest.mark.parametrize("x_dtype, weight_dtype", list(itertools.product(FLOATS, FLOATS)))
@pytest.mark.parametrize("shape", [(3, 5, 577), (37, 5120), (1, 7), (129, 1)], ids=str)
def test_rms_norm_against_float64(cuda, shape, x_dtype, weight_dtype):
    x, weight = norm_inputs(shape, x_dtype, weight_dtype, cuda)
    y = ts_kernels.rms_norm(x, weight, 1e-5)
    plain = reference.rms_norm(x, weight, 1e-5)
    x64, weight64 = wide(x, weight)
    exact = reference.rms_norm(x64, weight64, 1e-5)
    assert y.dtype == plain.dtype
    assert_rounding_tier(y, plain, exact, "y")
    dy = torch.randn_like(y)
    for name, a, p, e in zip(
        ("dx", "dweight"),
        torch.autograd.grad(y, (x, weight), dy),
        torch.autograd.grad(plain, (x, weight), dy),
        torch.autograd.grad(exact, (x64, weight64), dy.double()),
        strict=True,
    ):
        assert a.dtype == p.dtype
        assert_rounding_tier(a, p, e, name)


SAME_ORDER = [
    *((hidden, torch.bfloat16) for hidden in (1, 7, 64, 127, 128, 576, 640, 2048, 5120, 11008)),
    *((hidden, dtype) for hidden in (128, 4096, 8192) for dtype in FLOATS),
]


@pytest.mark.parametrize("hidden, dtype", SAME_ORDER)
def test_rms_norm_equals_the_formula_bit_for_bit(cuda, hidden, dtype):
    """Where the squares are added in torch's own order, whatever the number of rows."""
    different = {}
    for rows in (1, 3, 11, 513, 4099):
        x, weight = norm_inputs((rows, hidden), dtype, dtype, cuda)
        y = ts_kernels.rms_norm(x, weight, 1e-5)
        expected = reference.rms_norm(x, weight, 1e-5)
        if not torch.equal(y, expected):
            different[rows] = int((y != expected).sum()), y.numel()
    assert not different, f"rows: (elements that differ, of) = {different}"


@pytest.mark.parametrize("hidden", [129, 577, 4095])
def test_rms_norm_of_odd_sizes_differs_by_one_rounding_in_few_elements(cuda, hidden):
    x, weight = norm_inputs((1000, hidden), torch.bfloat16, torch.bfloat16, cuda)
    y = ts_kernels.rms_norm(x, torch.ones_like(weight), 1e-5)
    expected = reference.rms_norm(x, torch.ones_like(weight), 1e-5)
    steps = (y.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
    assert steps.max() <= 1
    assert (steps != 0).float().mean() < 1e-3


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(8192, 576), (4099, 4096), (1000, 5120), (77, 16384)], ids=str)
def test_rms_norm_is_deterministic(cuda, shape, dtype):
    x, weight = norm_inputs(shape, dtype, dtype, cuda)
    dy = torch.randn_like(x)

    def run():
        y = ts_kernels.rms_norm(x, weight, 1e-5)
        return y.detach(), *torch.autograd.grad(y, (x, weight), dy)

    first = run()
    for _ in range(5):
        assert all(map(torch.equal, run(), first))
    plain = reference.rms_norm(x, weight, 1e-5)
    exact_inputs = wide(x, weight)
    exact = reference.rms_norm(*exact_inputs, 1e-5)
    for a, p, e in zip(
        first[1:],
        torch.autograd.grad(plain, (x, weight), dy),
        torch.autograd.grad(exact, exact_inputs, dy.double()),
        strict=True,
    ):
        assert_rounding_tier(a, p, e)


def test_rms_norm_strides(cuda):
    spread = torch.randn(64, 3 * 576, device=cuda, dtype=torch.bfloat16)
    weight = torch.randn(2 * 576, device=cuda, dtype=torch.bfloat16)[::2]
    turned = torch.randn(576, 64, device=cuda, dtype=torch.bfloat16).t()
    for x in (spread[:, 576:1152], turned, spread[0, :576].expand(7, 576), spread[::3, ::3]):
        x = x.detach().requires_grad_()
        dense = x.detach().contiguous().requires_grad_()
        dy = torch.randn(576, device=cuda, dtype=torch.bfloat16).expand(x.shape)
        y, y_dense = (ts_kernels.rms_norm(t, weight, 1e-5) for t in (x, dense))
        assert torch.equal(y, y_dense)
        (dx,) = torch.autograd.grad(y, x, dy)
        assert torch.equal(dx, torch.autograd.grad(y_dense, dense, dy.contiguous())[0])


@pytest.mark.parametrize("train_weight", [True, False])
def test_rms_norm_in_a_cuda_graph(cuda, train_weight):
    x, weight = norm_inputs((512, 576), torch.bfloat16, torch.bfloat16, cuda)
    weight.requires_grad_(train_weight)
    inputs = (x, weight) if train_weight else (x,)
    dy = torch.randn_like(x)

    def step():
        y = ts_kernels.rms_norm(x, weight, 1e-5)
        return y.detach(), *torch.autograd.grad(y, inputs, dy)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        dy.copy_(torch.randn_like(dy))
    graph.replay()
    assert all(map(torch.equal, captured, step()))


@pytest.mark.filterwarnings("ignore")  # inductor's own, which differ by version
def test_rms_norm_compiled_by_inductor(cuda):
    x, weight = norm_inputs((64, 576), torch.bfloat16, torch.bfloat16, cuda)

    def step(x, weight):
        return ts_kernels.rms_norm(x, weight, 1e-5)

    y = torch.compile(step, fullgraph=True)(x, weight)
    assert torch.equal(y, step(x, weight))
    dy = torch.randn_like(y)
    ours = torch.autograd.grad(y, (x, weight), dy)
    assert all(map(torch.equal, ours, torch.autograd.grad(step(x, weight), (x, weight), dy)))


def test_rms_norm_on_another_stream(cuda, no_host_sync):
    x, weight = norm_inputs((4096, 4096), torch.bfloat16, torch.bfloat16, cuda)
    expected = ts_kernels.rms_norm(x.detach(), weight.detach(), 1e-5)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        y = ts_kernels.rms_norm(x, weight, 1e-5)
        y.sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(y, expected)


def test_kernels_run_not_the_fallback(cuda, monkeypatch):
    launched = []
    for module, name in (
        (_rms_norm_launch, "_launch_forward"),
        (_rms_norm_launch, "_launch_backward"),
        (_softmax_rows, "_launch"),
    ):
        launch = getattr(module, name)

        def spy(*args, launch=launch, name=name):
            launched.append(name)
            return launch(*args)

        monkeypatch.setattr(module, name, spy)
    x, weight = norm_inputs((4, 576), torch.bfloat16, torch.bfloat16, cuda)
    y = ts_kernels.rms_norm(x, weight, 1e-5)
    targets = torch.tensor([0, 1, 2, -100], device=cuda)
    ts_kernels.chunked_cross_entropy(y, torch.randn_like(x), targets % 4).backward()
    assert launched == ["_launch_forward", "_launch", "_launch_backward"]


# --- losses -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "kw",
    [{}, {"reduction": "sum"}, {"num_items": 41}, {"logit_softcap": 2.0}],
    ids=["mean", "sum", "num_items", "softcap"],
)
@pytest.mark.parametrize("chunk_size", [100, 1024])
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_cross_entropy_against_float64(cuda, dtype, kw, chunk_size, frozen):
    hidden, weight, targets, bias = head_inputs(dtype, cuda)
    inputs = (hidden, weight, bias)

    def run(function, inputs, **more):
        hidden, weight, bias = inputs
        if frozen:
            inputs, weight, bias = (hidden,), weight.detach(), bias.detach()
        loss = function(hidden, weight, targets, bias, **kw, **more)
        return loss, *torch.autograd.grad(3 * loss, inputs)

    ours = run(ts_kernels.chunked_cross_entropy, inputs, chunk_size=chunk_size)
    plain = run(reference.chunked_cross_entropy, inputs)
    exact = run(reference.chunked_cross_entropy, wide(*inputs))
    for name, a, p, e in zip(("loss", "dh", "dw", "db"), ours, plain, exact):  # noqa: B905
        assert_rounding_tier(a, p, e, name)
    again = run(ts_kernels.chunked_cross_entropy, inputs, chunk_size=chunk_size)
    assert all(map(torch.equal, ours, again)), "not deterministic"


@pytest.mark.parametrize("dtype", FLOATS)
def test_sequence_logprobs_against_float64(cuda, dtype):
    hidden, weight, targets, bias = head_inputs(dtype, cuda, rows=3 * 171)
    labels = targets.reshape(3, 171)
    hidden = hidden.detach().reshape(3, 171, -1).requires_grad_()
    inputs, upstream = (hidden, weight, bias), torch.tensor([2.0, -0.3, 0.7], device=cuda)

    def run(function, inputs, **kw):
        result = function(inputs[0], inputs[1], labels, inputs[2], average=True, **kw)
        return result, *torch.autograd.grad(result, inputs, upstream.to(result.dtype))

    ours = run(ts_kernels.sequence_logprobs, inputs, chunk_size=100)
    plain = run(reference.sequence_logprobs, inputs)
    exact = run(reference.sequence_logprobs, wide(*inputs))
    for name, a, p, e in zip(("logprobs", "dh", "dw", "db"), ours, plain, exact, strict=True):
        assert_rounding_tier(a, p, e, name)


def test_every_label_masked_gives_zero(cuda):
    hidden, weight, targets, bias = head_inputs(torch.bfloat16, cuda)
    targets.fill_(-100)
    loss = ts_kernels.chunked_cross_entropy(hidden, weight, targets, bias)
    for tensor in (loss, *torch.autograd.grad(loss, (hidden, weight, bias))):
        assert torch.equal(tensor, torch.zeros_like(tensor))


def test_losses_never_make_the_host_wait(cuda, no_host_sync):
    hidden, weight, targets, bias = head_inputs(torch.bfloat16, cuda)
    kw = {"num_items": ts_kernels.count_targets(targets), "chunk_size": 100}
    ts_kernels.chunked_cross_entropy(hidden, weight, targets, bias).backward()
    ts_kernels.chunked_cross_entropy(hidden, weight, targets, bias, **kw).backward()
    ts_kernels.chunked_cross_entropy(hidden, weight.detach(), targets, **kw).backward()
    ts_kernels.sequence_logprobs(hidden[None], weight, targets[None], bias).sum().backward()


def test_cross_entropy_in_a_cuda_graph(cuda):
    hidden, weight, targets, _ = head_inputs(torch.bfloat16, cuda)
    weight.requires_grad_(False)

    def step():
        loss = ts_kernels.chunked_cross_entropy(hidden, weight, targets, chunk_size=200)
        return loss.detach(), *torch.autograd.grad(loss, hidden)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        hidden.copy_(torch.randn_like(hidden))
    graph.replay()
    assert all(map(torch.equal, captured, step()))


@pytest.mark.filterwarnings("ignore")  # inductor's own, which differ by version
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_cross_entropy_compiled_by_inductor(cuda, frozen):
    hidden, weight, targets, _ = head_inputs(torch.bfloat16, cuda)
    weight.requires_grad_(not frozen)
    inputs = (hidden,) if frozen else (hidden, weight)

    def step(hidden, weight):
        return ts_kernels.chunked_cross_entropy(hidden, weight, targets, chunk_size=200)

    loss, eager = torch.compile(step, fullgraph=True)(hidden, weight), step(hidden, weight)
    assert torch.equal(loss, eager)
    for a, e in zip(
        torch.autograd.grad(loss, inputs), torch.autograd.grad(eager, inputs), strict=True
    ):
        assert torch.equal(a, e)


@pytest.mark.parametrize("train_weight", [True, False])
def test_peak_memory_is_far_below_the_logits(cuda, train_weight):
    rows, classes, width, chunk = 8192, 65537, 64, 256
    hidden, weight, targets, _ = head_inputs(torch.bfloat16, cuda, rows, classes, width)
    weight.requires_grad_(train_weight)
    ts_kernels.chunked_cross_entropy(hidden[:1], weight, targets[:1]).backward()  # compiles
    hidden.grad = weight.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ts_kernels.chunked_cross_entropy(hidden, weight, targets, chunk_size=chunk).backward()
    torch.cuda.synchronize()
    used = torch.cuda.max_memory_allocated() - before
    logits = 2 * rows * classes
    gradients = 4 * 2 * rows * width + train_weight * (4 + 2) * classes * width
    assert used <= 2 * (2 * chunk * classes) + gradients + 2**23
    assert used < logits / 10


TARGET_OUT_OF_RANGE = """
import torch, ts_kernels
hidden = torch.randn(4, 8, device="cuda")
targets = torch.tensor([0, 1, 11, 3], device="cuda")
try:
    ts_kernels.chunked_cross_entropy(hidden, torch.randn(11, 8, device="cuda"), targets)
    torch.cuda.synchronize()
except RuntimeError as error:  # torch.AcceleratorError is one
    print("raised", type(error).__name__)
"""


def test_target_out_of_range_is_caught_on_the_device(cuda):
    done = subprocess.run(
        [sys.executable, "-c", TARGET_OUT_OF_RANGE], capture_output=True, text=True, timeout=300
    )
    assert "raised" in done.stdout, done.stdout + done.stderr
    output = done.stdout + done.stderr
    assert "a target is outside [0, classes)" in output, output


def test_more_elements_than_32_bits_count(cuda):
    free, _ = torch.cuda.mem_get_info()
    if free < 24 * GIB:
        pytest.skip(f"needs 24 GiB of free device memory, {free / GIB:.0f} GiB are free")
    classes, rows = 152064, 14200
    hidden, weight, targets, _ = head_inputs(torch.bfloat16, cuda, rows, classes, 16)
    weight.requires_grad_(False)
    assert rows * classes > 2**31
    whole = ts_kernels.chunked_cross_entropy(hidden, weight, targets, chunk_size=rows)
    parts = ts_kernels.chunked_cross_entropy(hidden, weight, targets, chunk_size=1000)
    torch.testing.assert_close(whole, parts)
    for a, b in zip(
        torch.autograd.grad(whole, hidden), torch.autograd.grad(parts, hidden), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0.02, atol=1e-9)
    del whole, parts
    x = torch.randn(4, 4096, device=cuda, dtype=torch.bfloat16).repeat(2**17 + 1, 1)
    assert x.numel() > 2**31
    y = ts_kernels.rms_norm(x, torch.ones(4096, device=cuda, dtype=torch.bfloat16), 1e-5)
    assert torch.equal(y[:4], y[-4:])


def test_bandwidth_is_printed(cuda, capsys):
    """Not asserted: read it beside the copy rate in the same line."""

    def ms(function, repeat=50):
        for _ in range(5):
            function()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeat):
            function()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / repeat

    x, weight = norm_inputs((16384, 4096), torch.bfloat16, torch.bfloat16, cuda)
    x, weight = x.detach(), weight.detach()
    target = torch.empty_like(x)
    y, rstd = torch.ops.ts_kernels.rms_norm(x, weight, 1e-5)
    moved = 2 * x.numel() * 2
    copy = moved / ms(lambda: target.copy_(x)) / 1e6
    forward = moved / ms(lambda: ts_kernels.rms_norm(x, weight, 1e-5)) / 1e6
    backward = (1.5 * moved) / ms(
        lambda: torch.ops.ts_kernels.rms_norm_backward(y, x, weight, rstd, True, True)
    )
    with capsys.disabled():
        print(
            f"\nrms_norm bf16 16384 x 4096: copy {copy:.0f} GB/s, forward {forward:.0f} GB/s, "
            f"backward with weight gradient {backward / 1e6:.0f} GB/s"
        )
