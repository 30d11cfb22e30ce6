"""FP8 products: activations, row scales, the layer, each against plain arithmetic on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ts_quant
from ts_quant.codecs.base import codec_named
from ts_quant.matmul import dispatch, fp8, options
from ts_quant.matmul.rows import fp8_groups, fp8_rows

LAYOUTS = [None, "row", "tile"]


@pytest.fixture
def on_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this machine had them, and for small matrices too: the operators' references run."""
    monkeypatch.setattr(dispatch, "_supported", lambda device, kind: True)
    monkeypatch.setattr(options, "FASTER_FROM", 0)


def weight(n: int = 256, k: int = 384, layout: str | None = None) -> ts_quant.QuantTensor:
    w = (torch.randn(n, k) * 0.05).bfloat16()
    return ts_quant.quantize(w, "fp8", layout=layout)


def values_of(
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]], x: Tensor
) -> tuple[Tensor, Tensor]:
    """fp32 values of the codes, and the scales."""
    codes, scale = quantize(x)
    assert codes.dtype is torch.uint8 and codes.shape == x.shape
    return codes.view(torch.float8_e4m3fn).float(), scale


def test_rows() -> None:
    x = torch.randn(6, 200) * torch.logspace(-4, 4, 6)[:, None]
    x[3] = 0
    codes, scale = values_of(fp8_rows, x)
    assert scale.shape == (6, 1)
    expected = x.abs().amax(1, keepdim=True) / torch.tensor(448.0)
    expected[3] = 2.0**-100
    assert torch.equal(scale, expected)
    error = (codes * scale - x).abs()
    assert bool((error <= torch.maximum(x.abs() * 2.0**-4, scale * 2.0**-10) * 1.0001).all())
    assert bool((codes[3] == 0).all())


def test_groups() -> None:
    x = torch.randn(5, 384).bfloat16()
    codes, scale = values_of(fp8_groups, x)
    assert scale.shape == (3, 5)
    for group in range(3):
        part = slice(128 * group, 128 * (group + 1))
        alone, alone_scale = values_of(fp8_rows, x[:, part])
        assert torch.equal(codes[:, part], alone)
        assert torch.equal(scale[group], alone_scale[:, 0])


@pytest.mark.parametrize("quantize", [fp8_rows, fp8_groups])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_value_makes_its_row_nan_and_no_other(
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]], bad: float
) -> None:
    x = torch.randn(3, 128)
    x[1, 7] = bad
    codes, _ = values_of(quantize, x)
    assert bool(codes[1].isnan().any())
    assert not bool(codes[0].isnan().any() or codes[2].isnan().any())


def test_which_weights_and_activations_are_taken() -> None:
    def kind(shape: tuple[int, int], layout: str | None, tokens: int = 8) -> str | None:
        return fp8.activation_kind(codec_named("fp8").spec_for(shape, layout=layout), shape, tokens)

    assert kind((32, 64), None) == kind((32, 64), "row") == fp8.ROWS
    assert kind((256, 384), "tile") == fp8.GROUPS
    assert kind((256, 384), "tile", tokens=7) is None
    assert kind((200, 384), "tile") is None and kind((256, 200), "tile") is None
    assert kind((30, 64), None) is None and kind((32, 48), None) is None
    assert kind((32, 48), "row") == fp8.ROWS and kind((32, 40), "row") is None
    assert kind((32, 64), "tensor") is None
    assert fp8.activation_kind(codec_named("nf4").spec_for((32, 64)), (32, 64), 8) is None


def test_blocks_of_32_to_rows_is_exact_while_the_blocks_are_alike() -> None:
    q = ts_quant.quantize(torch.randn(48, 256), "fp8")
    codes, scale = fp8.blocks_to_rows(*q.buffers(), 48, 256)
    assert torch.equal(codes.float() * scale.view(48, 1), q.dequantize())


def test_blocks_of_32_to_rows_loses_only_what_is_tiny_in_its_row() -> None:
    factors = torch.logspace(-6, 0, 8).repeat_interleave(32)
    q = ts_quant.quantize(torch.randn(16, 256) * factors, "fp8")
    codes, scale = fp8.blocks_to_rows(*q.buffers(), 16, 256)
    dense = q.dequantize()
    error = (codes.float() * scale.view(16, 1) - dense).abs()
    # Half a step of e4m3's denormals, in units of the row's scale.
    assert bool((error <= scale.view(16, 1) * 2.0**-10).all()) and bool(error.any())
    assert bool((error[dense.abs() >= scale.view(16, 1) * 2.0**-6] == 0).all())


