"""add_rms_norm, rotary, gated_mlp, lora_linear and the patches on a CUDA device."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ts_kernels
from ts_kernels import _gated_mlp, _rms_norm_launch, _rotary, _split, reference
from ts_kernels.testing import assert_rounding_tier, compare_with_reference

pytestmark = pytest.mark.gpu

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


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
def launched(monkeypatch):
    """Names of the kernels that ran, so that no test passes by taking the PyTorch path."""
    names = []
    for module, name in (
        (_rms_norm_launch, "_launch_forward"),
        (_rms_norm_launch, "_launch_backward"),
        (_gated_mlp, "_launch_forward"),
        (_gated_mlp, "_launch_backward"),
        (_rotary, "_launch"),
    ):
        launch = getattr(module, name)

        def spy(*args, launch=launch, name=f"{module.__name__}.{name}"):
            names.append(name)
            return launch(*args)

        monkeypatch.setattr(module, name, spy)
    return names


def tensor(*shape, dtype=torch.float32, scale=1.0):
    return (scale * torch.randn(shape, device="cuda")).to(dtype).requires_grad_()


def norm_case(shape, dtype, offset=0.0, round_first=True):
    kw = {"offset": offset, "round_first": round_first}
    return (
        lambda x, w: ts_kernels.rms_norm(x, w, 1e-5, **kw),
        lambda x, w: reference.rms_norm(x, w, 1e-5, **kw),
        [tensor(*shape, dtype=dtype), tensor(shape[-1], dtype=dtype)],
        [torch.randn(shape, device="cuda")],
    )


def add_norm_case(shape, dtype, offset=0.0, round_first=True):
    kw = {"offset": offset, "round_first": round_first}
    x, r = tensor(*shape, dtype=dtype), tensor(*shape, dtype=dtype)
    return (
        lambda x, r, w: ts_kernels.add_rms_norm(x, r, w, 1e-5, **kw),
        lambda x, r, w: reference.add_rms_norm(x, r, w, 1e-5, **kw),
        [x, r, tensor(shape[-1], dtype=dtype)],
        [torch.randn(shape, device="cuda") for _ in range(2)],
    )


def gate_case(shape, dtype, activation="silu"):
    return (
        lambda g, u: ts_kernels.gated_mlp(g, u, activation),
        lambda g, u: reference.gated_mlp(g, u, activation),
        [tensor(*shape, dtype=dtype, scale=2.0) for _ in range(2)],
        [torch.randn(shape, device="cuda")],
    )


def rotary_case(shape, dtype, rotary_size, interleaved=False, kv_heads=2):
    """q and k as views of [batch, tokens, heads, size], as models have them."""
    batch, heads, tokens, size = shape
    q, k = (
        tensor(batch, tokens, n, size, dtype=dtype).detach().transpose(1, 2).requires_grad_()
        for n in (heads, kv_heads)
    )
    angles = torch.randn(batch, tokens, rotary_size, device="cuda")
    cos, sin = angles.cos().to(dtype), (angles + 0.1).sin().to(dtype)

    def run(function):
        return lambda q, k: function(
            q, k, cos.to(q.dtype), sin.to(q.dtype), interleaved=interleaved
        )

    upstream = [torch.randn(t.shape, device="cuda") for t in (q, k)]
    return run(ts_kernels.rotary), run(reference.rotary), [q, k], upstream


def lora_case(rows, inner, outer, dtype, adapter, rank=16, bias=True):
    def run(function):
        return lambda x, w, a, b, bias=None: function(x, w, a, b, 0.7, bias)

    given = [
        tensor(*rows, inner, dtype=dtype),
        tensor(outer, inner, dtype=dtype, scale=inner**-0.5),
        tensor(rank, inner, dtype=adapter, scale=inner**-0.5),
        tensor(outer, rank, dtype=adapter),
        *([tensor(outer, dtype=dtype)] if bias else []),
    ]
    upstream = [torch.randn(*rows, outer, device="cuda")]
    return run(ts_kernels.lora_linear), run(reference.lora_linear), given, upstream


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("form", [(0.0, True), (1.0, False), (0.0, False)], ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 577), (37, 5120), (1031, 8192), (0, 64)], ids=str)
def test_norms_against_float64(cuda, launched, dtype, form, shape):
    compare_with_reference(*norm_case(shape, dtype, *form))
    compare_with_reference(*add_norm_case(shape, dtype, *form))
    assert len(launched) == (4 if shape[0] else 0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("shape", [(3, 5, 577), (37, 13824), (0, 64)], ids=str)
def test_gated_mlp_against_float64(cuda, launched, dtype, activation, shape):
    compare_with_reference(*gate_case(shape, dtype, activation))
    assert len(launched) == (2 if shape[0] else 0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "shape, rotary_size",
    [((2, 40, 37, 128), 128), ((1, 5, 11, 80), 20), ((3, 1, 7, 256), 256), ((1, 3, 2, 6), 6)],
    ids=str,
)
def test_rotary_against_float64(cuda, launched, dtype, interleaved, shape, rotary_size):
    compare_with_reference(*rotary_case(shape, dtype, rotary_size, interleaved))
    assert len(launched) == 2


@pytest.mark.parametrize(
    "dtype, adapter",
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float16, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows, rank", [((2, 129), 16), ((7,), 5), ((0,), 8)], ids=str)
def test_lora_linear_against_float64(cuda, dtype, adapter, rows, rank):
    compare_with_reference(*lora_case(rows, 328, 184, dtype, adapter, rank))


@pytest.mark.parametrize("rows, rank", [((2, 129), 16), ((7,), 5), ((0,), 8)], ids=str)
def test_float32_adapters_on_bfloat16_layers(cuda, rows, rank):
    """y, dx and dbias in the rounding tier; dA and dB with 16 bits."""

    def check(actual, plain, exact, what):
        if actual.dtype == torch.float32 and exact.numel():
            assert (actual.double() - exact).abs().max() <= 2**-14 * exact.abs().max(), what
        else:
            assert_rounding_tier(actual, plain, exact, what)

    case = lora_case(rows, 328, 184, torch.bfloat16, torch.float32, rank)
    compare_with_reference(*case, check=check)


def test_split_equals_its_pytorch_version(cuda):
    matrix = torch.randn(37, 131, device=cuda)
    for function in (_split.factor_rows, _split.factor_columns):
        assert torch.equal(function(matrix).cpu(), function(matrix.cpu()))
    ours = _split.merge_and_split(matrix[:, :130], 0.37)
    assert torch.equal(ours.cpu(), _split.merge_and_split(matrix[:, :130].cpu(), 0.37))


@pytest.mark.parametrize("hidden", [128, 576, 4096, 5120])
@pytest.mark.parametrize("form", [(0.0, True), (1.0, False), (0.0, False)], ids=str)
def test_norms_equal_the_formula_bit_for_bit(cuda, hidden, form):
    for case in (norm_case, add_norm_case):
        function, plain, inputs, _ = case((513, hidden), torch.bfloat16, *form)
        for a, e in zip(as_tuple(function(*inputs)), as_tuple(plain(*inputs)), strict=True):
            assert torch.equal(a, e)


def cases():
    bf16 = torch.bfloat16
    return {
        "rms_norm": norm_case((512, 576), bf16, 1.0, False),
        "add_rms_norm": add_norm_case((512, 576), bf16),
        "gated_mlp": gate_case((512, 1536), bf16),
        "rotary": rotary_case((1, 9, 512, 64), bf16, 64),
        "lora_linear": lora_case((512,), 576, 1536, bf16, bf16, bias=False),
        "lora_linear, float32": lora_case((512,), 576, 1536, bf16, torch.float32),
    }


NAMES = [
    "rms_norm",
    "add_rms_norm",
    "gated_mlp",
    "rotary",
    "lora_linear",
    "lora_linear, float32",
]


def step(function, inputs, upstream):
    outs = as_tuple(function(*inputs))
    ups = [u.to(o.dtype) for u, o in zip(upstream, outs, strict=True)]
    return [o.detach() for o in outs] + list(torch.autograd.grad(outs, inputs, ups))


@pytest.mark.parametrize("name", NAMES)
def test_the_same_call_gives_the_same_bits(cuda, name):
    function, _, inputs, upstream = cases()[name]
    first = step(function, inputs, upstream)
    for _ in range(5):
        assert all(map(torch.equal, first, step(function, inputs, upstream)))


@pytest.mark.parametrize("name", NAMES)
def test_in_a_cuda_graph(cuda, name):
    function, _, inputs, upstream = cases()[name]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(function, inputs, upstream)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(function, inputs, upstream)
    with torch.no_grad():
        for given in inputs:
            given.copy_(torch.randn_like(given))
    graph.replay()
    assert all(map(torch.equal, captured, step(function, inputs, upstream)))


@pytest.mark.filterwarnings("ignore")  # inductor's own, which differ by version
@pytest.mark.parametrize("name", NAMES)
def test_compiled_by_inductor(cuda, name):
    function, _, inputs, upstream = cases()[name]
    compiled = torch.compile(function, fullgraph=True)
    ours, plain = step(compiled, inputs, upstream), step(function, inputs, upstream)
    assert all(map(torch.equal, ours, plain))


def test_the_host_never_waits(cuda):
    prepared = cases()
    for function, _, inputs, upstream in prepared.values():
        step(function, inputs, upstream)  # compiles
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        for function, _, inputs, upstream in prepared.values():
            step(function, inputs, upstream)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_strides(cuda):
    both = torch.randn(5, 37, 2 * 576, device=cuda, dtype=torch.bfloat16)
    gate, up = (t.detach().requires_grad_() for t in both.chunk(2, -1))
    dense = [t.detach().contiguous().requires_grad_() for t in (gate, up)]
    dout = torch.randn(37, 5, 576, device=cuda, dtype=torch.bfloat16).transpose(0, 1)
    ours = ts_kernels.gated_mlp(gate, up)
    plain = ts_kernels.gated_mlp(*dense)
    assert torch.equal(ours, plain)
    grads = torch.autograd.grad(ours, (gate, up), dout)
    assert all(map(torch.equal, grads, torch.autograd.grad(plain, dense, dout.contiguous())))
    x = torch.randn(64, 3 * 576, device=cuda, dtype=torch.bfloat16)[:, 576:1152]
    weight = torch.randn(576, device=cuda, dtype=torch.bfloat16)
    for residual in (
        x.flip(0),
        torch.randn(576, 64, device=cuda).bfloat16().t(),
        x[:1].expand(64, -1),
    ):
        ours = ts_kernels.add_rms_norm(x, residual, weight, 1e-5)
        plain = ts_kernels.add_rms_norm(x.contiguous(), residual.contiguous(), weight, 1e-5)
        assert all(map(torch.equal, ours, plain))
    q = torch.randn(2, 64, 3, 37, device=cuda).transpose(1, 3)  # channels apart in memory
    cos, sin = torch.randn(2, 64, 37, device=cuda).transpose(1, 2)
    heads = q.transpose(1, 2)
    ours = ts_kernels.rotary(heads, heads, cos, sin)
    torch.testing.assert_close(ours, reference.rotary(heads, heads, cos, sin))


def test_lora_keeps_no_copy_of_its_input(cuda):
    rows, width, rank = 8192, 4096, 16
    weight = torch.randn(width, width, device=cuda, dtype=torch.bfloat16) * width**-0.5
    a, b = tensor(rank, width), tensor(width, rank)
    x = tensor(rows, width, dtype=torch.bfloat16)
    ts_kernels.lora_linear(x, weight, a, b)  # allocates the matmul library's workspace
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = ts_kernels.lora_linear(x, weight, a, b)
    kept = torch.cuda.memory_allocated() - before - y.numel() * 2
    peak = torch.cuda.max_memory_allocated() - before - y.numel() * 2
    assert kept <= 2 * rows * rank * 4 + 2**20
    assert peak <= rows * width  # half of a bfloat16 copy of x


class Decoded(torch.Tensor):
    """A frozen weight of another format: int8 codes, decoded by `dequantize()`."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=torch.bfloat16, device=codes.device
        )

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def dequantize(self):
        return (self.codes * self.scale).to(torch.bfloat16)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is F.linear:
            return func(args[0], args[1].dequantize(), *args[2:], **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise AssertionError(f"{func} was called on a quantized weight")


def test_lora_on_a_decoded_weight_in_a_cuda_graph(cuda):
    codes = torch.randint(-31, 32, (1536, 576), device=cuda, dtype=torch.int8)
    weight = Decoded(codes, torch.tensor(0.002, device=cuda))
    dense = weight.dequantize()
    _, _, (x, _, a, b), (dy,) = lora_case(
        (512,), 576, 1536, torch.bfloat16, torch.float32, bias=False
    )

    def run(weight):
        y = ts_kernels.lora_linear(x, weight, a, b, 0.5)
        return [y.detach(), *torch.autograd.grad(y, (x, a, b), dy.bfloat16())]

    expected = run(dense)
    assert all(map(torch.equal, run(weight), expected))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run(weight)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(weight)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    assert all(map(torch.equal, captured, run(dense)))


@pytest.mark.parametrize("dtype, adapter", [(torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("chunk_size", [100, 1024])
@pytest.mark.parametrize("train_weight", [True, False])
def test_cross_entropy_with_an_adapter_on_the_output_layer(
    cuda, dtype, adapter, chunk_size, train_weight
):
    rows, classes, width, rank = 513, 32003, 128, 8
    targets = torch.randint(0, classes, (rows,), device=cuda)
    targets[::3] = -100
    weight = tensor(classes, width, dtype=dtype, scale=width**-0.5)
    given = [
        tensor(rows, width, dtype=dtype),
        tensor(rank, width, dtype=adapter, scale=width**-0.5),
        tensor(classes, rank, dtype=adapter),
        *([weight] if train_weight else []),
    ]

    def run(function, **kw):
        def loss(hidden, a, b, head=None):
            if head is None:
                head = weight.detach().to(hidden.dtype)
            lora = ts_kernels.LoraAdapter(a, b, 0.7)
            return function(hidden, head, targets, lora=lora, **kw)

        return loss

    def check(actual, plain, exact, what):  # of one number the error may be small by luck
        if exact.dim():
            assert_rounding_tier(actual, plain, exact, what)
        else:
            assert (actual - exact).abs() <= 2**-12 * exact.abs(), what

    compare_with_reference(
        run(ts_kernels.chunked_cross_entropy, chunk_size=chunk_size),
        run(reference.chunked_cross_entropy),
        given,
        [torch.tensor(3.0, device=cuda)],
        check,
    )


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.variance_epsilon = 1e-6

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * h.to(x.dtype)


class MLP(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, inner), nn.Linear(width, inner)
        self.down_proj, self.act_fn = nn.Linear(inner, width), nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("width", [576, 577])
def test_patched_blocks(cuda, launched, width):
    block = nn.Sequential(Norm(width), MLP(width, 1536)).to(cuda, torch.bfloat16)
    x = tensor(3, 129, width, dtype=torch.bfloat16)
    plain = block(x)
    grads = torch.autograd.grad(plain.float().square().sum(), [x, *block.parameters()])
    events = []
    handle = ts_kernels.patch_blocks([block], on_event=events.append)
    assert handle.replaced == {"RMSNorm": 1, "gated MLP": 1}, events
    launched.clear()
    ours = block(x)
    found = torch.autograd.grad(ours.float().square().sum(), [x, *block.parameters()])
    assert len(launched) == 4
    for a, e in zip((ours, *found), (plain, *grads), strict=True):
        assert (a - e).norm() <= 2e-2 * e.norm()
    handle.undo()
    assert torch.equal(block(x), plain)


def test_indices_beyond_32_bits(cuda):
    free, _ = torch.cuda.mem_get_info()
    if free < 40 * 2**30:
        pytest.skip(f"needs 40 GiB of free device memory, {free / 2**30:.0f} GiB are free")
    rows = 2**17 + 1
    part = torch.randn(4, 2 * 16384, device=cuda, dtype=torch.bfloat16)
    wide = part.repeat(-(-rows // 4), 1)[:rows]
    gate, up = wide.chunk(2, -1)
    assert wide.numel() > 2**32
    out = ts_kernels.gated_mlp(gate, up)
    assert torch.equal(out[-5:-1], out[-9:-5]) and torch.equal(out[:4], out[-5:-1])
    del wide, gate, up, out
    q = torch.randn(1, 4, 1, 128, device=cuda, dtype=torch.bfloat16).expand(1, 4, 2**23 + 5, 128)
    tables = torch.randn(1, 128, device=cuda, dtype=torch.bfloat16).expand(2**23 + 5, 128)
    ours, _ = ts_kernels.rotary(q, q[:, :1], tables, tables)
    assert ours.numel() > 2**32
    assert torch.equal(ours[:, :, :1], ours[:, :, -1:])


def as_tuple(out):
    return out if isinstance(out, tuple) else (out,)
