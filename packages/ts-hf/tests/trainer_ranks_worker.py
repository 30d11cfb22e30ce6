"""One process of test_trainer_ranks: python trainer_ranks_worker.py FOLDER.

On the CPU with gloo; with TRAINSTREAM_TEST_RANKS=cuda on a GPU each, with NCCL.

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
from ts_core.testing.processes import fork_ranks

ROWS, LENGTH, VOCABULARY = 24, 10, 64
ON_GPUS = os.environ.get("TRAINSTREAM_TEST_RANKS") == "cuda"


def rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for number in range(ROWS):
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: number % 6] = -100  # rows with different numbers of labels
        made.append({"input_ids": ids, "labels": labels})
    return made


class PlainForCausalLM(LlamaForCausalLM):
    """Takes no num_items_in_batch: the mean over its own labels."""

    def forward(self, input_ids: Any = None, labels: Any = None) -> Any:
        return super().forward(input_ids=input_ids, labels=labels)


def model(seed: int, kind: str) -> Any:
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
    return (PlainForCausalLM if kind == "no kwargs" else LlamaForCausalLM)(config)


def train(
    folder: Path, rank: int, processes: int, kind: str = "plain", resume: bool = False
) -> dict[str, Any]:
    """Four rows in two micro-batches a step over all processes; what the run ends with."""
    data = rows()
    if kind == "packed":
        data = [{k: v[: 3 + n % 8] for k, v in row.items()} for n, row in enumerate(data)]
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
        use_cpu=not ON_GPUS,
        ddp_backend=None if processes == 1 else "nccl" if ON_GPUS else "gloo",
        disable_tqdm=True,
        log_level="error",
    )
    made: Any = ts_hf.TrainStreamTrainer(
        model=model(rank, kind),  # each process starts with others; those of the first count
        args=arguments,
        train_dataset=data,
        # Seven rows: two processes repeat one to fill their last batch up (packed, it counts).
        eval_dataset=data[:8] if kind == "packed" else data[:7],
        trainstream={"loss_chunk_size": 7, "packing": kind == "packed"},
    )
    made.train(resume_from_checkpoint=str(folder / "run/checkpoint-3") if resume else None)
    return {
        "history": made.state.log_history,
        "params": {name: p.detach().cpu().clone() for name, p in made.model.named_parameters()},
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
    others = {kind: train(folder / kind, rank, processes, kind) for kind in ("no kwargs", "packed")}
    torch.save((found, resumed, others), folder / f"found.{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    fork_ranks(lambda rank: main(Path(sys.argv[1])))
