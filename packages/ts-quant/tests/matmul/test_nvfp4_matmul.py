"""NVFP4 products: the hardware's layout of scales, and the arithmetic, on a CPU.

No test here ran on an sm_100 GPU: what such a GPU computes is compared with `mm_reference` by the
`gpu` test at the end, which other GPUs run through the reference.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ts_quant
from ts_quant.matmul import dispatch, nvfp4


@pytest.fixture
def on_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this machine had them: the operators' references run."""
    monkeypatch.setattr(dispatch, "_supported", lambda device, kind: True)


def weight(n: int = 96, k: int = 160, layout: str | None = None) -> ts_quant.QuantTensor:
    return ts_quant.quantize((torch.randn(n, k) * 0.05).bfloat16(), "nvfp4", layout=layout)


@pytest.mark.parametrize(("rows", "columns"), [(128, 4), (256, 8), (1, 1), (130, 5), (96, 10)])
def test_swizzled_scales(rows: int, columns: int) -> None:
    scale = torch.randint(1, 127, (rows, columns), dtype=torch.uint8)
    flat = nvfp4.swizzle(scale)
    tiles_down, tiles_across = -(-rows // 128), -(-columns // 4)
    assert flat.shape == (tiles_down * tiles_across * 512,)
    expected = torch.zeros_like(flat)
    for r in range(rows):
        for c in range(columns):
            tile = (r // 128) * tiles_across + c // 4
            inside = (r % 128 % 32) * 16 + (r % 128 // 32) * 4 + c % 4
            expected[tile * 512 + inside] = scale[r, c]
    assert torch.equal(flat, expected)
    assert torch.equal(nvfp4.unswizzle(flat, rows, columns), scale)


def test_activations_are_encoded_as_weights_are() -> None:
    x = torch.randn(7, 64).bfloat16()
    codes, scale, global_scale = nvfp4.quantize_activation(x, 0.0)
    q = ts_quant.quantize(x, "nvfp4")
    for mine, stored in zip((codes, scale, global_scale), q.buffers(), strict=True):
        assert torch.equal(mine.reshape(-1), stored.reshape(-1))


@pytest.mark.parametrize("layout", ["e4m3", "e4m3_div"])
def test_columns_are_those_of_the_decoded_weight(layout: str) -> None:
    q = weight(layout=layout)
    channels = torch.tensor([159, 0, 17, 16, 80])
    taken = nvfp4.columns(q.buffers(), q.spec, q.shape, channels)
    assert torch.equal(taken, q.dequantize()[:, channels])


@pytest.mark.usefixtures("on_tensor_cores")
@pytest.mark.parametrize("layout", ["e4m3", "e4m3_div"])
def test_the_layer(layout: str) -> None:
    q = weight(layout=layout)
    x = torch.randn(2, 5, 160, dtype=torch.bfloat16, requires_grad=True)
    b = torch.randn(96, dtype=torch.bfloat16)
    y = torch.nn.functional.linear(x, q, b)
    seen = ts_quant.quantize(x.detach().view(10, 160), "nvfp4").dequantize(torch.float32)
    exact = seen @ q.dequantize(torch.float32).t()
    # The product, its multiplication by the global numbers and the bias are rounded to bf16.
    bound = (exact.abs() * 2 + b.float().abs()) * 2.0**-8 * 1.5 + 1e-6
    assert bool(((y.detach().view(10, 96).float() - b.float() - exact).abs() <= bound).all())
    grad = torch.randn_like(y)
    y.backward(grad)
    assert x.grad is not None
    assert torch.equal(x.grad, (grad.view(10, 96) @ q.dequantize()).view(2, 5, 160))


@pytest.mark.usefixtures("on_tensor_cores")
def test_outliers_are_multiplied_in_bf16() -> None:
    q = weight()
    x = torch.randn(12, 160).bfloat16()
    x[:, 33] *= 200
    exact = x.float() @ q.dequantize(torch.float32).t()

    def error() -> float:
        y = torch.nn.functional.linear(x, q).float()
        return float((y - exact).norm() / exact.norm())

    without = error()
    assert ts_quant.configure_matmul(q, outliers="auto") == 1
    with_outliers = error()
    assert with_outliers < 0.4 * without
    codes, scale, global_scale, kept, channels = nvfp4.quantize_activation(x, 0.01)
    assert channels.tolist() and 33 in channels.tolist() and len(channels) == 2  # ceil of 1.6
    assert torch.equal(kept, x[:, channels])
    decoded = nvfp4._decoded(codes, scale) * global_scale
    assert bool((decoded[:, channels] == 0).all())


@pytest.mark.usefixtures("on_tensor_cores")
def test_the_backward_product_in_nvfp4() -> None:
    q = weight()
    x = torch.randn(16, 160, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(16, 96, dtype=torch.bfloat16)
    grads = []
    for nvfp4_backward in (False, True):
        ts_quant.configure_matmul(q, nvfp4_backward=nvfp4_backward)
        (grad_x,) = torch.autograd.grad(torch.nn.functional.linear(x, q), x, grad)
        grads.append(grad_x.float())
    assert torch.equal(grads[0], (grad @ q.dequantize()).float())
    encoded = [
        ts_quant.quantize(t, "nvfp4").dequantize(torch.float32)
        for t in (grad, q.dequantize().t().contiguous())
    ]
    torch.testing.assert_close(grads[1], encoded[0] @ encoded[1].t(), rtol=2**-6, atol=1e-4)


@pytest.mark.usefixtures("on_tensor_cores")
def test_compiled_without_graph_breaks() -> None:
    torch._dynamo.reset()
    q = weight()
    ts_quant.configure_matmul(q, outliers=0.05, nvfp4_backward=True)

    def net(x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, q).square()

    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    grads = []
    for call in (net, compiled):
        x = torch.linspace(-1, 1, 8 * 160).view(8, 160).bfloat16().requires_grad_()
        y = call(x)
        y.sum().backward()
        grads.append((y.detach(), x.grad))
    for a, b in zip(*grads, strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


def test_which_weights_are_taken() -> None:
    def takes(shape: tuple[int, int], codec: str = "nvfp4") -> bool:
        spec = ts_quant.quantize(torch.empty(shape, device="meta"), codec).spec
        return nvfp4.takes(spec, shape)

    assert takes((32, 64)) and not takes((32, 48)) and not takes((40, 64))
    assert not takes((32, 64), "mxfp4")


def test_options() -> None:
    linear = torch.nn.Linear(32, 32)
    linear.weight = torch.nn.Parameter(weight(32, 32), requires_grad=False)
    model = torch.nn.Sequential(linear, torch.nn.Linear(32, 4))
    assert ts_quant.configure_matmul(model, outliers=True, nvfp4_backward=True) == 1
    wanted = ts_quant.MatmulOptions(outliers=0.01, nvfp4_backward=True)
    q: Any = linear.weight
    assert q._matmul == wanted
    import copy

    for made in (q.detach(), q.clone(), q.to(torch.float32), copy.deepcopy(q)):
        assert made._matmul == wanted
    names, meta = q.__tensor_flatten__()
    inner = {name: getattr(q, name) for name in names}
    back = ts_quant.QuantTensor.__tensor_unflatten__(inner, meta, q.shape, q.stride())
    assert back._matmul == wanted
    for bad in (0.2, -0.1, "some", [0.01], float("nan")):
        with pytest.raises(ts_quant.OptionError, match="outliers"):
            ts_quant.configure_matmul(q, outliers=bad)  # type: ignore[arg-type]
    with pytest.raises(ts_quant.OptionError, match="nvfp4_backward=1"):
        ts_quant.configure_matmul(q, nvfp4_backward=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_operators(device: str) -> None:
    ops: Any = torch.ops.ts_quant
    x = torch.randn(8, 160, device=device).bfloat16()
    torch.library.opcheck(ops.nvfp4_quantize.default, (x,))
    a = ops.nvfp4_quantize(x)
    b = ops.nvfp4_quantize(torch.randn(96, 160, device=device).bfloat16())
    arguments = (a[0], a[1], b[0], b[1], a[2] * b[2])
    torch.library.opcheck(ops.nvfp4_mm.default, arguments)
    expected = nvfp4.mm_reference(*arguments)
    codes, scale, global_scale = b
    picked = torch.tensor([3, 150], device=device)
    torch.library.opcheck(ops.nvfp4_columns.default, (codes, scale, global_scale, "e4m3", picked))
    torch.testing.assert_close(ops.nvfp4_mm(*arguments).float(), expected, rtol=2**-7, atol=1e-3)
