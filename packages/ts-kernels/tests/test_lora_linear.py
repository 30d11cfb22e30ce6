"""lora_linear, with plain, decoding and opaque base weights."""

from __future__ import annotations

import pytest
import torch

import ts_kernels
from ts_kernels import _lora_math, _split, reference
from ts_kernels.testing import assert_rounding_tier, compare_with_reference

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
IN, OUT = 37, 53


def inputs(shape=(3, 11), dtype=torch.float32, adapter=None, rank=5, bias=True):
    adapter = adapter or dtype
    x = torch.randn(*shape, IN).to(dtype).requires_grad_()
    weight = (torch.randn(OUT, IN) * IN**-0.5).to(dtype).requires_grad_()
    a = (torch.randn(rank, IN) * IN**-0.5).to(adapter).requires_grad_()
    b = torch.randn(OUT, rank).to(adapter).requires_grad_()
    return [x, weight, a, b, *([torch.randn(OUT).to(dtype).requires_grad_()] if bias else [])]


def with_scaling(function, scaling=0.7):
    return lambda x, weight, a, b, bias=None: function(x, weight, a, b, scaling, bias)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(19,), (3, 11), (0,), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("rank", [1, 5, 60])
@pytest.mark.parametrize("bias", [True, False])
def test_against_float64(dtype, shape, rank, bias):
    given = inputs(shape, dtype, rank=rank, bias=bias)
    compare_with_reference(
        with_scaling(ts_kernels.lora_linear),
        with_scaling(reference.lora_linear),
        given,
        [torch.randn(*shape, OUT)],
    )


@pytest.mark.parametrize(
    "dtype, adapter",
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.bfloat16),
    ],
)
def test_adapters_of_another_dtype(dtype, adapter):
    """Gradients of float32 adapters have float32's precision."""
    shape = (3, 11)
    compare_with_reference(
        with_scaling(ts_kernels.lora_linear),
        with_scaling(reference.lora_linear),
        inputs(shape, dtype, adapter),
        [torch.randn(*shape, OUT)],
    )


def run(function, given, dy, **kw):
    x, weight, a, b, *bias = given
    y = function(x, weight, a, b, 0.7, *bias)
    wanted = [t for t in given if t.requires_grad]
    return [y, *torch.autograd.grad(y, wanted, dy.to(y.dtype))]


@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_autocast(adapter, x_dtype):
    given = inputs(dtype=x_dtype, adapter=adapter)
    dy = torch.randn(3, 11, OUT)
    with torch.autocast("cpu", torch.bfloat16):
        x, weight, a, b, bias = given
        ours = ts_kernels.lora_linear(x, weight, a, b, 0.7, bias)
        plain = reference.lora_linear(x, weight, a, b, 0.7, bias)
    assert ours.dtype == plain.dtype == torch.bfloat16
    wide = [t.detach().double().requires_grad_() for t in given]
    x64, weight64, a64, b64, bias64 = wide
    exact = reference.lora_linear(x64, weight64, a64, b64, 0.7, bias64)
    assert_rounding_tier(ours, plain, exact)
    for ours_grad, plain_grad, exact_grad in zip(
        torch.autograd.grad(ours, given, dy.bfloat16()),
        torch.autograd.grad(plain, given, dy.bfloat16()),
        torch.autograd.grad(exact, wide, dy.bfloat16().double()),
        strict=True,
    ):
        assert ours_grad.dtype == plain_grad.dtype
        assert_rounding_tier(ours_grad, plain_grad, exact_grad)


def decodable(six_bit):
    """The stand-in with a `dequantize()` of its own, as quantized weights have."""

    class Decodable(type(six_bit)):
        def dequantize(self):
            return self.dense()

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.nn.functional.linear and not torch.is_grad_enabled():
                with torch._C.DisableTorchFunctionSubclass():
                    return func(args[0], args[1].dense(), *args[2:])
            return super().__torch_function__(func, types, args, kwargs or {})

    return Decodable(six_bit.codes, six_bit.scale, six_bit.dtype)


