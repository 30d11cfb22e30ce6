"""One process of test_trainer_ranks: python trainer_ranks_worker.py FOLDER, as torchrun starts it.

Trains, resumes from the middle, and writes FOLDER/found.RANK.pt.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
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


def train(folder: Path, rank: int, processes: int, resume: bool = False) -> dict[str, Any]:
    """Two rows a step over all processes; what the run ends with."""
    arguments = TrainingArguments(
        output_dir=str(folder / "run"),
        max_steps=6,
        per_device_train_batch_size=2 // processes,
        per_device_eval_batch_size=2 // processes,
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
        ddp_backend="gloo" if processes > 1 else None,
        disable_tqdm=True,
        log_level="error",
    )
    made: Any = ts_hf.TrainStreamTrainer(
        model=model(rank),  # each process starts with others; those of the first count
        args=arguments,
        train_dataset=rows(),
        eval_dataset=rows()[:8],
        trainstream={"loss_chunk_size": 7},
    )
    made.train(resume_from_checkpoint=str(folder / "run/checkpoint-3") if resume else None)
    return {
        "history": made.state.log_history,
        "params": {name: p.detach().clone() for name, p in made.model.named_parameters()},
        "saved": sorted(path.name for path in (folder / "run").iterdir()),
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank, processes = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    found = train(folder / "whole", rank, processes)
    if rank == 0:
        shutil.copytree(folder / "whole/run/checkpoint-3", folder / "again/run/checkpoint-3")
    torch.distributed.barrier()
    resumed = train(folder / "again", rank, processes, resume=True)
    torch.save((found, resumed), folder / f"found.{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
