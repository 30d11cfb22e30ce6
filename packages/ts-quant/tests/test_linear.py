"""F.linear with a quantized weight equals F.linear with the decoded one, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ts_quant
from ts_quant import QuantTensor
from ts_quant.matmul import dispatch

MakeLinear = Callable[..., nn.Linear]
N_IN, N_OUT = 96, 80


@pytest.fixture(autouse=True)
def _without_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """These are tests of the layer that decodes; tests/matmul has the others."""
    monkeypatch.setattr(dispatch, "_supported", lambda device, kind: False)


@pytest.fixture(params=["nf4", "fp8"])
def codec(request: pytest.FixtureRequest) -> str:
    """What a layer does depends on the format only through decoding."""
    name: str = request.param
    return name


SHAPES = [(N_IN,), (1, N_IN), (7, N_IN), (0, N_IN), (3, 5, N_IN), (2, 0, N_IN), (2, 3, 4, N_IN)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def run(x: Tensor, weight: Tensor, bias: Tensor | None, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Output and gradients of x and bias."""
    x = x.detach().requires_grad_()
    bias = None if bias is None else bias.detach().requires_grad_()
    y = F.linear(x, weight, bias)
    y.backward(grad)
    return y.detach(), x.grad, None if bias is None else bias.grad


def assert_same(a: tuple[Tensor | None, ...], b: tuple[Tensor | None, ...]) -> None:
    for got, expected in zip(a, b, strict=True):
        if expected is None:
            assert got is None
        else:
            assert got is not None and got.dtype == expected.dtype
            assert got.stride() == expected.stride() and torch.equal(got, expected)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bit_equal_to_the_decoded_weight(
    codec: str, shape: tuple[int, ...], dtype: torch.dtype, with_bias: bool, device: str
) -> None:
    q = ts_quant.quantize(torch.randn(N_OUT, N_IN, device=device).to(dtype), codec)
    bias = torch.randn(N_OUT, device=device).to(dtype) if with_bias else None
    x = torch.randn(shape, device=device).to(dtype)
    grad = torch.randn(*shape[:-1], N_OUT, device=device).to(dtype)
    assert_same(run(x, q, bias, grad), run(x, q.dequantize(), bias, grad))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bit_equal_for_other_layouts(
    codec: str, dtype: torch.dtype, with_bias: bool, device: str
) -> None:
    q = ts_quant.quantize(torch.randn(N_OUT, N_IN).to(dtype), codec).to(device)
    bias = torch.randn(N_OUT).to(device, dtype) if with_bias else None
    inputs = [
        torch.randn(N_IN, 37).to(dtype).t(),  # column major: torch runs the transposed product
        torch.randn(74, N_IN).to(dtype)[::2],
        torch.randn(4, 6, 2 * N_IN).to(dtype)[..., :N_IN],
        torch.randn(1, N_IN).to(dtype).expand(9, N_IN),
        torch.randn(4, 6, N_IN).to(dtype),
    ]
    for x in (x.to(device) for x in inputs):  # a CPU stays as it is, strides included
        grad = torch.randn(*x.shape[:-1], N_OUT).to(device, dtype)
        grads = [grad, grad.new_ones(()).expand(grad.shape)]
        grads.append(grad.transpose(0, -2).contiguous().transpose(0, -2))
        grads.append(grad.transpose(0, -1).contiguous().transpose(0, -1))
        for grad in grads:
            assert_same(run(x, q, bias, grad), run(x, q.dequantize(), bias, grad))


@pytest.mark.parametrize("sizes", [(0, N_IN), (N_OUT, 0), (0, 0)])
def test_weights_without_rows_or_columns(codec: str, sizes: tuple[int, int]) -> None:
    q = ts_quant.quantize(torch.randn(sizes), codec)
    bias = torch.randn(sizes[0])
    for leading in ((), (4,), (0,), (2, 3)):
        x, grad = torch.randn(*leading, sizes[1]), torch.randn(*leading, sizes[0])
        assert_same(run(x, q, bias, grad), run(x, q.dequantize(), bias, grad))


