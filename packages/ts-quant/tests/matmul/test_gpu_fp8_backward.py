"""The input gradient of an fp8 weight in FP8 on a CUDA GPU: the kernels, the layer, CUDA graphs."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

import ts_quant
from ts_quant.matmul import fp8
from ts_quant.matmul.fp8_backward import blocks_to_columns, gradient_reference, turned
from ts_quant.matmul.rows import rows_reference

pytestmark = pytest.mark.gpu

LAYOUTS = [None, "row"]
linear = torch.nn.functional.linear


@pytest.fixture(autouse=True)
def _has_the_product() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    if not fp8.supported(device, fp8.ROWS):
        pytest.skip("this GPU or build of torch has no FP8 product by rows")


def weight(n: int, k: int, layout: str | None) -> ts_quant.QuantTensor:
    q = ts_quant.quantize((torch.randn(n, k) * 0.05).bfloat16(), "fp8", layout=layout).to("cuda")
    ts_quant.configure_matmul(q, tensor_cores=True, fp8_backward=True)
    return q


def same(mine: Tensor, expected: Tensor) -> bool:
    """Whether e4m3 codes are the same on both devices; NaN has two."""
    a, b = mine.cpu().view(torch.uint8), expected.view(torch.uint8)
    return torch.equal(a, b) or torch.equal(
        torch.where(a & 127 == 127, 127, a), torch.where(b & 127 == 127, 127, b)
    )


@pytest.mark.parametrize(
    ("n", "k"), [(16, 32), (144, 160), (256, 384), (2096, 64), (16, 4128), (5120, 1024)]
)
def test_turned_as_on_a_cpu(n: int, k: int) -> None:
    """Bit for bit, also where a block is so far under its column's scale that nothing is left."""
    spread = torch.logspace(-4, 4, n * k // 32).view(n, -1).repeat_interleave(32, 1)
    for values in (torch.randn(n, k), torch.randn(n, k) * spread):
        here = ts_quant.quantize(values, "fp8")
        codes, scale = blocks_to_columns(*here.to("cuda").buffers(), n, k)
        expected, expected_scale = blocks_to_columns(*here.buffers(), n, k)
        assert same(codes, expected) and torch.equal(scale.cpu(), expected_scale)
    every = torch.randint(0, 256, (n, k), dtype=torch.uint8)
    byte = torch.randint(0, 256, (n, k // 32), dtype=torch.uint8)
    codes, scale = blocks_to_columns(every.cuda(), byte.cuda(), n, k)
    expected, expected_scale = blocks_to_columns(every, byte, n, k)
    assert same(codes, expected)
    assert torch.equal(scale.cpu().nan_to_num(), expected_scale.nan_to_num())
    codes, scale = turned(every.cuda(), n, k)
    assert torch.equal(codes.cpu().view(torch.uint8), every.t())
    assert torch.equal(scale.cpu(), torch.ones(1, k))


def test_gradients_times_row_scales_are_quantized_as_on_a_cpu() -> None:
    from ts_quant.matmul import rows_triton

    grad, scale = torch.randn(33, 13824).bfloat16(), torch.rand(13824) * 1e-3
    found = rows_triton.rows(grad.cuda(), scale.cuda())
    for mine, expected in zip(found, rows_reference(grad.float() * scale), strict=True):
        assert torch.equal(mine.cpu(), expected)


@pytest.mark.parametrize("tokens", [1, 17, 512])
@pytest.mark.parametrize(("n", "k"), [(512, 1024), (48, 96), (16, 32), (1024, 2080)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_layer(layout: str | None, n: int, k: int, tokens: int) -> None:
    q = weight(n, k, layout)
    x = torch.randn(tokens, k, device="cuda").bfloat16().requires_grad_()
    y = linear(x, q)
    grad = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, x, grad)
    expected = gradient_reference(grad, *q.buffers(), layout is None).float()
    # The tensor cores of sm_90 keep about 14 bits of a partial sum.
    size = expected.abs().mean()
    assert float((found.float() - expected).abs().mean()) <= 2.0**-8 * float(size)
    plain = (grad @ q.dequantize()).float()
    assert 1e-4 < float((found.float() - plain).norm() / plain.norm()) < 0.08
    assert torch.equal(q.input_gradient(grad), found)
    # The same on a CPU, where it is emulated.
    with ts_quant.emulate_tensor_cores():
        there = q.to("cpu").input_gradient(grad.cpu()).float()
    assert float((found.cpu().float() - there).norm()) <= 2.0**-7 * float(there.norm())
    grad[tokens // 2, 3] = float("nan")
    broken = q.input_gradient(grad)
    rows = torch.arange(tokens, device="cuda") == tokens // 2
    assert bool(broken[rows].isnan().all()) and torch.equal(broken[~rows], found[~rows])
    ts_quant.configure_matmul(q, fp8_backward=False)
    (decoded,) = torch.autograd.grad(linear(x, q), x, grad)
    assert torch.equal(decoded.nan_to_num(), (grad @ q.dequantize()).nan_to_num())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_in_a_cuda_graph_and_without_waiting(layout: str | None) -> None:
    q = weight(512, 1024, layout)
    x = torch.randn(32, 1024, device="cuda").bfloat16().requires_grad_()
    grad = torch.randn(32, 512, device="cuda").bfloat16()

    def step() -> Tensor:
        return torch.autograd.grad(linear(x, q), x, grad)[0]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    other = weight(512, 1024, layout)
    for buffer, new in zip(q.buffers(), other.buffers(), strict=True):
        buffer.copy_(new)  # as a pager writes other weights into a slot
    grad.copy_(torch.randn_like(grad) * 3)
    graph.replay()
    assert torch.equal(captured, other.input_gradient(grad))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_inductor(layout: str | None) -> None:
    torch._dynamo.reset()
    q = weight(256, 512, layout)

    def net(x: Tensor) -> Tensor:
        return linear(x, q).relu()

    compiled = torch.compile(net, fullgraph=True)
    grads = []
    for call in (net, compiled):
        x = torch.linspace(-1, 1, 16 * 512, device="cuda").view(16, 512).bfloat16()
        x.requires_grad_()
        call(x).sum().backward()
        assert x.grad is not None
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


def test_a_large_weight() -> None:
    """More than 2^31 codes: offsets are wider than 32 bits."""
    n, k = 65536 + 128, 32768
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB")
    codes = torch.randint(0, 127, (n, k), dtype=torch.uint8, device="cuda")
    byte = torch.full((n, k // 32), 120, dtype=torch.uint8, device="cuda")
    byte[-1] = 121
    out, scale = blocks_to_columns(codes, byte, n, k)
    assert bool((scale == 2.0**-6).all())
    exact = codes[-128:].view(torch.float8_e4m3fn).float()
    exact[:-1] /= 2
    found = out[:, -128:].t().float()
    assert torch.equal(found, exact.to(torch.float8_e4m3fn).float())
