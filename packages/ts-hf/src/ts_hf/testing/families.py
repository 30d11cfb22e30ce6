"""Small models of every family in docs/models.md, built from their configs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ts_hf.skeleton import auto_class
from ts_hf.testing import images

VOCABULARY = 96

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA: dict[str, Any] = {
    **_COMMON,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
_EXPERTS: dict[str, Any] = {**_LLAMA, "num_experts_per_tok": 2}
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
_TEXT_LINEAR = (
    r".*(language_model|text_model).*(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
)
_GEMMA: dict[str, Any] = {**_LLAMA, "head_dim": 16, "sliding_window": 8}


@dataclass(frozen=True)
class Family:
    """One row of the table.

    Attributes:
        title: as people call it.
        config: name of its config class in transformers.
        fields: of the config, so that the model is small.
        experts: whether it is a mixture of experts with stacked experts.
        targets: `target_modules` of PEFT LoRA for it.
        lora: further fields of LoraConfig.
        note: what a reader should know, or "".
        images: how it takes images, if it does; its batches then have one in every row.
    """

    title: str
    config: str
    fields: dict[str, Any] = field(default_factory=dict)
    experts: bool = False
    targets: str | list[str] = "all-linear"
    lora: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    images: images.Images | None = None

    def build(self, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
        """A model of transformers with random weights, the same for the same seed.

        Args:
            seed: of the weights.
            dtype: of the parameters.
            **changes: fields of the config, `attn_implementation`, `experts_implementation`.
        """
        import transformers

        options = {
            name: changes.pop(name)
            for name in ("attn_implementation", "experts_implementation")
            if name in changes
        }
        config = getattr(transformers, self.config)(**{**self.fields, **changes})
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        model = auto_class(config).from_config(config, dtype=dtype, **options)
        if self.images is not None:
            _let_images_count(model)
        torch.set_rng_state(state)
        return model.eval()

    def batch(self, seed: int, rows: int = 2) -> dict[str, torch.Tensor]:
        """Seeded random tokens with labels, and images where it takes them."""
        tokens = token_batch(seed, rows)
        return tokens if self.images is None else self.images.put_into(tokens, seed)


FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", "LlamaConfig", _LLAMA),
    "qwen2": Family("Qwen2.5", "Qwen2Config", _LLAMA),
    "qwen3": Family("Qwen3", "Qwen3Config", {**_LLAMA, "head_dim": 16}),
    "mistral": Family("Mistral", "MistralConfig", {**_LLAMA, "sliding_window": None}),
    "gemma2": Family("Gemma 2", "Gemma2Config", _GEMMA),
    "gemma3": Family("Gemma 3 (text)", "Gemma3TextConfig", _GEMMA),
    "phi": Family("Phi", "PhiConfig", {**_LLAMA, "num_key_value_heads": 4, "resid_pdrop": 0.0}),
    "phi3": Family("Phi-3", "Phi3Config", {**_LLAMA, "resid_pdrop": 0.0}),
    "gpt2": Family(
        "GPT-2",
        "GPT2Config",
        {
            **_COMMON,
            "n_embd": 64,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 128,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
        targets=["c_attn", "c_proj", "c_fc"],
        lora={"fan_in_fan_out": True},
        note="its layers are Conv1D, which quantization does not reach",
    ),
    "gpt_neox": Family("GPT-NeoX, Pythia", "GPTNeoXConfig", {**_LLAMA, "hidden_dropout": 0.0}),
    "qwen2_moe": Family(
        "Qwen2-MoE",
        "Qwen2MoeConfig",
        {
            **_EXPERTS,
            "num_experts": 6,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
        },
        experts=True,
        targets=_ATTENTION,
    ),
    "qwen3_moe": Family(
        "Qwen3-MoE",
        "Qwen3MoeConfig",
        {**_EXPERTS, "num_experts": 6, "moe_intermediate_size": 32, "head_dim": 16},
        experts=True,
        targets=_ATTENTION,
    ),
    "mixtral": Family(
        "Mixtral",
        "MixtralConfig",
        {**_EXPERTS, "num_local_experts": 6, "sliding_window": None},
        experts=True,
        targets=_ATTENTION,
    ),
    "gpt_oss": Family(
        "gpt-oss",
        "GptOssConfig",
        {
            **_EXPERTS,
            "num_local_experts": 6,
            "head_dim": 16,
            "sliding_window": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        experts=True,
        targets=_ATTENTION,
    ),
    "qwen2_5_vl": Family(
        "Qwen2.5-VL",
        "Qwen2_5_VLConfig",
        images.qwen2_5_vl(_LLAMA),
        targets=_TEXT_LINEAR,
        images=images.QWEN_IMAGES,
    ),
    "qwen3_vl": Family(
        "Qwen3-VL",
        "Qwen3VLConfig",
        images.qwen3_vl({**_LLAMA, "head_dim": 16}),
        targets=_TEXT_LINEAR,
        images=images.QWEN_IMAGES,
    ),
    "gemma3_vl": Family(
        "Gemma 3 (images)",
        "Gemma3Config",
        images.gemma3(_GEMMA),
        targets=_TEXT_LINEAR,
        images=images.Images((1, 3, 32, 32), types="token_type_ids"),
    ),
    "llava": Family(
        "LLaVA",
        "LlavaConfig",
        images.llava(_LLAMA),
        targets=_TEXT_LINEAR,
        images=images.Images((1, 3, 16, 16)),
    ),
    "smolvlm": Family(
        "SmolVLM, Idefics3",
        "SmolVLMConfig",
        images.smolvlm(_LLAMA),
        targets=_TEXT_LINEAR,
        images=images.Images((1, 1, 3, 16, 16), tokens=1),
    ),
}


def _let_images_count(model: torch.nn.Module) -> None:
    """Draw the matrices that begin at zero, through which nothing of an image would pass."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():
                parameter.normal_(0.0, 0.1)


def token_batch(seed: int, batch: int = 2, length: int = 12) -> dict[str, torch.Tensor]:
    """Seeded random tokens below the special ones, with labels."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY - 8, (batch, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}
