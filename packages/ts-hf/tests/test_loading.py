"""load_model against from_pretrained, whatever way a checkpoint is laid out and is to be read."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import ts_hf
from ts_core.errors import (
    DataError,
    NotAvailableError,
    OptionError,
    OutOfBudgetError,
)
from ts_hf import budget

FAMILIES = ["llama", "qwen2", "gpt2", "mixtral", "gemma2"]


def _same_state(one: Any, other: Any) -> None:
    a, b = one.state_dict(), other.state_dict()
    assert list(a) == list(b)
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and torch.equal(tensor, b[name]), name
    buffers = dict(other.named_buffers())
    for name, buffer in one.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_from_pretrained(
    family: str, dtype: torch.dtype, checkpoint: Callable[..., Path]
) -> None:
    from transformers import AutoModelForCausalLM

    folder = checkpoint(family)
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model = ts_hf.load_model(folder, quantize=None, dtype=dtype)
    _same_state(wanted, model)
    assert not model.training and model.config.dtype == dtype
    assert type(model) is type(wanted)
    ids = torch.randint(0, 256, (2, 9))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, wanted(ids).logits)
    for (name, ours), (_, theirs) in zip(
        model.named_parameters(), wanted.named_parameters(), strict=True
    ):
        assert ours.requires_grad == theirs.requires_grad, name
        assert ours.is_contiguous() and not ours.is_meta


def test_sharded(checkpoint: Callable[..., Path]) -> None:
    from transformers import AutoModelForCausalLM

    folder = checkpoint("llama", shards=True)
    assert len(list(folder.glob("*.safetensors"))) > 3
    _same_state(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        ts_hf.load_model(folder, quantize="none", dtype=torch.float32),
    )


def test_tied_embeddings_stay_tied(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("llama", tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    model = ts_hf.load_model(folder, quantize=None)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    # A checkpoint that stores the head only, or both, or both and different.
    file = folder / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors.pop("model.embed_tokens.weight")
    save_file({**tensors, "lm_head.weight": embedding}, file, metadata={"format": "pt"})
    model = ts_hf.load_model(folder, quantize=None, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, embedding)
    both = {**tensors, "lm_head.weight": embedding.clone(), "model.embed_tokens.weight": embedding}
    save_file(both, file, metadata={"format": "pt"})
    model = ts_hf.load_model(folder, quantize=None, dtype=torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    both["lm_head.weight"] += 1
    save_file(both, file, metadata={"format": "pt"})
    model = ts_hf.load_model(folder, quantize=None, dtype=torch.float32)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, embedding + 1)
    assert any("differ in the checkpoint" in line for line in model.trainstream_load.events)


def test_quantized_while_reading(checkpoint: Callable[..., Path], codec: str) -> None:
    from ts_core.registry import codecs

    folder = checkpoint("llama", shards=True, tie_word_embeddings=True)
    plain = ts_hf.load_model(folder, quantize=None, dtype=torch.bfloat16)
    model = ts_hf.load_model(folder, quantize=codec, dtype=torch.bfloat16, quant_block_size=32)
    quantized = set()
    for name, parameter in model.named_parameters():
        reference = plain.get_parameter(name)
        assert not parameter.requires_grad
        assert parameter.shape == reference.shape and parameter.dtype == torch.bfloat16
        if hasattr(parameter, "dequantize") and hasattr(parameter, "__tensor_flatten__"):
            quantized.add(name)
            wanted = codecs.get(codec).encode(reference.detach(), block_size=32)
            assert torch.equal(parameter.dequantize(), wanted.dequantize())
        else:
            assert torch.equal(parameter, reference)
    linear = {
        f"{n}.weight" for n, m in plain.model.layers.named_modules() if hasattr(m, "in_features")
    }
    assert quantized == {f"model.layers.{name}" for name in linear}
    assert model.trainstream_load.quantized_tensors == len(quantized) == 4 * 7
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = torch.randint(0, 256, (1, 7))
    with torch.no_grad():
        assert torch.isfinite(model(ids).logits).all()


def test_hub_id_from_the_cache(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline, a hub id is read from huggingface_hub's cache; one that is not there is refused."""
    import huggingface_hub.constants as hub

    folder = checkpoint("llama", shards=True)
    revision = "0123456789012345678901234567890123456789"
    repo = tmp_path / "cache" / "models--owner--tiny"
    shutil.copytree(folder, repo / "snapshots" / revision)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(revision)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    model = ts_hf.load_model("owner/tiny", quantize=None)
    assert model.num_parameters() > 0
    with pytest.raises(DataError, match=r"'owner/other'.*could not be fetched"):
        ts_hf.load_model("owner/other")


