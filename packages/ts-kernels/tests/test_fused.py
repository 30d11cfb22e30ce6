"""add_rms_norm, the variants of rms_norm, gated_mlp and rotary, in their PyTorch versions."""

from __future__ import annotations

import pytest
import torch

import ts_kernels
from ts_kernels import reference
from ts_kernels.testing import compare_with_reference

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FORMS = [(0.0, True), (1.0, False), (0.0, False), (1.0, True)]


def norm_case(shape, dtype, offset, round_first):
    kw = {"offset": offset, "round_first": round_first}
    x = torch.randn(shape).to(dtype).requires_grad_()
    w = torch.randn(shape[-1]).to(dtype).requires_grad_()
    return (
        lambda x, w: ts_kernels.rms_norm(x, w, 1e-5, **kw),
        lambda x, w: reference.rms_norm(x, w, 1e-5, **kw),
        [x, w],
        [torch.randn(shape)],
    )


def add_norm_case(shape, dtype, offset, round_first):
    kw = {"offset": offset, "round_first": round_first}
    x, r = (torch.randn(shape).to(dtype).requires_grad_() for _ in range(2))
    w = torch.randn(shape[-1]).to(dtype).requires_grad_()
    return (
        lambda x, r, w: ts_kernels.add_rms_norm(x, r, w, 1e-5, **kw),
        lambda x, r, w: reference.add_rms_norm(x, r, w, 1e-5, **kw),
        [x, r, w],
        [torch.randn(shape), torch.randn(shape)],
    )


def gate_case(shape, dtype, activation):
    return (
        lambda g, u: ts_kernels.gated_mlp(g, u, activation),
        lambda g, u: reference.gated_mlp(g, u, activation),
        [(2 * torch.randn(shape)).to(dtype).requires_grad_() for _ in range(2)],
        [torch.randn(shape)],
    )


def rotary_case(shape, dtype, rotary_size, interleaved, heads_dim=1):
    batch, heads, tokens, size = shape
    q, k = (torch.randn(batch, n, tokens, size) for n in (heads, 2))
    if heads_dim == 2:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    q, k = q.to(dtype).requires_grad_(), k.to(dtype).requires_grad_()
    angles = torch.randn(tokens, rotary_size)
    cos, sin = angles.cos().to(dtype), (angles + 0.1).sin().to(dtype)
    kw = {"interleaved": interleaved, "heads_dim": heads_dim}
    return (
        lambda q, k: ts_kernels.rotary(q, k, cos.to(q.dtype), sin.to(q.dtype), **kw),
        lambda q, k: reference.rotary(q, k, cos.to(q.dtype), sin.to(q.dtype), **kw),
        [q, k],
        [torch.randn(q.shape), torch.randn(k.shape)],
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(19,), (3, 5, 37), (0, 8), (11, 577)], ids=str)
@pytest.mark.parametrize("offset, round_first", FORMS)
@pytest.mark.parametrize("case", [norm_case, add_norm_case])
def test_norms(case, dtype, shape, offset, round_first):
    compare_with_reference(*case(shape, dtype, offset, round_first))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(19,), (3, 5, 37), (0, 8), (2, 4099)], ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_mlp(dtype, shape, activation):
    compare_with_reference(*gate_case(shape, dtype, activation))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "shape, rotary_size",
    [((2, 3, 5, 6), 6), ((1, 7, 11, 34), 10), ((0, 2, 3, 4), 4), ((2, 3, 0, 4), 2)],
    ids=str,
)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("heads_dim", [1, 2])
def test_rotary(dtype, shape, rotary_size, interleaved, heads_dim):
    compare_with_reference(*rotary_case(shape, dtype, rotary_size, interleaved, heads_dim))


def test_norms_equal_the_formula_bit_for_bit():
    for dtype in FLOATS:
        for offset, round_first in FORMS:
            for case in (norm_case, add_norm_case):
                ours, plain, inputs, _ = case((7, 131), dtype, offset, round_first)
                for a, e in zip(as_tuple(ours(*inputs)), as_tuple(plain(*inputs)), strict=True):
                    assert torch.equal(a, e)


CASES = [
    norm_case((3, 37), torch.float32, 1.0, False),
    add_norm_case((3, 37), torch.bfloat16, 0.0, True),
    gate_case((3, 37), torch.float16, "gelu_tanh"),
    rotary_case((2, 3, 5, 8), torch.bfloat16, 6, True),
]
NAMES = ["rms_norm", "add_rms_norm", "gated_mlp", "rotary"]


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_compiled_without_a_graph_break_and_equal(case):
    function, _, inputs, upstream = case
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = []
    for run in (function, compiled):
        outs = as_tuple(run(*inputs))
        grads = torch.autograd.grad(outs, inputs, [u.to(o) for u, o in zip(upstream, outs)])  # noqa: B905
        results.append([*outs, *grads])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_the_same_call_gives_the_same_bits_and_a_frozen_input_no_gradient(case):
    function, _, inputs, upstream = case

    def run(given):
        outs = as_tuple(function(*given))
        wanted = [t for t in given if t.requires_grad]
        ups = [u.to(o) for u, o in zip(upstream, outs, strict=True)]
        return [*outs, *torch.autograd.grad(outs, wanted, ups)]

    first = run(inputs)
    assert all(map(torch.equal, first, run(inputs)))
    for frozen in range(len(inputs)):
        given = [t.detach() if i == frozen else t for i, t in enumerate(inputs)]
        expected = [t for i, t in enumerate(first) if i != len(first) - len(inputs) + frozen]
        assert all(map(torch.equal, expected, run(given)))
    with torch.no_grad():
        assert all(map(torch.equal, as_tuple(function(*inputs)), first))


