"""patch_blocks on modules written here, as other libraries write theirs."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ts_kernels.patching import patch_blocks


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def other_rotary_pos_emb(q, k, cos, sin):
    """The other way round."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos - rotate_half(q) * sin, k * cos - rotate_half(k) * sin


class Norm(nn.Module):
    def __init__(self, width, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        self.eps = eps

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


class GemmaNorm(Norm):
    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return (h * (1.0 + self.weight.float())).type_as(x)


class MeanNorm(Norm):
    """A layer norm without bias: looks like an RMSNorm and is not one."""

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, None, self.eps)


class LateEpsNorm(Norm):
    """The epsilon outside the root."""

    def forward(self, x):
        h = x.float()
        h = h / (h.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)
        return self.weight * h.to(x.dtype)


class MLP(nn.Module):
    def __init__(self, width, inner, act=None):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.act_fn = act or nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class SwappedMLP(MLP):
    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


class ClampedMLP(MLP):
    def forward(self, x):
        gate = self.act_fn(self.gate_proj(x)).clamp(max=1.0)
        return self.down_proj(gate * self.up_proj(x))


class PeekingMLP(MLP):
    """Reads its weight, which the stand-ins of the check do not have."""

    def forward(self, x):
        return F.linear(x, self.gate_proj.weight)


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.head_dim = width // heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def split(self, x):
        return (
            t.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)
            for t in self.qkv(x).chunk(3, dim=-1)
        )

    def forward(self, x, tables, *, causal=True):
        q, k, v = self.split(x)
        q, k = apply_rotary_pos_emb(q, k, *tables)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class OtherAttention(Attention):
    def forward(self, x, tables):
        q, k, v = self.split(x)
        q, k = other_rotary_pos_emb(q, k, *tables)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    def __init__(self, width=32, heads=4, norm=Norm, mlp=MLP, attention=Attention):
        super().__init__()
        self.first_norm, self.second_norm = norm(width), norm(width)
        self.attention = attention(width, heads)
        self.mlp = mlp(width, 40)

    def forward(self, x, tables):
        x = x + self.attention(self.first_norm(x), tables)
        return x + self.mlp(self.second_norm(x))