@pytest.mark.parametrize("kind", ["opaque", "decodable"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_quantized_base(quantized, kind, bias, adapter, autocast):
    """As the same function on the decoded weight, bit for bit."""
    x, weight, a, b, *rest = inputs(dtype=torch.bfloat16, adapter=adapter, bias=bias)
    held = quantized(weight.detach())
    if kind == "decodable":
        held = decodable(held)
    dense = held.dense()
    held.decoded = 0
    dy = torch.randn(3, 11, OUT)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = ts_kernels.lora_linear(x, held, a, b, 0.7, *rest)
        expected = ts_kernels.lora_linear(x, dense, a, b, 0.7, *rest)
    assert torch.equal(y, expected)
    wanted = [x, a, b, *rest]
    ours = torch.autograd.grad(y, wanted, dy.bfloat16())
    assert held.decoded == 2
    assert all(map(torch.equal, ours, torch.autograd.grad(expected, wanted, dy.bfloat16())))


@pytest.mark.parametrize("autocast", [False, True])
def test_a_base_that_has_a_gradient_of_its_own_is_asked_for_it(quantized, autocast):
    """And not decoded; for its forward product `F.linear` is asked as before."""
    x, weight, a, b, bias = inputs(dtype=torch.bfloat16, adapter=torch.float32)
    base = decodable(quantized(weight.detach()))
    asked = []

    class Offering(type(base)):
        def input_gradient(self, dy):
            asked.append((dy.shape, dy.dtype))
            return dy @ (3 * self.codes * self.scale).to(dy.dtype)

    held = Offering(base.codes, base.scale, base.dtype)
    dense, thrice = held.dense(), (3 * held.codes * held.scale).bfloat16()
    held.decoded = 0
    dy = torch.randn(3, 11, OUT).bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = ts_kernels.lora_linear(x, held, a, b, 0.7, bias)
        expected = ts_kernels.lora_linear(x, dense, a, b, 0.7, bias)
        as_if = ts_kernels.lora_linear(x, thrice, a, b, 0.7, bias)
    assert torch.equal(y, expected)
    ours = torch.autograd.grad(y, [x, a, b, bias], dy)
    assert held.decoded == 1 and asked == [((33, OUT), torch.bfloat16)]
    assert torch.equal(ours[0], torch.autograd.grad(as_if, x, dy)[0])
    assert all(map(torch.equal, ours[1:], torch.autograd.grad(expected, [a, b, bias], dy)))
    y = ts_kernels.lora_linear(x, held, a, b)
    torch.autograd.graph.increment_version(held)
    with pytest.raises(RuntimeError, match="modified in place between forward and backward"):
        y.sum().backward()
    ts_kernels.lora_linear(x.detach(), held, a, b).sum().backward()
    assert len(asked) == 1


def test_buffers_of_a_quantized_base_may_move_between_forward_and_backward(quantized):
    x, weight, a, b = inputs(bias=False)
    for held in (quantized(weight.detach()), decodable(quantized(weight.detach()))):
        dense = held.dense()
        y = ts_kernels.lora_linear(x, held, a, b)
        old = held.codes
        held.codes = old.clone()
        old.zero_()
        (dx,) = torch.autograd.grad(y.sum(), x)
        (expected,) = torch.autograd.grad(reference.lora_linear(x, dense, a, b).sum(), x)
        torch.testing.assert_close(dx, expected)


def test_a_base_weight_changed_before_backward_is_refused(quantized):
    x, weight, a, b = inputs(bias=False)
    held = decodable(quantized(weight.detach()))
    y = ts_kernels.lora_linear(x, held, a, b)
    torch.autograd.graph.increment_version(held)
    with pytest.raises(RuntimeError, match="modified in place between forward and backward"):
        y.sum().backward()
    plain = weight.detach().clone()
    y = ts_kernels.lora_linear(x, plain, a, b)
    plain.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_frozen_input_costs_no_decoding(quantized):
    x, weight, a, b = inputs(bias=False)
    held = quantized(weight.detach())
    ts_kernels.lora_linear(x.detach(), held, a, b).sum().backward()
    assert held.decoded == 1 and a.grad is not None and x.grad is None


def test_what_is_kept_for_backward():
    """x as it is, and [rows, rank]: no copy of x in the adapter's dtype."""
    x, weight, a, b = inputs((64,), torch.bfloat16, torch.float32, rank=5, bias=False)
    weight = weight.detach()
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = ts_kernels.lora_linear(x, weight, a, b, 2.0)
    given = {t.untyped_storage().data_ptr() for t in (x, weight, a, b)}
    assert sum(n for p, n in kept.items() if p not in given) == 64 * 5 * 4
    assert given <= set(kept) and y.requires_grad


def test_frozen_parts_get_no_gradient():
    given = inputs()
    dy = torch.randn(3, 11, OUT)
    full = run(ts_kernels.lora_linear, given, dy)
    for frozen in range(5):
        some = [t.detach() if i == frozen else t for i, t in enumerate(given)]
        expected = [t for i, t in enumerate(full) if i != frozen + 1]
        assert all(map(torch.equal, expected, run(ts_kernels.lora_linear, some, dy)))
    with torch.no_grad():
        assert torch.equal(with_scaling(ts_kernels.lora_linear)(*given), full[0])


def test_strides():
    for make in (lambda: torch.randn(IN, 6).t(), lambda: torch.randn(4, 5, IN).transpose(0, 1)):
        x = make().requires_grad_()
        _, weight, a, b = inputs(bias=False)
        dy = torch.randn(OUT).expand(*x.shape[:-1], OUT)
        ours = run(ts_kernels.lora_linear, [x, weight, a, b], dy)
        plain = run(reference.lora_linear, [x, weight, a, b], dy)
        torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("adapter", [torch.float32, torch.bfloat16])
def test_compiled_without_a_graph_break(adapter):
    given = inputs(dtype=torch.bfloat16, adapter=adapter)
    function = with_scaling(ts_kernels.lora_linear)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    dy = torch.randn(3, 11, OUT).bfloat16()
    results = []
    for each in (function, compiled):
        y = each(*given)
        results.append([y, *torch.autograd.grad(y, given, dy)])
    assert all(map(torch.equal, *results))


def test_opcheck():
    for dtype, adapter in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32)):
        x, weight, a, b, bias = inputs(dtype=dtype, adapter=adapter)
        torch.library.opcheck(
            torch.ops.ts_kernels.lora_linear.default,
            (x, weight, bias, a, b, 0.5, dtype, adapter),
        )


