"""patch_blocks on the model families of transformers."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ts_kernels.patching import patch_blocks

transformers = pytest.importorskip("transformers")

LAYERS = 2
COMMON = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Per layer: RMSNorm, rotary, gated MLP.
FAMILIES = {
    "Llama": (2, 1, 1),
    "Qwen2": (2, 1, 1),
    "Qwen3": (4, 1, 1),
    "Mistral": (2, 1, 1),
    "Gemma": (2, 1, 1),
    "Gemma2": (4, 1, 1),
    "Gemma3Text": (6, 1, 1),
    "GPTNeoX": (0, 1, 0),
    "Phi3": (2, 1, 1),
    "Glm4": (4, 1, 1),
    "Cohere": (0, 1, 1),
    "Olmo2": (4, 1, 1),
    "Qwen3Moe": (4, 1, 0),
    "SmolLM3": (2, 1, 1),
}


def tiny(family, dtype=torch.float32):
    settings = dict(COMMON)
    if family == "GPTNeoX":
        settings = {k: v for k, v in COMMON.items() if k not in ("head_dim", "num_key_value_heads")}
    if family == "Qwen3Moe":
        settings |= {"num_experts": 8, "moe_intermediate_size": 32}
    config = getattr(transformers, f"{family}Config")(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == LAYERS)
    return model, blocks


def run(model, ids):
    out = model(ids, labels=ids)
    wanted = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(out.loss, wanted, allow_unused=True)
    return [out.logits.detach(), *(g for g in grads if g is not None)]


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_family(family):
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    model, blocks = tiny(family)
    ids = torch.randint(3, 50, (2, 9))
    before = run(model, ids)
    handle = patch_blocks(blocks)
    norms, rotaries, mlps = (LAYERS * n for n in FAMILIES[family])
    expected = {"RMSNorm": norms, "rotary": rotaries, "gated MLP": mlps}
    assert handle.replaced == {kind: n for kind, n in expected.items() if n}
    for a, b in zip(run(model, ids), before, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm() + 1e-7
    handle.undo()
    assert all(map(torch.equal, run(model, ids), before))


@pytest.mark.parametrize("family", ["Llama", "Gemma3Text", "Glm4"])
def test_bfloat16_stays_within_its_roundings(family):
    model, blocks = tiny(family, torch.bfloat16)
    ids = torch.randint(3, 50, (2, 9))
    with torch.no_grad():
        before = model(ids).logits.float()
        exact = model.double()(ids).logits.float()
        model.bfloat16()
        assert sum(patch_blocks(blocks).replaced.values()) >= 4 * LAYERS
        after = model(ids).logits.float()
    assert (after - exact).norm() <= 1.2 * (before - exact).norm()


def test_generation_with_a_cache():
    model, blocks = tiny("Llama")
    ids = torch.randint(3, 50, (2, 5))
    kw = {"max_new_tokens": 6, "do_sample": False, "min_new_tokens": 6}
    expected = model.generate(ids, **kw)
    patch_blocks(blocks)
    assert torch.equal(model.generate(ids, **kw), expected)


def test_gradient_checkpointing():
    model, blocks = tiny("Llama")
    ids = torch.randint(3, 50, (2, 9))
    patch_blocks(blocks)
    model.train()
    plain = run(model, ids)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert all(map(torch.equal, run(model, ids), plain))


def test_a_renamed_projection_turns_the_kernel_off_and_not_the_model():
    """As a new release may do it: the module is unknown then, and keeps its own code."""
    model, blocks = tiny("Llama")

    class LlamaMLP(nn.Module):
        def __init__(self, old):
            super().__init__()
            self.gate, self.up, self.down = old.gate_proj, old.up_proj, old.down_proj

        def forward(self, x):
            return self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    for block in blocks:
        block.mlp = LlamaMLP(block.mlp)
    ids = torch.randint(3, 50, (2, 9))
    before = run(model, ids)
    events = []
    handle = patch_blocks(blocks, on_event=events.append)
    assert handle.replaced == {"RMSNorm": 4, "rotary": 2}
    assert any("LlamaMLP keeps its own code (2 places)" in event for event in events)
    for a, b in zip(run(model, ids), before, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm() + 1e-7


# What a new release may call otherwise, how, and the kernel that is left off by it.
RENAMED = {
    "gate_proj": ("first_proj", "gated MLP"),
    "act_fn": ("curve", None),
    "LlamaMLP": ("Mixer", None),
    "variance_epsilon": ("tolerance", "RMSNorm"),
    "LlamaRMSNorm": ("Scaling", None),
    "input_layernorm": ("first", None),
    "apply_rotary_pos_emb": ("turn_heads", "rotary"),
    "rotate_half": ("swap", None),
    "position_embeddings": ("angles", None),
    "q_proj": ("query", None),
    "LlamaAttention": ("Attending", None),
    "LlamaDecoderLayer": ("Layer", None),
}


def with_names_changed(names, folder):
    """transformers' Llama, its source read anew with other names in it."""
    import importlib.util

    from transformers.models.llama import modeling_llama

    source = Path(modeling_llama.__file__).read_text(encoding="utf-8")
    for name in names:
        changed = re.sub(rf"\b{name}\b", RENAMED[name][0], source)
        assert changed != source, f"Llama has no {name} any more"
        source = changed
    file = folder / "llama" / "modeling_llama.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("transformers.models.llama.renamed", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