def inputs(dtype=torch.float32, width=32, heads=4):
    angles = torch.randn(1, 7, width // heads // 2).repeat(1, 1, 2)
    x = torch.randn(2, 7, width).to(dtype).requires_grad_()
    return x, (angles.cos().to(dtype), angles.sin().to(dtype))


def run(block, x, tables):
    y = block(x, tables)
    return y, *torch.autograd.grad(y.square().sum(), [x, *block.parameters()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [Norm, GemmaNorm])
def test_a_block_is_replaced_and_restored(dtype, norm):
    block = Block(norm=norm).to(dtype)
    given = inputs(dtype)
    before = run(block, *given)
    events = []
    handle = patch_blocks([block], on_event=events.append)
    assert handle.replaced == {"RMSNorm": 2, "rotary": 1, "gated MLP": 1}
    assert len(events) == 1 and "RMSNorm in 2 " in events[0]
    after = run(block, *given)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for a, b in zip(after, before, strict=True):
        assert (a - b).norm() <= tolerance * b.norm()
    assert dtype == torch.float32 or not torch.equal(after[0], before[0])  # kernels did run
    handle.undo()
    assert all(map(torch.equal, run(block, *given), before))
    assert handle.replaced == {} and "forward" not in block.mlp.__dict__
    handle.undo()


DIFFERENT = [
    (MeanNorm(32), "MeanNorm keeps its own code (1 place): its own code gives other values"),
    (LateEpsNorm(32), "LateEpsNorm keeps its own code"),
    (SwappedMLP(32, 40), "SwappedMLP keeps its own code"),
    (ClampedMLP(32, 40), "ClampedMLP keeps its own code"),
    (MLP(32, 40, nn.ReLU()), "MLP keeps its own code"),
    (MLP(32, 40, nn.GELU()), "MLP keeps its own code"),  # the exact form, 5e-4 off the tanh form
    (PeekingMLP(32, 40), "fails in the check (AttributeError"),
    (OtherAttention(32, 4), "OtherAttention keeps its own code"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("module, event", DIFFERENT, ids=lambda value: type(value).__name__)
def test_what_differs_is_left_alone_and_said(module, event, dtype):
    module = copy.deepcopy(module).to(dtype)
    events = []
    handle = patch_blocks([module], on_event=events.append)
    assert handle.replaced == {} and "forward" not in module.__dict__
    assert len(events) == 2 and event in events[0]
    assert events[1].startswith("fused kernels: nothing known here as ")  # the two other kinds


def test_unknown_modules_are_left_alone_and_said():
    class RenamedMLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            return self.down(F.silu(self.gate(x)) * self.up(x))

    events = []
    blocks = [nn.Sequential(nn.Linear(4, 4), RenamedMLP(), nn.LayerNorm(4)) for _ in range(3)]
    assert patch_blocks(blocks, on_event=events.append).replaced == {}
    assert events == [
        "fused kernels: RenamedMLP keeps its own code (3 places): its structure is not one that "
        "is known here",
        "fused kernels: nothing known here as RMSNorm or rotary was found",
    ]
    assert patch_blocks([]).replaced == {}
    assert patch_blocks([nn.Identity()]).replaced == {}


def test_gelu_tanh_and_other_names():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj, self.down_proj = nn.Linear(8, 24), nn.Linear(12, 8)

        def forward(self, x):
            gate, up = self.gate_up_proj(x).chunk(2, -1)
            return self.down_proj(up * F.gelu(gate, approximate="tanh"))

    class Numbered(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1, self.w3, self.w2 = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)

        def forward(self, x):
            return self.w2(F.silu(self.w1(x)) * self.w3(x))

    x = torch.randn(3, 8)
    for module in (Packed(), Numbered(), MLP(8, 12, nn.GELU(approximate="tanh"))):
        expected = module(x)
        assert patch_blocks([module]).replaced == {"gated MLP": 1}
        torch.testing.assert_close(module(x), expected)


def test_weights_and_projections_are_looked_up_at_every_call():
    block = Block()
    patch_blocks([block])
    x, tables = inputs()
    with torch.no_grad():
        block.second_norm.weight.mul_(3)
        block.first_norm.eps = 0.5
    block.mlp.up_proj = nn.Linear(32, 40)
    calls = []
    block.mlp.gate_proj.register_forward_hook(lambda *args: calls.append(1))
    plain = copy.deepcopy(block)
    for module in plain.modules():
        module.__dict__.pop("forward", None)
    torch.testing.assert_close(block(x, tables), plain(x, tables))
    assert len(calls) == 2


def test_other_arguments_go_to_the_modules_own_code():
    block = Block()
    patch_blocks([block])
    x, tables = inputs()
    assert torch.equal(block.mlp(x=x), MLP.forward(block.mlp, x))
    assert torch.equal(block.first_norm(x=x), Norm.forward(block.first_norm, x))
    open_ended = block.attention(x, tables, causal=False)
    torch.testing.assert_close(
        open_ended, Attention.forward(block.attention, x, tables, causal=False)
    )
    wide = tuple(t.double() for t in tables)  # its own code gives float64 then: so must this
    expected = Attention.forward(block.attention.double(), x.double(), wide)
    assert torch.equal(block.attention(x.double(), wide), expected)


def test_an_instance_with_a_forward_of_its_own_is_left_alone():
    block = Block()
    own = block.mlp.forward
    block.mlp.forward = lambda x: own(x) * 2
    events = []
    handle = patch_blocks([block], on_event=events.append)
    assert "gated MLP" not in handle.replaced
    assert any("already" in event for event in events)
    again = patch_blocks([block])
    assert again.replaced == {}
    assert sum(handle.replaced.values()) == 3


def test_a_shared_module_is_replaced_once():
    norm = Norm(8)
    assert patch_blocks([nn.Sequential(norm), nn.Sequential(norm)]).replaced == {"RMSNorm": 1}


def test_copies_and_pickles_run_their_own_weights():
    block = Block()
    patch_blocks([block])
    x, tables = inputs()
    twin = copy.deepcopy(block)
    buffer = io.BytesIO()
    torch.save(block.first_norm, buffer)
    loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    assert torch.equal(twin(x, tables), block(x, tables))
    assert torch.equal(loaded(x), block.first_norm(x))
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
    assert twin(x, tables).ne(x).any() and loaded(x).ne(0).any()
    assert torch.equal(block(x, tables), x)


def test_a_model_that_is_dropped_is_freed_at_once():
    gc.disable()
    try:
        block = Block()
        patch_blocks([block])
        weight = weakref.ref(block.mlp.up_proj.weight)
        del block
        assert weight() is None
    finally:
        gc.enable()


def test_patching_draws_no_random_numbers_and_touches_no_parameter():
    block = Block()
    state = torch.get_rng_state()
    versions = [p._version for p in block.parameters()]
    hooked = []
    block.mlp.register_forward_hook(lambda *args: hooked.append(1))
    patch_blocks([block])
    assert torch.equal(torch.get_rng_state(), state)
    assert versions == [p._version for p in block.parameters()] and not hooked
    assert set(block.mlp._modules) == {"gate_proj", "up_proj", "down_proj", "act_fn"}


def test_blocks_on_the_meta_device_and_without_gradients():
    with torch.device("meta"):
        block = Block()
    assert sum(patch_blocks([block]).replaced.values()) == 4
    with torch.inference_mode():
        assert sum(patch_blocks([Block()]).replaced.values()) == 4


@pytest.mark.filterwarnings("ignore")  # dynamo's own, which differ by version
def test_compiled_without_a_graph_break():
    block = Block()
    patch_blocks([block])
    given = inputs()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    expected = block(*given)
    torch.testing.assert_close(compiled(*given), expected)


def test_activation_checkpointing_gives_the_same_gradients():
    from torch.utils.checkpoint import checkpoint

    block = Block()
    patch_blocks([block])
    x, tables = inputs()
    plain = run(block, x, tables)
    again = run_checkpointed = checkpoint(block, x, tables, use_reentrant=False)
    grads = torch.autograd.grad(run_checkpointed.square().sum(), [x, *block.parameters()])
    assert all(map(torch.equal, (again, *grads), plain))