def test_gradcheck_and_second_derivative():
    given = [t.detach().double().requires_grad_() for t in inputs((2,), rank=2)]
    function = with_scaling(ts_kernels.lora_linear)
    assert torch.autograd.gradcheck(function, given)
    (dx,) = torch.autograd.grad(function(*given).sum(), given[0], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"ts_kernels\.reference\.lora_linear"):
        dx.sum().backward()


def test_split_products_hold_the_rounding_tier(monkeypatch):
    """The way CUDA goes for float32 adapters on a bfloat16 layer, here in PyTorch."""
    calls = []

    def uses(x, dtype):
        calls.append(x.dtype)
        return x.dtype == torch.bfloat16 and dtype == torch.float32

    monkeypatch.setattr(_lora_math, "uses_split", uses)
    for scale in (1.0, 50.0):  # the adapter's part may be the larger one
        given = inputs((4, 29), torch.bfloat16, torch.float32, rank=8)
        given[3] = (given[3].detach() * scale).requires_grad_()
        compare_with_reference(
            with_scaling(ts_kernels.lora_linear, 2.0),
            with_scaling(reference.lora_linear, 2.0),
            given,
            [torch.randn(4, 29, OUT)],
            check=tier_with_sixteen_bits,
        )
    assert torch.bfloat16 in calls


def tier_with_sixteen_bits(actual, plain, exact, what):
    if actual.dtype == torch.float32:  # gradients of A and B: 16 bits of each factor
        assert (actual.double() - exact).abs().max() <= 2**-14 * exact.abs().max(), what
    else:
        assert_rounding_tier(actual, plain, exact, what)


def test_split_in_pytorch():
    matrix = torch.randn(7, 131)
    for function, dim in ((_split.factor_rows, 0), (_split.factor_columns, 1)):
        high, again, low = function(matrix).float().chunk(3, dim)
        assert torch.equal(high, matrix.bfloat16().float()) and torch.equal(high, again)
        assert ((high + low) - matrix).abs().max() <= 2**-16 * matrix.abs().max()
    assert _split.merge_and_split(torch.ones(3, 2), 0.5).tolist() == [[1.0, 0.0, 1.0]] * 3


def test_bad_arguments_are_named():
    x, weight, a, b, bias = inputs()
    with pytest.raises(ValueError, match=r"lora_a \(5, 36\).*expected \[\.\.\., in\]"):
        ts_kernels.lora_linear(x, weight, a[:, :-1], b)
    with pytest.raises(ValueError, match="r of at least 1"):
        ts_kernels.lora_linear(x, weight, a[:0], b[:, :0])
    with pytest.raises(ValueError, match=r"bias has shape \(52,\)"):
        ts_kernels.lora_linear(x, weight, a, b, 1.0, bias[:-1])
    with pytest.raises(ValueError, match="one dtype for lora_a and lora_b"):
        ts_kernels.lora_linear(x, weight, a, b.double())
    with pytest.raises(ValueError, match="expected one dtype"):
        ts_kernels.lora_linear(x, weight.double(), a, b)