def test_input_whose_leading_dimensions_do_not_flatten(codec: str) -> None:
    """Torch runs a batched product here without bias: equal within rounding."""
    q = ts_quant.quantize(torch.randn(N_OUT, N_IN), codec)
    x = torch.randn(5, 3, N_IN).transpose(0, 1)
    grad = torch.randn(3, 5, N_OUT)
    y, grad_x, _ = run(x, q, None, grad)
    y2, grad_x2, _ = run(x, q.dequantize(), None, grad)
    assert y is not None and y2 is not None and torch.equal(y, y2)
    torch.testing.assert_close(grad_x, grad_x2)
    bias = torch.randn(N_OUT)
    assert_close = torch.testing.assert_close
    for a, b in zip(run(x, q, bias, grad), run(x, q.dequantize(), bias, grad), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_autocast(codec: str, weight_dtype: torch.dtype, x_dtype: torch.dtype, device: str) -> None:
    w = torch.randn(N_OUT, N_IN, device=device).to(weight_dtype)
    q = ts_quant.quantize(w, codec)
    bias = torch.randn(N_OUT, device=device)
    x = torch.randn(3, 5, N_IN, device=device).to(x_dtype)
    for target in (torch.bfloat16, torch.float16):
        grad = torch.randn(3, 5, N_OUT, device=device).to(target)

        def autocast(weight: Tensor, target: torch.dtype = target, grad: Tensor = grad) -> object:
            leaf, leaf_bias = x.clone().requires_grad_(), bias.clone().requires_grad_()
            with torch.autocast(device, dtype=target):
                y = F.linear(leaf, weight, leaf_bias)
            y.backward(grad)
            assert y.dtype is target
            return y.detach(), leaf.grad, leaf_bias.grad

        assert_same(autocast(q), autocast(q.dequantize()))  # type: ignore[arg-type]
        with torch.autocast(device, dtype=target), torch.no_grad():
            assert torch.equal(F.linear(x, q, bias), F.linear(x, q.dequantize(), bias))
        with torch.autocast(device, enabled=False):
            assert F.linear(x.to(weight_dtype), q).dtype is weight_dtype


def test_what_torch_refuses_is_refused(codec: str) -> None:
    q = ts_quant.quantize(torch.randn(N_OUT, N_IN), codec)
    with pytest.raises(RuntimeError, match="dtype"):
        F.linear(torch.randn(2, N_IN).bfloat16(), q)
    with pytest.raises(RuntimeError, match="shape"):
        F.linear(torch.randn(2, N_IN + 1), q)


def test_other_ways_in(codec: str) -> None:
    q = ts_quant.quantize(torch.randn(N_OUT, N_IN), codec)
    w, x, bias = q.dequantize(), torch.randn(4, N_IN, requires_grad=True), torch.randn(N_OUT)
    expected = F.linear(x, w, bias)
    assert torch.equal(F.linear(input=x, weight=q, bias=bias), expected)
    assert torch.equal(F.linear(x, bias=bias, weight=q), expected)
    assert torch.equal(torch.ops.aten.linear(x, q, bias), expected)
    assert torch.equal(F.linear(q, w), F.linear(w, w))  # quantized on the other side
    row = ts_quant.quantize(torch.randn(N_IN), codec)
    assert torch.equal(F.linear(x, row), F.linear(x, row.dequantize()))  # 1-d weight
    with torch.inference_mode():
        assert torch.equal(F.linear(x, q, bias), expected)


@contextmanager
def saved_tensors() -> Iterator[list[Tensor]]:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def test_nothing_is_saved_for_backward(frozen: MakeLinear, codec: str) -> None:
    linear = frozen(N_IN, N_OUT, codec)
    x = torch.randn(4, N_IN, requires_grad=True)
    with saved_tensors() as saved:
        y = linear(x)
    assert saved == []
    y.sum().backward()
    with saved_tensors() as saved:  # the detector works
        nn.Linear(N_IN, N_OUT)(x)
    assert len(saved) >= 2


def test_no_full_precision_copy_outlives_the_call(
    frozen: MakeLinear, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gc
    import weakref

    made: list[weakref.ref[Tensor]] = []

    def watch(decode: Callable[[QuantTensor, torch.dtype], Tensor]) -> object:
        def watched(weight: QuantTensor, dtype: torch.dtype) -> Tensor:
            dense = decode(weight, dtype)
            made.append(weakref.ref(dense))
            return dense

        return watched

    for name in ("_decode", "_decode_again"):
        monkeypatch.setattr(ts_quant.linear, name, watch(getattr(ts_quant.linear, name)))
    linear = frozen(N_IN, N_OUT, codec)
    x = torch.randn(4, N_IN, requires_grad=True)
    y = linear(x)
    gc.collect()
    assert len(made) == 1 and made[0]() is None
    y.sum().backward()
    gc.collect()
    assert len(made) == 2 and made[1]() is None


def test_buffers_swapped_between_forward_and_backward(frozen: MakeLinear, codec: str) -> None:
    """What a pager does: the same bytes at other addresses, the old ones overwritten."""
    linear = frozen(N_IN, N_OUT, codec)
    x = torch.randn(4, N_IN, requires_grad=True)
    grad = torch.randn(4, N_OUT)
    expected = run(x, linear.weight.dequantize(), linear.bias, grad)

    def swap() -> None:
        for name in linear.weight.__tensor_flatten__()[0]:
            old = getattr(linear.weight, name)
            setattr(linear.weight, name, old.clone())
            old.fill_(77)

    swap()
    y = linear(x)
    swap()
    y.backward(grad)
    assert_same((y.detach(), x.grad, linear.bias.grad), expected)


def test_a_weight_loaded_between_forward_and_backward_is_noticed(
    frozen: MakeLinear, codec: str
) -> None:
    linear = frozen(N_IN, N_OUT, codec)
    y = linear(torch.randn(4, N_IN, requires_grad=True))
    with torch.no_grad():
        linear.weight.copy_(torch.randn(N_OUT, N_IN))
    with pytest.raises(RuntimeError, match="modified in place"):
        y.sum().backward()


def test_second_derivatives_are_refused_clearly(frozen: MakeLinear, codec: str) -> None:
    linear = frozen(N_IN, N_OUT, codec)
    x = torch.randn(4, N_IN, requires_grad=True)
    (grad,) = torch.autograd.grad(linear(x).square().sum(), x, create_graph=True)
    assert torch.equal(
        grad.detach(),
        torch.autograd.grad(linear(x).square().sum(), x)[0],
    )
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()


def test_only_what_needs_a_gradient_gets_one(frozen: MakeLinear, codec: str) -> None:
    linear = frozen(N_IN, N_OUT, codec)
    x = torch.randn(4, N_IN)
    linear(x).sum().backward()
    assert linear.bias.grad is not None and x.grad is None
    linear.bias.requires_grad_(False)
    assert not linear(x).requires_grad
    x.requires_grad_()
    linear(x).sum().backward()
    assert x.grad is not None and linear.weight.grad is None


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_under_checkpointing(
    frozen: MakeLinear,
    dense_twin: Callable[[nn.Module], nn.Module],
    codec: str,
    use_reentrant: bool,
) -> None:
    model = nn.Sequential(frozen(N_IN, N_OUT, codec), nn.SiLU(), frozen(N_OUT, N_IN, codec))
    twin = dense_twin(model)
    x = torch.randn(4, N_IN)
    results = []
    for part, wrapped in ((model, True), (model, False), (twin, False)):
        part.zero_grad()
        leaf = x.clone().requires_grad_()
        if wrapped:
            y = checkpoint(part, leaf, use_reentrant=use_reentrant)
        else:
            y = part(leaf)
        y.square().sum().backward()
        grads = [p.grad for p in part.parameters() if p.requires_grad]
        results.append([y.detach(), leaf.grad, *grads])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert a is not None and b is not None and torch.equal(a, b)


def test_a_training_run_equals_one_on_the_decoded_weights(
    frozen: MakeLinear, dense_twin: Callable[[nn.Module], nn.Module], codec: str
) -> None:
    model = nn.Sequential(
        nn.Linear(16, N_IN), frozen(N_IN, N_OUT, codec), nn.SiLU(), frozen(N_OUT, 8, codec)
    )
    twin = dense_twin(model)
    losses = []
    for part in (model, twin):
        trained = [p for p in part.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        torch.manual_seed(1)
        for _ in range(5):
            optimizer.zero_grad()
            loss = part(torch.randn(6, 16)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[:5] == losses[5:] and losses[0] != losses[4]