@pytest.mark.usefixtures("on_tensor_cores")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_layer(layout: str | None, bias: bool) -> None:
    q = weight(layout=layout)
    x = torch.randn(2, 8, 384, dtype=torch.bfloat16, requires_grad=True)
    b = torch.randn(256, dtype=torch.bfloat16, requires_grad=True) if bias else None
    y = torch.nn.functional.linear(x, q, b)
    assert y.dtype is torch.bfloat16 and y.shape == (2, 8, 256)
    dense = q.dequantize()
    flat = x.detach().view(16, 384)
    if layout == "tile":
        codes, scale = values_of(fp8_groups, flat)
        seen = codes * scale.t().repeat_interleave(128, 1)
    else:
        codes, scale = values_of(fp8_rows, flat)
        seen = codes * scale
    # fp32 sums of the quantized activation and the decoded weight, of which bf16 is one rounding.
    exact = seen @ q.dequantize(torch.float32).t() + (0 if b is None else b.detach().float())
    torch.testing.assert_close(y.detach().view(16, 256).float(), exact, rtol=2**-8, atol=1e-5)
    plain = torch.nn.functional.linear(x.detach(), dense, None if b is None else b.detach())
    relative = (y.detach().float() - plain.float()).norm() / plain.float().norm()
    assert 1e-4 < float(relative) < 0.04
    grad = torch.randn_like(y)
    y.backward(grad)
    assert x.grad is not None
    assert torch.equal(x.grad, (grad.view(16, 256) @ dense).view(2, 8, 384))
    if b is not None:
        assert b.grad is not None and b.grad.shape == (256,)


@pytest.mark.usefixtures("on_tensor_cores")
def test_turned_off_it_is_the_decoded_weights_layer() -> None:
    q = weight()
    x = torch.randn(4, 384, dtype=torch.bfloat16)
    plain = torch.nn.functional.linear(x, q.dequantize())
    assert not torch.equal(torch.nn.functional.linear(x, q), plain)
    assert ts_quant.configure_matmul(q, tensor_cores=False) == 1
    assert torch.equal(torch.nn.functional.linear(x, q), plain)


def test_small_matrices_are_multiplied_in_bf16_unless_told_otherwise() -> None:
    linear = torch.nn.functional.linear
    with ts_quant.emulate_tensor_cores():
        for n, fp8_by_itself in ((2048, False), (4096, True)):  # of 512: 2^20 and 2^21 weights
            q, x = weight(n, 512), torch.randn(4, 512).bfloat16()
            decoded = linear(x, q.dequantize())
            codes, scale = values_of(fp8_rows, x)
            multiplied = ((codes * scale) @ q.dequantize(torch.float32).t()).bfloat16()
            assert not torch.equal(decoded, multiplied)
            assert torch.equal(linear(x, q), multiplied if fp8_by_itself else decoded)
            ts_quant.configure_matmul(q, tensor_cores=True)
            assert torch.equal(linear(x, q), multiplied)
            ts_quant.configure_matmul(q, outliers=0.01)  # says nothing of tensor_cores
            assert torch.equal(linear(x, q), multiplied)
            ts_quant.configure_matmul(q, tensor_cores=False)
            assert torch.equal(linear(x, q), decoded)
            ts_quant.configure_matmul(q, tensor_cores="auto")
            assert torch.equal(linear(x, q), multiplied if fp8_by_itself else decoded)
    assert torch.equal(linear(x, q), decoded)
    for bad in ("on", 1, 0.5):
        with pytest.raises(ts_quant.OptionError, match="tensor_cores="):
            ts_quant.configure_matmul(q, tensor_cores=bad)  # type: ignore[arg-type]


def test_every_layer_of_a_14b_model_is_large_enough() -> None:
    for shape in ((5120, 5120), (1024, 5120), (13824, 5120), (5120, 13824)):
        assert ts_quant.MatmulOptions().allows("fp8", shape)