def saved_bytes(function, inputs):
    """Storage bytes that autograd keeps, besides those of the inputs themselves."""
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outs = as_tuple(function(*inputs))
    given = {t.untyped_storage().data_ptr() for t in inputs}
    return sum(n for p, n in kept.items() if p not in given), outs


def test_what_is_kept_for_backward():
    rows, width = 8, 64
    function, _, inputs, _ = gate_case((rows, width), torch.bfloat16, "silu")
    assert saved_bytes(function, inputs)[0] == 0
    function, _, inputs, _ = add_norm_case((rows, width), torch.bfloat16, 0.0, True)
    assert saved_bytes(function, inputs)[0] == rows * width * 2 + rows * 4  # the sum, rstd
    function, _, (q, k), _ = rotary_case((2, 4, 8, 16), torch.bfloat16, 16, False)
    kept, _ = saved_bytes(function, (q, k))
    assert kept == 2 * 8 * 16 * 2  # cos and sin


def test_one_gradient_of_two_results_is_enough():
    function, plain, inputs, upstream = add_norm_case((3, 37), torch.float32, 0.0, True)
    for which in (0, 1):
        ours = torch.autograd.grad(
            function(*inputs)[which], inputs, upstream[which], allow_unused=True
        )
        expected = torch.autograd.grad(
            plain(*inputs)[which], inputs, upstream[which], allow_unused=True
        )
        for a, e in zip(ours, expected, strict=True):
            assert (a is None) == (e is None)
            if e is not None:
                torch.testing.assert_close(a, e)


def test_second_derivatives():
    function, _, inputs, _ = rotary_case((1, 2, 3, 4), torch.float64, 4, False)
    assert torch.autograd.gradgradcheck(function, inputs)
    function, _, inputs, _ = gate_case((3, 5), torch.float64, "silu")
    assert torch.autograd.gradcheck(function, inputs)
    (grad,) = torch.autograd.grad(function(*inputs).sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"ts_kernels\.reference\.gated_mlp"):
        grad.sum().backward()
    function, _, inputs, _ = add_norm_case((3, 5), torch.float64, 1.0, False)
    assert torch.autograd.gradcheck(function, inputs)
    (grad,) = torch.autograd.grad(function(*inputs)[0].sum(), inputs[0], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"ts_kernels\.reference\.add_rms_norm"):
        grad.sum().backward()


def test_opcheck():
    ops = torch.ops.ts_kernels
    x, r = (torch.randn(3, 37, requires_grad=True) for _ in range(2))
    w = torch.randn(37, requires_grad=True)
    q, k = torch.randn(1, 2, 3, 8, requires_grad=True), torch.randn(1, 1, 3, 8, requires_grad=True)
    angles = torch.randn(1, 3, 6)
    for op, args in (
        (ops.rms_norm, (x, w, 1e-5, 1.0, False)),
        (ops.add_rms_norm, (x, r, w, 1e-5, 0.0, True)),
        (ops.gated_mlp, (x, r, False)),
        (ops.rotary, (q, k, angles.cos(), angles.sin(), False, False)),
    ):
        torch.library.opcheck(op.default, args)


def test_the_meta_device_gives_shapes():
    x = torch.empty(2, 3, 8, device="meta", dtype=torch.bfloat16)
    assert ts_kernels.gated_mlp(x, x).shape == x.shape
    w = torch.empty(8, device="meta")
    y, s = ts_kernels.add_rms_norm(x, x, w, 1e-5)
    assert (y.dtype, s.dtype) == (torch.float32, torch.bfloat16)


def test_bad_arguments_are_named():
    x = torch.randn(2, 3, 8)
    with pytest.raises(ValueError, match="'relu'; expected one of silu, gelu_tanh"):
        ts_kernels.gated_mlp(x, x, "relu")
    with pytest.raises(ValueError, match=r"gate is \(2, 3, 8\).*expected the same shape"):
        ts_kernels.gated_mlp(x, x[:1])
    with pytest.raises(ValueError, match="floating"):
        ts_kernels.gated_mlp(x.long(), x.long())
    with pytest.raises(ValueError, match=r"residual \(1, 3, 8\).*Expand or convert"):
        ts_kernels.add_rms_norm(x, x[:1], torch.ones(8), 1e-5)
    with pytest.raises(ValueError, match=r"weight \(7,\)"):
        ts_kernels.add_rms_norm(x, x, torch.ones(7), 1e-5)
    q, tables = torch.randn(1, 2, 3, 8), torch.randn(3, 8)
    with pytest.raises(ValueError, match="heads_dim is 3"):
        ts_kernels.rotary(q, q, tables, tables, heads_dim=3)
    with pytest.raises(ValueError, match=r"expected \[B, H, T, D\]"):
        ts_kernels.rotary(q, q[0], tables, tables)
    with pytest.raises(ValueError, match="even R of at most 8"):
        ts_kernels.rotary(q, q, tables[:, :7], tables[:, :7])
    with pytest.raises(ValueError, match="T=3"):
        ts_kernels.rotary(q, q, tables[:2], tables[:2])
    with pytest.raises(ValueError, match="one floating dtype"):
        ts_kernels.rotary(q, q.double(), tables, tables)
    with pytest.raises(ValueError, match="Detach them"):
        ts_kernels.rotary(q, q, tables.requires_grad_(), tables)


def as_tuple(out):
    return out if isinstance(out, tuple) else (out,)
