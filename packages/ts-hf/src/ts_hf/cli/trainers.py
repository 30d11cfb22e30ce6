"""The Trainer of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PrinterCallback, TrainingArguments

from ts_hf.cli.machine import streaming_options
from ts_hf.cli.settings import FinetuneConfig
from ts_hf.cli.streaming import parse_options
from ts_hf.cli.team import processes
from ts_hf.training.trainer import TrainStreamTrainer


class FinetuneTrainer(TrainStreamTrainer):
    """A TrainStreamTrainer that counts the tokens it trains on."""

    _tokens = 0

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """As TrainStreamTrainer's; the batches are still on the host, so counting is cheap."""
        samples, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        for batch in samples:
            self._tokens += _count(batch)
        return samples, num_items

    def take_tokens(self) -> int:
        """Tokens without padding since this was last called."""
        count, self._tokens = self._tokens, 0
        return count


def _count(batch: dict[str, Any]) -> int:
    """Tokens of a batch, without padding."""
    if batch.get("attention_mask") is not None:
        return int(batch["attention_mask"].sum())
    if "position_ids" not in batch:
        return int(batch["input_ids"].numel())
    positions = batch["position_ids"]  # of packed rows; 0 all over the padding at the end
    places = torch.arange(1, positions.shape[1] + 1)
    return int(((positions > 0) * places).amax(dim=1).sum())


def training_arguments(
    config: FinetuneConfig, output: Path, device: str, steps: int
) -> TrainingArguments:
    """What transformers is told."""
    return TrainingArguments(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=config.batch_size,
        gradient_accumulation_steps=config.accumulation,
        learning_rate=config.lr,
        warmup_steps=round(config.warmup * steps),
        lr_scheduler_type=config.schedule,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        gradient_checkpointing=config.gradient_checkpointing,
        logging_steps=1,
        eval_strategy="steps" if config.eval_every else "no",
        eval_steps=config.eval_every or None,
        save_strategy="steps",
        save_steps=config.save_every,
        save_total_limit=config.keep_checkpoints,
        seed=config.seed,
        use_cpu=device == "cpu",
        ddp_backend="gloo" if device == "cpu" and processes() > 1 else None,
        dataloader_pin_memory=device == "cuda",
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
    )


def make_trainer(
    config: FinetuneConfig,
    model: Any,
    arguments: TrainingArguments,
    train: Any,
    held_out: Any,
    collator: Any,
) -> FinetuneTrainer:
    """The Trainer, silent: what it logs goes to its callbacks.

    Raises:
        OptionError, OutOfBudgetError: block_limit cannot be kept.
    """
    device = "cpu" if arguments.use_cpu else "cuda"
    chunk_size = _loss_chunk(model.config.get_text_config(decoder=True).vocab_size)
    options: dict[str, Any] = {
        "model": model,
        "args": arguments,
        "train_dataset": train,
        "eval_dataset": held_out,
        "data_collator": collator,
        "trainstream": {
            **streaming_options(model, config.block_limit_bytes, device),
            "loss_chunk_size": chunk_size,
            **parse_options(config.options),
        },
    }
    if config.method == "dpo":
        from ts_hf.cli.preference import PreferenceTrainer

        trainer: FinetuneTrainer = PreferenceTrainer(
            **options,
            beta=config.dpo_beta,
            label_smoothing=config.dpo_label_smoothing,
            chunk_size=chunk_size,
        )
    else:
        trainer = FinetuneTrainer(**options)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _loss_chunk(vocabulary: int) -> int:
    """Rows of logits at a time: about 64 MiB of them in fp32, at most 1024."""
    rows = (64 << 20) // (4 * vocabulary)
    return max(16, min(1024, 1 << max(0, rows.bit_length() - 1)))
