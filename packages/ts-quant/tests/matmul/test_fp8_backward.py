"""The input gradient of an fp8 weight in FP8, against plain arithmetic on a CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import ts_quant
from ts_quant.matmul import dispatch, fp8_backward
from ts_quant.matmul.fp8_backward import blocks_to_columns, turned
from ts_quant.matmul.rows import fp8_rows

LAYOUTS = [None, "row"]  # blocks of 32, row scales
linear = torch.nn.functional.linear


def weight(
    n: int = 256, k: int = 384, layout: str | None = None, dtype: torch.dtype = torch.bfloat16
) -> ts_quant.QuantTensor:
    """Multiplied on tensor cores in both passes, small as it is."""
    q = ts_quant.quantize((torch.randn(n, k) * 0.05).to(dtype), "fp8", layout=layout)
    ts_quant.configure_matmul(q, tensor_cores=True, fp8_backward=True)
    return q


def gradient(q: ts_quant.QuantTensor, x: Tensor, grad: Tensor, *, emulated: bool = True) -> Tensor:
    """Of the layer's input."""
    x = x.detach().requires_grad_()
    if not emulated:
        return torch.autograd.grad(linear(x, q), x, grad)[0]
    with ts_quant.emulate_tensor_cores():
        return torch.autograd.grad(linear(x, q), x, grad)[0]


def expected(q: ts_quant.QuantTensor, grad: Tensor) -> Tensor:
    """fp32 product of the quantized gradient and the decoded weight (whose column scales lose
    nothing as long as its values are of one size)."""
    n, k = q.shape
    codes, scale = q.buffers()
    if q.spec.scales == "e8m0":
        g, g_scale = fp8_rows(grad)
        w = q.dequantize(torch.float32)
    else:
        g, g_scale = fp8_rows(grad.float() * scale.view(1, n))
        w = codes.view(n, k).view(torch.float8_e4m3fn).float()
    return (g.view(torch.float8_e4m3fn).float() * g_scale) @ w


def test_turned_to_columns_nothing_is_lost_while_the_blocks_are_alike() -> None:
    q = ts_quant.quantize(torch.randn(48, 256), "fp8")
    codes, scale = blocks_to_columns(*q.buffers(), 48, 256)
    assert codes.shape == (256, 48) and codes.is_contiguous() and scale.shape == (1, 256)
    assert torch.equal((codes.float() * scale.view(256, 1)).t(), q.dequantize())
    q = ts_quant.quantize(torch.randn(48, 80), "fp8", layout="row")
    codes, ones = turned(q.buffers()[0], 48, 80)
    assert codes.is_contiguous() and torch.equal(ones, torch.ones(1, 80))
    assert torch.equal(codes.t().float() * q.buffers()[1].view(48, 1), q.dequantize())


def test_turned_to_columns_only_what_is_tiny_in_its_column_is_lost() -> None:
    factors = torch.logspace(-6, 0, 16)[:, None]
    q = ts_quant.quantize(torch.randn(16, 256) * factors, "fp8")
    codes, scale = blocks_to_columns(*q.buffers(), 16, 256)
    dense = q.dequantize().t()
    error = (codes.float() * scale.view(256, 1) - dense).abs()
    # Half a step of e4m3's denormals, in units of the column's scale.
    assert bool((error <= scale.view(256, 1) * 2.0**-10).all()) and bool(error.any())
    assert bool((error[dense.abs() >= scale.view(256, 1) * 2.0**-6] == 0).all())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("n", "k", "tokens"), [(256, 384, 16), (48, 96, 1), (16, 32, 7)])