@pytest.mark.parametrize("name", [*RENAMED, "all"])
def test_a_release_that_renames_something_turns_kernels_off_at_most(name, tmp_path):
    """Never the model: the same losses and gradients, and an event for each kernel that is off."""
    names = list(RENAMED) if name == "all" else [name]
    off = {RENAMED[name][1] for name in names} - {None}
    plain, _ = tiny("Llama")
    model = with_names_changed(names, tmp_path).LlamaForCausalLM(plain.config)
    for there, value in zip(model.parameters(), plain.parameters(), strict=True):
        there.data.copy_(value)
    ids = torch.randint(3, 50, (2, 9))
    wanted = run(plain, ids)
    assert all(map(torch.equal, run(model, ids), wanted))
    events = []
    handle = patch_blocks(model.model.layers, on_event=events.append)
    expected = {"RMSNorm": 4, "rotary": 2, "gated MLP": 2}
    assert handle.replaced == {kind: n for kind, n in expected.items() if kind not in off}
    said = {
        "RMSNorm": "LlamaRMSNorm keeps",
        "gated MLP": "LlamaMLP keeps",
        "rotary": "as rotary was",
    }
    if name == "all":
        said = dict.fromkeys(off, f"nothing known here as {' or '.join(expected)} was found")
    assert [kind for kind in off if not any(said[kind] in event for event in events)] == []
    assert len(events) == 1 + (len(off) == 1)  # what runs as a kernel, and what does not
    for a, b in zip(run(model, ids), wanted, strict=True):
        assert (a - b).norm() <= 1e-5 * b.norm() + 1e-7
    handle.undo()
    assert all(map(torch.equal, run(model, ids), wanted))


@pytest.mark.parametrize("family", ["Llama", "Gemma"])
def test_autocast_keeps_dtypes_and_values(family):
    model, blocks = tiny(family)
    ids = torch.randint(3, 50, (2, 9))
    seen = []
    hook = blocks[0].register_forward_hook(lambda module, args, out: seen.append(out))
    with torch.autocast("cpu", torch.bfloat16):
        before = run(model, ids)
        patch_blocks(blocks)
        after = run(model, ids)
    hook.remove()
    first, second = (out[0] if isinstance(out, tuple) else out for out in seen)
    assert first.dtype == second.dtype
    for a, b in zip(after, before, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).norm() <= 3e-2 * b.norm() + 1e-6