# -- damaged and wrong checkpoints --------------------------------------------------------------


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_keys_without_the_base_prefix(checkpoint: Callable[..., Path]) -> None:
    """Saved from the base model: names lack 'model.'; the head is tied."""
    folder = checkpoint("llama", tie_word_embeddings=True)
    wanted = ts_hf.load_model(folder, quantize=None)
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    _same_state(wanted, ts_hf.load_model(folder, quantize=None))


def test_old_rotary_buffers_are_ignored(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("llama")
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    _rewrite(folder, lambda tensors: tensors.update(old))
    assert ts_hf.load_model(folder, quantize=None).num_parameters() > 0


# -- options ------------------------------------------------------------------------------------


def test_config_overrides(checkpoint: Callable[..., Path]) -> None:
    folder = checkpoint("llama")
    model = ts_hf.load_model(folder, quantize=None, rms_norm_eps=1e-3, attn_implementation="eager")
    assert model.model.norm.variance_epsilon == 1e-3
    assert model.config._attn_implementation == "eager"
    with pytest.raises(OptionError, match="Did you mean 'rms_norm_eps'"):
        ts_hf.load_model(folder, rms_norm_epz=1)
    with pytest.raises(DataError, match=r"shape \[256, 64\].*has \[256, 128\]"):
        ts_hf.load_model(folder, quantize=None, hidden_size=128)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_layers_on_a_disk(
    family: str,
    quantize: str | None,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """disk_offload: mapped files hold the layers; RAM needs only the rest."""
    folder, place = checkpoint(family, shards=True), tmp_path / "disk"
    plain = ts_hf.load_model(folder, quantize=quantize, dtype=torch.float32)
    rest = budget.measure(plain).rest_bytes
    monkeypatch.setattr(budget, "ram_available_bytes", lambda: rest + 1000)
    if quantize is None:
        with pytest.raises(OutOfBudgetError):
            ts_hf.load_model(folder, quantize=None, dtype=torch.float32)
    model = ts_hf.load_model(folder, quantize=quantize, dtype=torch.float32, disk_offload=place)
    _same_state(plain, model)
    assert list(place.iterdir()) == []  # the files have no names any more
    maps = Path("/proc/self/maps").read_text()
    mapped = [line for line in maps.splitlines() if str(place) in line]
    assert mapped and all("(deleted)" in line for line in mapped)
    (said,) = [line for line in model.trainstream_load.events if "disk_offload" in line]
    assert str(place) in said
    assert {type(p) for p in model.parameters()} == {type(p) for p in plain.parameters()}
    ids = torch.arange(9)[None]
    with torch.no_grad():
        expected = plain(ids).logits
        model.lm_head.weight.requires_grad_(True)
        for name, parameter in model.named_parameters():
            if "lm_head" not in name:
                parameter.requires_grad_(False)
        model, _ = ts_hf.wrap_hf(
            model, device="cpu", quantize="none", param_offload=True, disk_offload=place
        )
        assert torch.equal(model(ids).logits, expected)


CODE = {
    "configuration_mine.py": """
from transformers import LlamaConfig

class MineConfig(LlamaConfig):
    model_type = "mine"
""",
    "modeling_mine.py": """
from transformers import LlamaForCausalLM
from .configuration_mine import MineConfig

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 2
        return out
""",
}


def test_code_of_the_checkpoint(
    checkpoint: Callable[..., Path], codec: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """trust_remote_code=True runs the folder's own code; without it nothing of it runs."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    monkeypatch.setattr("sys.path", list(sys.path))  # transformers adds that folder
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        monkeypatch.delitem(sys.modules, name)  # of another test's folder
    folder = checkpoint("llama")
    plain = ts_hf.load_model(folder, quantize=codec)
    for name, text in CODE.items():
        (folder / name).write_text(text)
    fields = json.loads((folder / "config.json").read_text())
    fields["model_type"] = "mine"
    fields["auto_map"] = {
        "AutoConfig": "configuration_mine.MineConfig",
        "AutoModelForCausalLM": "modeling_mine.MineForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(DataError, match="trust_remote_code=True"):
        ts_hf.load_model(folder, quantize=codec)
    model = ts_hf.load_model(folder, quantize=codec, trust_remote_code=True)
    assert type(model).__name__ == "MineForCausalLM"
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits * 2)
    assert len(ts_hf.find_decoder_layers(model)) == 4


def test_auto_takes_the_most_precise_that_fits(
    checkpoint: Callable[..., Path], codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ts_core.registry import codecs

    folder = checkpoint("llama")
    plain = ts_hf.load_model(folder, quantize=None).trainstream_load.total_bytes
    order = sorted(codecs.names(), key=lambda name: codecs.get(name).error_rank_order)
    sizes = {
        name: ts_hf.load_model(folder, quantize=name).trainstream_load.total_bytes for name in order
    }

    def chosen(free: int, **options: Any) -> Any:
        monkeypatch.setattr(budget, "ram_available_bytes", lambda: free)
        return ts_hf.load_model(folder, **options).trainstream_load

    assert chosen(2 * plain, ram_fraction=0.5).quantize is None
    assert chosen(2 * plain - 3000, ram_fraction=0.5).quantize == order[0]
    last = order[-1]
    found = chosen(sizes[last] + 1000, ram_fraction=1.0)
    assert found.quantize == last and any("quantize='auto'" in line for line in found.events)
    with pytest.raises(OutOfBudgetError, match=rf"{last} [\d.]+ KiB"):
        chosen(sizes[last] - 2000, ram_fraction=1.0)
    with pytest.raises(OutOfBudgetError, match="in full precision, but only"):
        chosen(plain - 3000, quantize=None)
    for free in (sizes[order[0]] + 1000, sizes[last] + 1000):  # the codec that is named loads
        with pytest.raises(OutOfBudgetError, match="Quantize it") as refusal:
            chosen(free, quantize=None)
        named = str(refusal.value).split("quantize='")[1].split("'")[0]
        assert chosen(free, quantize=named).quantize == named
    with pytest.raises(OutOfBudgetError, match=f"in {last}, but only") as refusal:
        chosen(sizes[last] - 2000, quantize=last)
    assert "Quantize it" not in str(refusal.value)


def test_quantization_that_would_not_reach_most_of_a_model(
    checkpoint: Callable[..., Path], codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conv1D is not silently left in full precision."""
    folder = checkpoint("gpt2")
    with pytest.raises(NotAvailableError, match=r"not in nn\.Linear modules \(the largest: '"):
        ts_hf.load_model(folder, quantize=codec)
    monkeypatch.setattr(budget, "ram_available_bytes", lambda: 1000)
    with pytest.raises(OutOfBudgetError, match="quantization does not help"):
        ts_hf.load_model(folder)


def test_a_few_weights_out_of_reach_are_reported(
    tiny_config: Callable[..., Any], codec: str
) -> None:
    config = tiny_config("mixtral", num_local_experts=2, intermediate_size=16)
    model = ts_hf.load_model(config, random_weights=True, quantize=codec)
    events = model.trainstream_load.events
    assert len(events) == 1 and "stay in full precision" in events[0]
    assert "mlp.gate.weight" in events[0]  # the routers


@pytest.mark.parametrize("shards", [False, True])
def test_stacked_experts_are_quantized_while_they_are_read(
    shards: bool, checkpoint: Callable[..., Path], codec: str
) -> None:
    """A checkpoint has one tensor per expert and matrix; the model holds them stacked."""
    from ts_core.registry import codecs

    folder = checkpoint("mixtral", shards=shards)
    plain = ts_hf.load_model(folder, quantize=None, dtype=torch.float32)
    model = ts_hf.load_model(folder, quantize=codec, dtype=torch.float32)
    experts = model.model.layers[1].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        stored, dense = getattr(experts, name), getattr(plain.model.layers[1].mlp.experts, name)
        assert stored.codec == codec and not stored.requires_grad
        assert torch.equal(stored.dequantize(), codecs.get(codec).encode(dense).dequantize())
    assert model.trainstream_load.quantized_tensors == 2 * (4 + 2)
    model, _ = ts_hf.wrap_hf(_head_trained(model), device="cpu", moe_paging=True)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        paged = model(ids).logits
        for layer in plain.model.layers:
            for module in layer.modules():
                for leaf, weight in list(module._parameters.items()):
                    if weight is not None and (weight.dim() == 3 or isinstance(module, nn.Linear)):
                        dense = codecs.get(codec).encode(weight).dequantize()
                        module._parameters[leaf] = nn.Parameter(dense, requires_grad=False)
        assert torch.equal(paged, plain(ids).logits)


def _head_trained(model: Any) -> Any:
    model.lm_head.weight.requires_grad_(True)
    return model