def test_the_layer(layout: str | None, n: int, k: int, tokens: int) -> None:
    q = weight(n, k, layout)
    x = torch.randn(tokens, k).bfloat16()
    grad = torch.randn(tokens, n).bfloat16() * torch.logspace(-6, 2, tokens)[:, None].bfloat16()
    found = gradient(q, x, grad)
    assert found.dtype is torch.bfloat16 and found.shape == (tokens, k)
    exact = expected(q, grad)
    # One rounding to bf16 of sums in another order.
    room = 2.0**-8 * exact.abs() + 1e-5 * exact.abs().amax(1, keepdim=True)
    assert bool(((found.float() - exact).abs() <= room).all())
    plain = grad @ q.dequantize()
    assert torch.equal(gradient(q, x, grad, emulated=False), plain)
    off = (found.float() - plain.float()).norm(dim=1) / plain.float().norm(dim=1)
    assert bool((off < 0.06).all()) and float(off.mean()) > 1e-4


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_shapes_and_strides_of_gradients(layout: str | None) -> None:
    q = weight(64, 96, layout)
    rows = torch.randn(6, 64).bfloat16()
    found = gradient(q, torch.randn(6, 96).bfloat16(), rows)
    assert not torch.equal(found, q.input_gradient(rows))  # which is decoded without tensor cores
    with ts_quant.emulate_tensor_cores():
        assert torch.equal(q.input_gradient(rows), found)
    for shape in ((2, 3), (6, 1), (1, 6)):
        x = torch.randn(*shape, 96).bfloat16()
        assert torch.equal(gradient(q, x, rows.view(*shape, 64)), found.view(*shape, 96))
    one = gradient(q, torch.randn(96).bfloat16(), rows[2])
    assert one.shape == (96,) and torch.equal(one, found[2])
    columns = rows.t().contiguous().t()
    assert torch.equal(gradient(q, torch.randn(96, 6).bfloat16().t(), columns), found)
    same = gradient(q, torch.randn(6, 96).bfloat16(), rows[:1].expand(6, 64))
    assert torch.equal(same, found[:1].expand(6, 96))
    none = gradient(q, torch.randn(0, 96).bfloat16(), torch.randn(0, 64).bfloat16())
    assert none.shape == (0, 96)
    zero = gradient(q, torch.randn(6, 96).bfloat16(), torch.zeros(6, 64).bfloat16())
    assert torch.equal(zero, torch.zeros(6, 96).bfloat16())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_gradient_makes_its_row_nan_and_no_other(layout: str | None, bad: float) -> None:
    q = weight(64, 96, layout)
    x, grad = torch.randn(4, 96).bfloat16(), torch.randn(4, 64).bfloat16()
    good = gradient(q, x, grad)
    grad[1, 7] = bad
    found = gradient(q, x, grad)
    assert bool(found[1].isnan().all())
    assert torch.equal(found[[0, 2, 3]], good[[0, 2, 3]])


def test_extreme_scales() -> None:
    """Columns of the smallest and largest scales, of scales 2^20 apart, and of a NaN scale."""
    n, k = 48, 160
    codes = torch.randint(0, 0x7F, (n, k), dtype=torch.uint8)
    codes |= torch.randint(0, 2, (n, k), dtype=torch.uint8) << 7
    codes[:, 32:64] &= 0x87  # under 2^-6, of which sums are finite at 2^127
    byte = torch.full((n, 5), 127, dtype=torch.uint8)
    byte[:, 0], byte[:, 1], byte[1::2, 2] = 0, 254, 107
    byte[5, 4] = 255
    q = ts_quant.QuantTensor.from_buffers(
        "fp8", {"codes": codes, "scale": byte}, shape=(n, k), dtype=torch.bfloat16
    )
    ts_quant.configure_matmul(q, tensor_cores=True, fp8_backward=True)
    grad = torch.where(torch.rand(8, n) < 0.5, -1.0, 1.0).bfloat16()  # which e4m3 holds exactly
    found = gradient(q, torch.randn(8, k).bfloat16(), grad).double()
    exact = grad.double() @ q.dequantize(torch.float64)
    top = torch.tensor([2.0**-127, 2.0**127, 1.0, 1.0]).double().repeat_interleave(32)
    # What is under e4m3's denormals at the column's scale, then a rounding to bf16 (which has
    # denormals from 2^-126 down, in steps of 2^-133).
    room = n * top * 2.0**-10 + exact[:, :128].abs() * 2.0**-8 + 2.0**-133
    error = (found - exact)[:, :128].abs()
    assert bool((error <= room).all())
    assert bool((error[:, :64] <= exact[:, :64].abs() * 2.0**-7 + 2.0**-133).all())  # alike
    assert bool(found[:, :128].abs().amax(0).gt(0).all())
    assert bool(found[:, 128:].isnan().all()) and bool(exact[:, 128:].isnan().all())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_autocast(layout: str | None, given: torch.dtype) -> None:
    q = weight(64, 96, layout, torch.float32)
    x = torch.randn(8, 96, dtype=given, requires_grad=True)
    grad = torch.randn(8, 64).bfloat16()
    with ts_quant.emulate_tensor_cores():
        with torch.autocast("cpu", torch.bfloat16):
            y = linear(x, q)
        (found,) = torch.autograd.grad(y, x, grad)
        assert y.dtype is torch.bfloat16 and found.dtype is given
        assert torch.equal(found, q.input_gradient(grad).to(given))
        ts_quant.configure_matmul(q, fp8_backward=False)
        assert not torch.equal(found, q.input_gradient(grad).to(given))
        assert torch.equal(q.input_gradient(grad), grad @ q.dequantize().bfloat16())
    torch.testing.assert_close(found.float(), expected(q, grad), rtol=2**-7, atol=1e-4)


