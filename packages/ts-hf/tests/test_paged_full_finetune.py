"""TrainStreamTrainer trains every weight of a model whose blocks stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from ts_hf import TrainStreamTrainer


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
            tie_word_embeddings=True,
        )
    )


def train(folder: Path, steps: int, resume: Path | None = None, **options: Any) -> dict[str, Any]:
    tokens = torch.randint(0, 64, (16, 12), generator=torch.Generator().manual_seed(1))
    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        max_grad_norm=0.5,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = TrainStreamTrainer(
        model(),
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        trainstream={"quantize": "none", "offload": True, **options},
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    found: dict[str, Any] = trainer.model.state_dict()
    return found


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_equal_to_resident_saved_and_resumed(tmp_path: Path) -> None:
    expected = train(tmp_path / "a", 4, param_offload=False)
    found = train(tmp_path / "b", 4, param_offload=True)
    resumed = train(tmp_path / "c", 4, tmp_path / "b" / "checkpoint-2", param_offload=0.5)
    saved = LlamaForCausalLM.from_pretrained(tmp_path / "b" / "checkpoint-4").state_dict()
    for name, value in expected.items():
        for other in (found, resumed, saved):
            assert torch.equal(other[name], value), name
