"""Train a causal language model on text files with transformers' Trainer.

An ordinary script: nothing in it knows of trainstream. `run_clm.diff` is the one line that makes
the model stream, after which it trains on a GPU that it does not fit on:

    python run_clm.py --model_name_or_path MODEL --train_file train.txt \\
        --validation_file held-out.txt --do_train --do_eval --output_dir out
    patch run_clm.py run_clm.diff      # and again

Needs `pip install datasets` beside transformers.
"""

from __future__ import annotations

import logging
import math
import sys
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from datasets import DatasetDict, load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    model_name_or_path: str = field(metadata={"help": "A folder or a hub id."})
    dtype: str = field(default="float32", metadata={"help": "float32 or bfloat16."})


@dataclass
class DataArguments:
    train_file: str = field(metadata={"help": "A text file."})
    validation_file: str | None = field(default=None, metadata={"help": "A text file."})
    block_size: int = field(default=1024, metadata={"help": "Tokens in a row."})


def load_rows(data: DataArguments, tokenizer: Any) -> DatasetDict:
    """Text files as rows of `block_size` tokens, documents joined; the last part row is dropped."""
    files = {"train": data.train_file}
    if data.validation_file:
        files["validation"] = data.validation_file
    texts = load_dataset("text", data_files=files)

    def tokenize(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        return {"input_ids": tokenizer([text + "\n" for text in batch["text"]])["input_ids"]}

    def group(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        tokens = list(chain.from_iterable(batch["input_ids"]))
        starts = range(0, len(tokens) - data.block_size + 1, data.block_size)
        rows = [tokens[start : start + data.block_size] for start in starts]
        return {"input_ids": rows, "labels": [list(row) for row in rows]}

    tokenized = texts.map(tokenize, batched=True, remove_columns=["text"])
    return tokenized.map(group, batched=True)


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train and evaluate as the command line says; returns the metrics."""
    parser = HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses(arguments)
    logging.basicConfig(level=training_args.get_process_log_level(), stream=sys.stderr)
    set_seed(training_args.seed)

    tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(
        model_args.model_name_or_path, dtype=model_args.dtype
    )
    rows = load_rows(data_args, tokenizer)
    if training_args.do_eval and "validation" not in rows:
        raise ValueError("--do_eval needs --validation_file")

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=rows["train"],
        eval_dataset=rows.get("validation"),
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    metrics: dict[str, float] = {}
    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
        metrics.update(result.metrics)
    if training_args.do_eval:
        evaluated = trainer.evaluate()
        evaluated["perplexity"] = math.exp(min(evaluated["eval_loss"], 700.0))
        trainer.save_metrics("eval", evaluated)
        metrics.update(evaluated)
    logger.info("%s", metrics)
    return metrics


if __name__ == "__main__":
    main()