def test_everything_else_is_multiplied_with_the_decoded_weight() -> None:
    q = weight()
    others = {
        "off": copy.deepcopy(q),
        "tensor cores off": copy.deepcopy(q),
        "tiles": weight(layout="tile"),
        "one scale": weight(layout="tensor"),
        "odd n": weight(40, 64),
        "odd k": weight(64, 48),
        "fp32": weight(dtype=torch.float32),
        "fp16": weight(dtype=torch.float16),
        "outliers": ts_quant.quantize(q.dequantize(), "fp8", outlier_channels=[3, 200]),
        "int8": ts_quant.quantize(q.dequantize(), "int8"),
        "misaligned": q.with_buffers([_shifted(buffer) for buffer in q.buffers()]),
        "small": copy.deepcopy(q),
        "factors": ts_quant.QuantTensor.from_buffers(
            "fp8",
            {"codes": q.buffers()[0], "scale": q.buffers()[1], "channel_scale": torch.rand(384)},
            shape=(256, 384),
            dtype=torch.bfloat16,
            layout={"channel_scale": True},
        ),
    }
    for name, w in others.items():
        ts_quant.configure_matmul(w, tensor_cores=True, fp8_backward=name != "off")
        n, k = w.shape
        grad = torch.randn(8, n, dtype=w.dtype)
        if name == "tensor cores off":
            ts_quant.configure_matmul(w, tensor_cores=False)
        if name == "small":
            ts_quant.configure_matmul(w, tensor_cores="auto")
        plain = grad @ w.dequantize()
        assert torch.equal(gradient(w, torch.randn(8, k, dtype=w.dtype), grad), plain), name
        with ts_quant.emulate_tensor_cores():
            assert torch.equal(w.input_gradient(grad), plain), name
            wide = w.input_gradient(grad.float())
            assert torch.equal(wide, grad.float() @ w.dequantize().float()), name
            nothing = w.input_gradient(grad[:0])
            assert nothing.shape == (0, k) and nothing.dtype is w.dtype


def _shifted(buffer: Tensor) -> Tensor:
    room = torch.zeros(buffer.numel() + 16, dtype=torch.uint8)
    start = (8 - room.data_ptr()) % 16
    moved = room[start : start + buffer.numel()].view(buffer.shape)
    return moved.copy_(buffer)


def test_what_counts_is_the_device_of_backward() -> None:
    """Forward may have decoded, for a bias of another kind or in another place."""
    q, grad = weight(), torch.randn(8, 256).bfloat16()
    x = torch.randn(8, 384).bfloat16().requires_grad_()
    y = linear(x, q)
    assert torch.equal(y, linear(x, q.dequantize()))
    with ts_quant.emulate_tensor_cores():
        (found,) = torch.autograd.grad(y, x, grad)
        assert torch.equal(found, q.input_gradient(grad))
    assert not torch.equal(found, grad @ q.dequantize())


def test_the_gradient_of_a_gradient_is_refused() -> None:
    q = weight()
    x = torch.randn(4, 384).bfloat16().requires_grad_()
    with ts_quant.emulate_tensor_cores():
        (grad,) = torch.autograd.grad(linear(x, q).square().sum(), x, create_graph=True)
        assert torch.equal(grad.detach(), torch.autograd.grad(linear(x, q).square().sum(), x)[0])
        with pytest.raises(RuntimeError, match="no second derivative"):
            grad.sum().backward()
        asked = torch.randn(4, 256).bfloat16().requires_grad_()
        assert not q.input_gradient(asked).requires_grad


def test_gradients_that_do_not_fit_are_refused() -> None:
    q = weight(32, 64)
    for wrong in (torch.randn(4, 64), torch.randn(32), torch.randn(2, 4, 32)):
        with pytest.raises(ts_quant.OptionError, match="input_gradient"):
            q.input_gradient(wrong.bfloat16())
    stack = ts_quant.quantize(torch.randn(2, 32, 64).bfloat16(), "fp8")
    with pytest.raises(ts_quant.OptionError, match="input_gradient"):
        stack.input_gradient(torch.randn(4, 32).bfloat16())