@pytest.mark.usefixtures("on_tensor_cores")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_outlier_channels_are_added_in_bf16(layout: str | None, bias: bool) -> None:
    """Columns that dominate the product lose nothing, in the weight or in the activation."""
    channels = [5, 130, 383]
    w = (torch.randn(256, 384) * 0.05).bfloat16()
    x = torch.randn(2, 8, 384).bfloat16()
    x[..., channels] *= 200
    x.requires_grad_()
    b = torch.randn(256).bfloat16() if bias else None
    q = ts_quant.quantize(w, "fp8", layout=layout, outlier_channels=channels)
    y = torch.nn.functional.linear(x, q, b)
    flat = x.detach().view(16, 384)
    codes, scale = values_of(fp8_groups if layout == "tile" else fp8_rows, flat)
    seen = codes * (scale.t().repeat_interleave(128, 1) if layout == "tile" else scale)
    seen[:, channels] = flat[:, channels].float()
    exact = seen @ q.dequantize(torch.float32).t() + (0 if b is None else b.float())
    # Two roundings to bf16: of the FP8 product, and of the sum.
    torch.testing.assert_close(y.detach().view(16, 256).float(), exact, rtol=2**-8, atol=2**-6)

    def error(z: Tensor) -> float:
        wanted = flat.float() @ w.float().t() + (0 if b is None else b.float())
        return float((z.detach().view(16, 256).float() - wanted).norm() / wanted.norm())

    plain = torch.nn.functional.linear(x, ts_quant.quantize(w, "fp8", layout=layout), b)
    assert error(y) < 0.3 * error(plain)
    grad = torch.randn_like(y)
    (grad_x,) = torch.autograd.grad(y, x, grad)
    assert torch.equal(grad_x.view(16, 384), grad.view(16, 256) @ q.dequantize())
    one = torch.nn.functional.linear(flat[3], q, b)  # a vector
    if layout != "tile":  # which takes four rows or more
        assert one.shape == (256,) and torch.equal(one, y.detach().view(16, 256)[3])


@pytest.mark.usefixtures("on_tensor_cores")
def test_other_dtypes_and_shapes_decode() -> None:
    q = weight()
    for x in (torch.randn(4, 384), torch.randn(4, 384).half(), torch.randn(0, 384).bfloat16()):
        w = q.to(x.dtype)
        expected = torch.nn.functional.linear(x, w.dequantize())
        assert torch.equal(torch.nn.functional.linear(x, w), expected)
    odd = ts_quant.quantize(torch.randn(30, 40).bfloat16(), "fp8")
    x = torch.randn(3, 40).bfloat16()
    expected = torch.nn.functional.linear(x, odd.dequantize())
    assert torch.equal(torch.nn.functional.linear(x, odd), expected)
    with pytest.raises(RuntimeError):
        torch.nn.functional.linear(torch.randn(4, 300).bfloat16(), q)


@pytest.mark.usefixtures("on_tensor_cores")
def test_misaligned_buffers_decode() -> None:
    q = weight(layout="row")
    codes, scale = q.buffers()
    room = torch.zeros(codes.numel() + 16, dtype=torch.uint8)
    start = (8 - room.data_ptr()) % 16
    moved = room[start : start + codes.numel()].view(codes.shape)
    moved.copy_(codes)
    x = torch.randn(4, 384).bfloat16()
    y = torch.nn.functional.linear(x, q.with_buffers((moved, scale)))
    assert torch.equal(y, torch.nn.functional.linear(x, q.dequantize()))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, on_tensor_cores: None) -> list[int]:
    """Counts quantized activations."""
    made: list[int] = []
    real = dispatch.fp8_rows

    def counted(x: Tensor) -> tuple[Tensor, Tensor]:
        made.append(x.shape[0])
        return real(x)

    monkeypatch.setattr(dispatch, "fp8_rows", counted)
    return made


def test_one_activation_is_quantized_once_for_all_its_weights(calls: list[int]) -> None:
    weights = [weight(), weight(layout="row"), weight(128)]
    linear = torch.nn.functional.linear
    for grad in (False, True):
        x = torch.randn(4, 384, dtype=torch.bfloat16, requires_grad=grad)
        calls.clear()
        together = [linear(x, q) for q in weights]
        assert len(calls) == 1
        alone = [linear(x.clone(), q) for q in weights]
        assert len(calls) == 4
        for a, b in zip(together, alone, strict=True):
            assert torch.equal(a, b)


def test_a_changed_activation_is_quantized_again(calls: list[int]) -> None:
    q, k, linear = weight(), weight(), torch.nn.functional.linear
    x = torch.randn(4, 384, dtype=torch.bfloat16)
    linear(x, q)
    expected = linear(x * 2, k)
    calls.clear()
    linear(x, q)
    x.mul_(2)
    assert torch.equal(linear(x, k), expected) and len(calls) == 2
    with torch.inference_mode():
        y = torch.randn(4, 384, dtype=torch.bfloat16)
        linear(y, q)
        y.mul_(3)
        linear(y, k)
    assert len(calls) == 4


def test_new_values_without_a_new_version_are_seen(calls: list[int]) -> None:
    """As a replayed CUDA graph writes them."""
    weights, linear = [weight(), weight()], torch.nn.functional.linear
    x = torch.randn(4, 384, dtype=torch.bfloat16)
    first = [linear(x, q) for q in weights]
    version = x._version
    x.untyped_storage().copy_((-x).untyped_storage())
    assert x._version == version
    second = [linear(x, q) for q in weights]
    assert len(calls) == 2
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, -b)


