"""One process of test_trainer_ranks: python trainer_ranks_worker.py TRAINER FOLDER BATCH [RESUME].

Started with the environment that torchrun sets; without it, it is a run in one process. Writes
FOLDER/found.RANK.pt.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import ts_hf

ROWS, LENGTH, VOCABULARY = 24, 10, 64


def rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for number in range(ROWS):
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: number % 6] = -100  # rows with different numbers of labels
        made.append({"input_ids": ids, "labels": labels})
    return made


def model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def main(trainer: str, folder: Path, batch: int, resume: bool) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    several = "RANK" in os.environ
    arguments = TrainingArguments(
        output_dir=str(folder / "run"),
        max_steps=6,
        per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        adam_epsilon=1e-4,  # else Adam turns a rounding of a zero gradient into a whole step
        max_grad_norm=0.3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=3,
        report_to=[],
        use_cpu=True,
        ddp_backend="gloo" if several else None,
        disable_tqdm=True,
        log_level="error",
    )
    # What each process starts with differs; that of the first counts.
    options: dict[str, Any] = {"model": model(rank), "args": arguments}
    options.update(train_dataset=rows(), eval_dataset=rows()[:8])
    if trainer == "TrainStreamTrainer":
        options["trainstream"] = {"loss_chunk_size": 7}
        made: Any = ts_hf.TrainStreamTrainer(**options)
    else:
        made = transformers.Trainer(**options)
    made.train(resume_from_checkpoint=str(folder / "run/checkpoint-3") if resume else None)
    found = {
        "history": made.state.log_history,
        "params": {name: p.detach().clone() for name, p in made.model.named_parameters()},
        "saved": sorted(path.name for path in (folder / "run").iterdir()),
    }
    torch.save(found, folder / f"found.{rank}.pt")
    if several:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(json.loads(sys.argv[3])), len(sys.argv) > 4)