def test_options() -> None:
    q = ts_quant.quantize(torch.randn(32, 64), "fp8")
    assert not q._matmul.fp8_backward
    ts_quant.configure_matmul(q, fp8_backward=True)
    ts_quant.configure_matmul(q, tensor_cores=True, outliers=0.01, nvfp4_backward=True)
    assert q._matmul == ts_quant.MatmulOptions(True, 0.01, True, True)
    ts_quant.configure_matmul(q, fp8_backward=False)
    assert q._matmul == ts_quant.MatmulOptions(True)
    for bad in (1, 0, "auto", 0.5):
        with pytest.raises(ts_quant.OptionError, match="fp8_backward="):
            ts_quant.configure_matmul(q, fp8_backward=bad)  # type: ignore[arg-type]


def test_buffers_may_move_between_the_passes() -> None:
    """As a pager moves them; the gradient reads them where they lie then."""
    q, grad = weight(), torch.randn(8, 256).bfloat16()
    x = torch.randn(8, 384).bfloat16().requires_grad_()
    wanted = gradient(q, x, grad)
    with ts_quant.emulate_tensor_cores():
        y = linear(x, q)
        for name in q.__tensor_flatten__()[0]:
            old = getattr(q, name)
            setattr(q, name, old.clone())
            old.zero_()
        assert torch.equal(torch.autograd.grad(y, x, grad)[0], wanted)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_compiled_without_graph_breaks(layout: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(dispatch, "_supported", lambda device, kind: True)
    q = weight(64, 96, layout)

    def net(x: Tensor) -> Tensor:
        return linear(x, q).square()

    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    grads = []
    for call in (net, compiled):
        x = torch.linspace(-1, 1, 8 * 96).view(8, 96).bfloat16().requires_grad_()
        call(x).sum().backward()
        grads.append(x.grad)
    assert grads[0] is not None and grads[1] is not None and torch.equal(grads[0], grads[1])
    x = torch.linspace(-1, 1, 8 * 96).view(8, 96).bfloat16()
    wanted = fp8_backward.gradient_reference(2 * linear(x, q), *q.buffers(), layout is None)
    assert torch.equal(grads[0], wanted)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_operator(layout: str | None, device: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    op: Any = torch.ops.ts_quant.fp8_input_gradient
    for tokens in (1, 8):
        q = weight(layout=layout).to(device)
        grad = torch.randn(tokens, 256, device=device).bfloat16()
        for given in (grad, grad.t().contiguous().t()):
            arguments = (given, *q.buffers(), layout is None)
            torch.library.opcheck(op.default, arguments)
            real = op(*arguments)
            with FakeTensorMode() as mode:
                fake = op(*[mode.from_tensor(v) for v in arguments[:3]], arguments[3])
            for made in (real, fake):
                assert made.shape == (tokens, 384) and made.dtype is torch.bfloat16
                assert made.device.type == device and made.storage_offset() == 0
            assert real.stride() == fake.stride() == (384, 1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_adapters_trained_with_it_end_where_they_end_without(layout: str | None) -> None:
    """Three frozen layers with adapters that learn another three layers' outputs."""
    torch.manual_seed(0)
    dense = [torch.randn(96, 96) / 96**0.5 for _ in range(3)]
    goal = [w + torch.randn(96, 4) @ torch.randn(4, 96) * 0.05 for w in dense]
    x = torch.randn(256, 96)
    wanted = x
    for w in goal:
        wanted = torch.tanh(linear(wanted, w))
    wanted = wanted + 0.05 * torch.randn_like(wanted)  # which none of them can learn

    def losses(fp8_backward: bool) -> list[float]:
        torch.manual_seed(1)
        frozen = [ts_quant.quantize(w.bfloat16(), "fp8", layout=layout) for w in dense]
        for q in frozen:
            ts_quant.configure_matmul(q, tensor_cores=True, fp8_backward=fp8_backward)
        a = [(torch.randn(4, 96) / 96**0.5).requires_grad_() for _ in frozen]
        b = [torch.zeros(96, 4, requires_grad=True) for _ in frozen]
        optimizer = torch.optim.Adam([*a, *b], lr=1e-2)
        seen = []
        for _ in range(60):
            h = x.bfloat16()
            for q, down, up in zip(frozen, a, b, strict=True):
                h = torch.tanh(linear(h, q) + (h @ down.t().bfloat16()) @ up.t().bfloat16())
            loss = (h.float() - wanted).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        return seen

    with ts_quant.emulate_tensor_cores():
        without, with_it = losses(False), losses(True)
    assert with_it != without and with_it[0] == without[0]
    assert without[-1] < 0.5 * without[0]
    assert with_it[-1] == pytest.approx(without[-1], rel=0.03)