def test_under_autocast_the_models_own_activation_is_recognized(calls: list[int]) -> None:
    q, k = weight(), weight(layout="row")
    x = torch.randn(4, 384)
    with torch.autocast("cpu", torch.bfloat16):
        torch.nn.functional.linear(x, q)
        torch.nn.functional.linear(x, k)
    assert len(calls) == 1


def test_nothing_outlives_the_activation(calls: list[int]) -> None:
    import weakref

    from ts_quant.matmul.shared import _ENTRIES

    x = torch.randn(4, 384, dtype=torch.bfloat16)
    torch.nn.functional.linear(x, weight())
    made = weakref.ref(_ENTRIES.by_device[x.device].made[0])
    assert made() is not None
    del x
    assert made() is None and not _ENTRIES.by_device


@pytest.mark.usefixtures("on_tensor_cores")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_compiled_without_graph_breaks(layout: str | None) -> None:
    torch._dynamo.reset()
    first = weight(256, 384, layout)
    second = ts_quant.quantize(
        torch.randn(128, 384).bfloat16(), "fp8", layout=layout, outlier_channels=[3, 200]
    )

    def net(x: Tensor) -> Tensor:
        y = torch.nn.functional.linear(x, first)
        return y[:, :128] * torch.nn.functional.linear(x, second)

    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    leaves = [torch.randn(8, 384).bfloat16().requires_grad_() for _ in range(2)]
    leaves[1].data.copy_(leaves[0].data)
    for call, leaf in zip((net, compiled), leaves, strict=True):
        call(leaf).square().sum().backward()
    assert torch.equal(net(leaves[0]), compiled(leaves[0]))
    assert leaves[0].grad is not None and leaves[1].grad is not None
    assert torch.equal(leaves[0].grad, leaves[1].grad)


@pytest.mark.usefixtures("on_tensor_cores")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_fake_tensors_outside_of_compilation(layout: str | None) -> None:
    """As Dynamo of torch 2.11 runs a layer whose weight is no parameter: no address is asked."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    q = weight(layout=layout)
    real = torch.nn.functional.linear(torch.randn(8, 384).bfloat16(), q)
    with FakeTensorMode() as mode:
        fake = q.with_buffers([mode.from_tensor(buffer) for buffer in q.buffers()])
        x = mode.from_tensor(torch.randn(8, 384).bfloat16())
        for activation in (x, x.requires_grad_()):
            y = torch.nn.functional.linear(activation, fake)
            assert (y.shape, y.dtype, y.stride()) == (real.shape, real.dtype, real.stride())


SHAPES = [(8, 256, 384), (1, 128, 128), (4, 256, 512), (0, 128, 256)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_fakes_have_the_layout_of_the_real_results(layout: str | None, device: str) -> None:
    """Shape, dtype, device, strides and offset, which compiled code relies on."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    ops: Any = torch.ops.ts_quant
    for tokens, n, k in SHAPES:
        if device == "cuda" and (tokens == 0 or tokens % 4):
            continue  # numbers that the products on tensor cores are not asked for
        q = weight(n, k, layout).to(device)
        x = torch.randn(tokens, k, device=device).bfloat16()
        grouped = layout == "tile"
        quantize = ops.fp8_groups if grouped else ops.fp8_rows
        bias = torch.randn(n, device=device).bfloat16()
        calls: list[tuple[Any, tuple[Any, ...]]] = [
            (quantize, (x,)),
            (quantize, (x.t().contiguous().t(),)),
        ]
        for b in (bias, None):
            arguments = (*quantize(x), *q.buffers(), layout is None, grouped, b)
            calls.append((ops.fp8_linear, arguments))
        for op, given in calls:
            real = op(*given)
            with FakeTensorMode() as mode:
                faked = [mode.from_tensor(v) if isinstance(v, Tensor) else v for v in given]
                fake = op(*faked)
            for a, b in zip(_layouts(real), _layouts(fake), strict=True):
                assert a == b, (op, tokens, n, k)


def _layouts(result: Any) -> list[tuple[Any, ...]]:
    parts = [result] if isinstance(result, Tensor) else list(result)
    return [(p.shape, p.dtype, p.device.type, p.stride(), p.storage_offset()) for p in parts]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_opcheck(layout: str | None, device: str) -> None:
    q = weight(layout=layout).to(device)
    x = torch.randn(8, 384, device=device).bfloat16()
    ops: Any = torch.ops.ts_quant
    torch.library.opcheck(ops.fp8_rows.default, (x,))
    torch.library.opcheck(ops.fp8_groups.default, (x,))
    grouped = layout == "tile"
    codes, scale = fp8_groups(x) if grouped else fp8_rows(x)
    arguments = (
        codes,
        scale,
        *q.buffers(),
        layout is None,
        grouped,
        torch.randn(256, device=device).bfloat16(),
    )
    torch.library.opcheck(ops.fp8_linear.default, arguments)
