"""Buffers of a skeleton are computed, also by code that does so in __init__ only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ts_hf
from ts_core.errors import DataError

# A checkpoint's own code: a buffer that only __init__ computes, and one that is stored.
MODELING = """
import torch
from torch import nn
from transformers import PreTrainedModel, PretrainedConfig
from transformers.modeling_outputs import CausalLMOutput


class StepConfig(PretrainedConfig):
    model_type = "step"
    def __init__(self, width=8, **kwargs):
        self.width = width
        super().__init__(**kwargs)


class StepForCausalLM(PreTrainedModel):
    config_class = StepConfig
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(10, config.width)
        self.layers = nn.ModuleList([nn.Linear(config.width, config.width) for _ in range(2)])
        self.register_buffer("ramp", torch.arange(config.width) * 0.5, persistent=False)
        self.register_buffer("stored", torch.zeros(3))
        self.post_init()

    def forward(self, input_ids=None, **kwargs):
        hidden = self.embed(input_ids) + self.ramp
        for layer in self.layers:
            hidden = layer(hidden)
        return CausalLMOutput(logits=hidden)
"""


@pytest.fixture
def own_code(tmp_path: Path) -> Path:
    folder = tmp_path / "own-code"
    folder.mkdir()
    (folder / "modeling_step.py").write_text(MODELING)
    config = {
        "model_type": "step",
        "architectures": ["StepForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_step.StepConfig",
            "AutoModelForCausalLM": "modeling_step.StepForCausalLM",
        },
        "width": 8,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"embed.weight": torch.randn(10, 8), "stored": torch.tensor([1.0, 2.0, 3.0])}
    for index in range(2):
        tensors[f"layers.{index}.weight"] = torch.randn(8, 8)
        tensors[f"layers.{index}.bias"] = torch.randn(8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_buffers_made_in_init(
    own_code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = ts_hf.load_model(own_code, quantize=None, dtype=torch.float32, trust_remote_code=True)
    assert torch.equal(model.ramp, torch.arange(8) * 0.5)
    assert torch.equal(model.stored, torch.tensor([1.0, 2.0, 3.0]))
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([[1, 2]])).logits).all()


def test_own_code_is_not_run_unasked(own_code: Path) -> None:
    with pytest.raises(DataError, match="trust_remote_code"):
        ts_hf.load_model(own_code, quantize=None)


def test_rotary_variants(tiny_config: object, tmp_path: Path) -> None:
    """inv_freq of a scaled rotary embedding is what transformers computes."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    )
    wanted = AutoModelForCausalLM.from_config(config)
    wanted.save_pretrained(tmp_path)
    model = ts_hf.load_model(tmp_path, quantize=None, dtype=torch.float32)
    assert torch.equal(model.model.rotary_emb.inv_freq, wanted.model.rotary_emb.inv_freq)
    plain = 1.0 / 5e5 ** (torch.arange(0, 16, 2) / 16)
    assert not torch.equal(model.model.rotary_emb.inv_freq, plain)
