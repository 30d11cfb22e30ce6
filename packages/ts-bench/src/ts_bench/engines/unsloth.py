"""Unsloth: its FastLanguageModel on an NF4 checkpoint in a local folder.

Unsloth starts from a checkpoint, so one of the scenario's shape is written first, with random
weights, in the form that bitsandbytes stores: under TS_BENCH_CHECKPOINTS, or the system's folder
for temporary files (10.5 GB for a 14B shape; written once).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ts_bench.engines import API_VERSION, UnsupportedError
from ts_bench.engines.stock import CHECKPOINTING, VARIANTS
from ts_bench.scenarios import SCENARIOS, ModelShape, Scenario
from ts_bench.workload import (
    PROJECTIONS,
    WEIGHT_STD,
    TrainStep,
    adamw,
    config_of,
)

FOLDER = "TS_BENCH_CHECKPOINTS"
DEFAULT = "lora-14b-nf4-1x512-24g"
LAYERS_PER_FILE = 8


class UnslothEngine:
    """FastLanguageModel.from_pretrained and get_peft_model as its documentation has them.

    NF4 in blocks of 64 without double quantization, as the other engines have it. The variant
    `checkpointing` is Unsloth's own (`use_gradient_checkpointing="unsloth"`).
    """

    API_VERSION = API_VERSION
    name = "unsloth"
    description = "Unsloth's FastLanguageModel on bitsandbytes NF4 weights"
    variants = VARIANTS
    own_interpreter = True  # it must be imported before transformers and PEFT

    def available(self) -> str | None:
        """None, or what is missing."""
        missing = [name for name in ("unsloth", "unsloth_zoo") if find_spec(name) is None]
        return f"needs {' and '.join(missing)}: pip install unsloth" if missing else None

    def prepare(self, scenario: Scenario, device: torch.device, variant: str) -> TrainStep:
        """See `ts_bench.engines.Engine.prepare`."""
        if scenario.mode != "lora" or scenario.base != "nf4" or scenario.documents > 1:
            raise UnsupportedError(
                "unsloth is compared where the base is NF4, LoRA is trained and rows are not packed"
            )
        if device.type != "cuda":
            raise UnsupportedError("Unsloth trains on a GPU")
        folder = checkpoint_folder(scenario)
        if not (folder / "complete").exists():
            # In a process of its own, where no memory cap is in force and nothing is patched.
            job = json.dumps(scenario.to_dict())
            subprocess.run([sys.executable, "-m", __name__, job], check=True)
        unsloth: Any = __import__("unsloth")
        checkpointing = "unsloth" if variant == CHECKPOINTING else False
        model, _ = unsloth.FastLanguageModel.from_pretrained(
            model_name=str(folder),
            max_seq_length=max(2048, scenario.tokens),
            dtype=torch.bfloat16,
            load_in_4bit=True,
            use_gradient_checkpointing=checkpointing,
            local_files_only=True,
        )
        model = unsloth.FastLanguageModel.get_peft_model(
            model,
            r=scenario.lora_rank,
            target_modules=PROJECTIONS,
            lora_alpha=2 * scenario.lora_rank,
            lora_dropout=0,
            bias="none",
            use_gradient_checkpointing=checkpointing,
            random_state=0,
        )
        model.train()
        details = {
            "weights": "nf4, bf16 embedding and output",
            "optimizer": "AdamW(fused)",
            "checkpointing": checkpointing,
            "unsloth": unsloth.__version__,
        }
        return TrainStep(model, adamw(model, device), scenario, device, details)


def checkpoint_folder(scenario: Scenario) -> Path:
    """Where the checkpoint of a shape lies."""
    shape = scenario.shape
    name = f"nf4-{shape.hidden_size}x{shape.num_layers}-{shape.intermediate_size}"
    return Path(os.environ.get(FOLDER) or Path(tempfile.gettempdir()) / "ts-bench") / name


def write_checkpoint(scenario: Scenario, device: torch.device) -> Path:
    """Write a Qwen2 checkpoint with random NF4 matrices and a toy tokenizer; returns its folder."""
    from safetensors.torch import save_file

    folder = checkpoint_folder(scenario)
    folder.mkdir(parents=True, exist_ok=True)
    shape = scenario.shape
    config = json.loads(config_of(scenario).to_json_string(use_diff=False))
    config.update(
        architectures=["Qwen2ForCausalLM"],
        torch_dtype="bfloat16",
        dtype="bfloat16",
        eos_token_id=1,
        pad_token_id=2,
        quantization_config={
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": False,
            "bnb_4bit_compute_dtype": "bfloat16",
            "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": ["lm_head"],
        },
    )
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    _write_tokenizer(folder)
    index: dict[str, str] = {}

    def write(tensors: dict[str, Tensor]) -> None:
        file = f"model-{len(set(index.values())):05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, file))

    write(_plain(shape, device))
    for start in range(0, shape.num_layers, LAYERS_PER_FILE):
        tensors: dict[str, Tensor] = {}
        for layer in range(start, min(start + LAYERS_PER_FILE, shape.num_layers)):
            tensors.update(_layer(shape, layer, device))
        write(tensors)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index}), encoding="utf-8"
    )
    (folder / "complete").touch()
    return folder


def _plain(shape: ModelShape, device: torch.device) -> dict[str, Tensor]:
    """What is outside of the layers, on the host."""
    size = (shape.vocab_size, shape.hidden_size)
    found = {"model.embed_tokens.weight": _random(size, device).cpu()}
    found["model.norm.weight"] = torch.ones(shape.hidden_size, dtype=torch.bfloat16)
    if not shape.tied:
        found["lm_head.weight"] = _random(size, device).cpu()
    return found


def _layer(shape: ModelShape, layer: int, device: torch.device) -> dict[str, Tensor]:
    """One layer: NF4 matrices as bitsandbytes stores them, biases and norms; on the host."""
    from bitsandbytes.functional import quantize_4bit

    hidden, inner = shape.hidden_size, shape.intermediate_size
    kv = shape.num_kv_heads * (hidden // shape.num_heads)
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    found: dict[str, Tensor] = {}
    prefix = f"model.layers.{layer}"
    for name, size in sizes.items():
        codes, state = quantize_4bit(_random(size, device), blocksize=64, quant_type="nf4")
        found[f"{prefix}.{name}.weight"] = codes.cpu()
        for key, value in state.as_dict(packed=True).items():
            found[f"{prefix}.{name}.weight.{key}"] = value.cpu()
        if name.endswith(("q_proj", "k_proj", "v_proj")):
            found[f"{prefix}.{name}.bias"] = torch.zeros(size[0], dtype=torch.bfloat16)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        found[f"{prefix}.{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    return found


def _random(size: tuple[int, int], device: torch.device) -> Tensor:
    return torch.empty(size, device=device, dtype=torch.bfloat16).normal_(0.0, WEIGHT_STD)


def _write_tokenizer(folder: Path) -> None:
    """A tokenizer of few words: one is loaded with the model, and never used."""
    tokenizers: Any = __import__("tokenizers")
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<eos>": 1, "<pad>": 2, "a": 3, "b": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>"
    )
    fast.save_pretrained(folder)


ENGINE = UnslothEngine()

if __name__ == "__main__":
    # python -m ts_bench.engines.unsloth [SCENARIO as JSON]: write its checkpoint.
    chosen = Scenario.from_dict(json.loads(sys.argv[1])) if sys.argv[1:] else SCENARIOS[DEFAULT]
    print(write_checkpoint(chosen, torch.device("cuda" if torch.cuda.is_available() else "cpu")))
