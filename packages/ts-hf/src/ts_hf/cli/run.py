"""One fine-tune from settings to report, resumable at any point."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from rich.console import Console

from ts_core.errors import DataError, NotAvailableError, OptionError, StateError
from ts_hf.adapters import save_adapter
from ts_hf.checkpoints.atomic import atomic_directory, clean_leftovers
from ts_hf.checkpoints.locate import resolve_folder
from ts_hf.cli.config import FinetuneConfig, differing_keys
from ts_hf.cli.data import PadCollator, Rows, check_sources, prepare_rows
from ts_hf.cli.history import History
from ts_hf.cli.machine import DTYPES, pick_device, pick_dtype, streaming_options
from ts_hf.cli.progress import Interruption, ProgressCallback
from ts_hf.cli.report import memory_by_tier, plot_run, print_report, write_json
from ts_hf.demo_model import NAME as DEMO_MODEL
from ts_hf.demo_model import demo_model_folder
from ts_hf.families import find_decoder_layers
from ts_hf.loading import load_model
from ts_hf.sizes import format_bytes
from ts_hf.training.checkpointing import last_checkpoint

INTERRUPTED = 130


def run_finetune(config: FinetuneConfig, console: Console | None = None) -> int:
    """Fine-tune as `config` says; continues a run that was interrupted in the same output folder.

    Leaves in the output folder: adapter/ (or model/), loss_and_memory.png, results.json,
    history.jsonl, run.json, run.lock and checkpoints/.

    Returns:
        0 when finished, 130 when interrupted.

    Raises:
        OptionError: the folder holds a run with other settings; names the keys.
        StateError: another process is at work in the folder.
        DataError, OutOfBudgetError, NonFiniteError: as the parts say.
    """
    output = Path(config.output)
    output.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(output / "run.lock", timeout=0):
            return _Run(config, console or Console()).run()
    except Timeout as error:
        raise StateError(
            f"another process is fine-tuning into {output} now. Wait for it, or use another output."
        ) from error


def _loss_chunk(vocabulary: int) -> int:
    """Rows of logits at a time: about 64 MiB of them in fp32, at most 1024."""
    rows = (64 << 20) // (4 * vocabulary)
    return max(16, min(1024, 1 << max(0, rows.bit_length() - 1)))


def _check_lengths(seq_length: int, model_config: Any) -> None:
    most = getattr(model_config, "max_position_embeddings", None)
    if most is not None and seq_length > most:
        raise OptionError(
            f"seq_length={seq_length} is more than the model's {most} positions. Use at most that."
        )


class _Run:
    def __init__(self, config: FinetuneConfig, console: Console) -> None:
        self.config = config
        self.console = console
        self.output = Path(config.output)
        self.checkpoints = self.output / "checkpoints"
        self.notes: dict[str, Any] = {}

    def run(self) -> int:
        self._claim_folder()
        if (self.output / "results.json").is_file():
            self.console.print(
                f"{self.output} holds a finished run (results.json). Choose another output to "
                f"train again."
            )
            return 0
        self.device = pick_device(self.config.device)
        self.notes.setdefault("dtype", pick_dtype(self.config.dtype, self.device))
        given = self.config.held_out
        check_sources([*self.config.data, *([] if given is None else [given])])
        torch.manual_seed(self.config.seed)
        model, tokenizer = self._load()
        train, held_out = self._rows(model, tokenizer)
        interruption = Interruption(self.console)
        try:
            with interruption.watch():
                return self._train(model, tokenizer, train, held_out, interruption)
        except KeyboardInterrupt:
            return self._interrupted()

    # -- set-up ----------------------------------------------------------------------------

    def _claim_folder(self) -> None:
        """Read what an earlier run left here, or begin a new one."""
        file = self.output / "run.json"
        mine = json.loads(json.dumps(dataclasses.asdict(self.config)))
        if file.is_file():
            try:
                self.notes = json.loads(file.read_text(encoding="utf-8"))
                earlier = self.notes["config"]
            except (ValueError, KeyError) as error:
                raise DataError(f"{file} is damaged: {error!r}. Use another output.") from error
            different = differing_keys(earlier, mine)
            if different:
                listed = ", ".join(f"{k}: {a!r} -> {b!r}" for k, (a, b) in different.items())
                raise OptionError(
                    f"{self.output} holds a run with other settings ({listed}). Use the same "
                    f"settings to continue it, or another output for a new run."
                )
            for line in clean_leftovers(self.output):
                self.console.print(line)
        self.notes["config"] = mine

    def _keep_notes(self, **values: Any) -> None:
        self.notes.update(values)
        self.output.mkdir(parents=True, exist_ok=True)
        write_json(self.output / "run.json", self.notes)

    def _load(self) -> tuple[Any, Any]:
        from transformers import AutoTokenizer

        config = self.config
        started = time.perf_counter()
        if config.model == DEMO_MODEL:
            folder = demo_model_folder()
        else:
            folder = resolve_folder(config.model, weights=True)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"{folder} has no tokenizer that transformers can load: {error}"
            ) from error
        model = load_model(
            folder,
            quantize="none" if config.method == "full" else config.quantize,
            dtype=DTYPES[self.notes["dtype"]],
        )
        if config.method == "lora":
            model = self._add_lora(model)
        if config.gradient_checkpointing:
            model.enable_input_require_grads()
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        report = model.get_base_model() if config.method == "lora" else model
        self.console.print(
            f"{config.model}: {report.trainstream_load.summary()}; {trained:,} trained values; "
            f"ready after {time.perf_counter() - started:.1f} s"
        )
        return model, tokenizer

    def _add_lora(self, model: Any) -> Any:
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError as error:
            raise NotAvailableError(
                "method='lora' needs the peft package: pip install 'ts-hf[lora]'"
            ) from error
        config = self.config
        targets: Any = list(config.lora_targets)
        if targets == ["all-linear"]:
            targets = "all-linear"
        try:
            return get_peft_model(
                model,
                LoraConfig(
                    r=config.lora_rank,
                    lora_alpha=config.lora_alpha,
                    lora_dropout=config.lora_dropout,
                    target_modules=targets,
                    task_type="CAUSAL_LM",
                ),
                autocast_adapter_dtype=False,  # the optimizer keeps an fp32 master copy of bf16
            )
        except ValueError as error:
            raise OptionError(f"lora_targets={targets!r}: {error}") from error

    def _rows(self, model: Any, tokenizer: Any) -> tuple[Rows, Rows]:
        config = self.config
        _check_lengths(config.seq_length, model.config)
        train, held_out = prepare_rows(
            config.data,
            config.held_out,
            tokenizer,
            seq_length=config.seq_length,
            train_rows=config.steps * config.batch_size * config.accumulation,
            eval_rows=config.eval_rows,
        )
        highest = max(train.highest_token(), held_out.highest_token())
        if highest >= model.config.vocab_size:
            raise DataError(
                f"the tokenizer gives token {highest}, but the model knows "
                f"{model.config.vocab_size} tokens. Tokenizer and model do not belong together."
            )
        mark = f"{train.fingerprint()}-{held_out.fingerprint()}"
        if self.notes.setdefault("data", mark) != mark:
            raise OptionError(
                f"the data of the run in {self.output} has changed since it began. Restore it to "
                f"continue, or use another output for a new run."
            )
        self.console.print(
            f"data: {len(train)} rows to train on ({train.tokens:,} tokens), {len(held_out)} held "
            f"out ({held_out.tokens:,} tokens)"
        )
        return train, held_out

    # -- training ----------------------------------------------------------------------------

    def _train(
        self,
        model: Any,
        tokenizer: Any,
        train: Rows,
        held_out: Rows,
        interruption: Interruption,
    ) -> int:
        from transformers import set_seed

        config = self.config
        checkpoint = last_checkpoint(self.checkpoints)
        done = 0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2])
        history = History(self.output / "history.jsonl", upto_step=done)
        progress = ProgressCallback(
            self.console,
            history,
            interruption,
            tokens_per_step=config.seq_length * config.batch_size * config.accumulation,
        )
        trainer = self._trainer(model, tokenizer, train, held_out, progress)
        if checkpoint is not None:
            self.console.print(f"continuing after step {done}, from {checkpoint}")
        if "held_out_before" not in self.notes:
            before = self._held_out_loss(trainer, "before")
            self._keep_notes(held_out_before=before)
        else:
            self._keep_notes()
        if done >= config.steps:
            trainer._load_from_checkpoint(str(checkpoint))
        else:
            # From here the numbers do not depend on what ran before, so that a run killed before
            # its first checkpoint repeats itself; a checkpoint brings its own random state.
            set_seed(config.seed)
            try:
                trainer.train(
                    resume_from_checkpoint=None if checkpoint is None else str(checkpoint)
                )
            finally:
                progress.close()
            if trainer.state.global_step < config.steps:
                return self._interrupted()
        after = self._held_out_loss(trainer, "after")
        self._finish(trainer, tokenizer, history, progress, after)
        return 0

    def _trainer(
        self, model: Any, tokenizer: Any, train: Rows, held_out: Rows, progress: Any
    ) -> Any:
        from transformers import PrinterCallback, TrainingArguments

        from ts_hf.training.trainer import TrainStreamTrainer

        config = self.config
        arguments = TrainingArguments(
            output_dir=str(self.checkpoints),
            max_steps=config.steps,
            per_device_train_batch_size=config.batch_size,
            per_device_eval_batch_size=config.batch_size,
            gradient_accumulation_steps=config.accumulation,
            learning_rate=config.lr,
            warmup_steps=round(config.warmup * config.steps),
            lr_scheduler_type=config.schedule,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
            gradient_checkpointing=config.gradient_checkpointing,
            logging_steps=1,
            save_strategy="steps",
            save_steps=config.save_every,
            save_total_limit=config.keep_checkpoints,
            seed=config.seed,
            use_cpu=self.device == "cpu",
            dataloader_pin_memory=self.device == "cuda",
            remove_unused_columns=False,
            report_to=[],
            disable_tqdm=True,
        )
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        trainer = TrainStreamTrainer(
            model=model,
            args=arguments,
            train_dataset=train,
            eval_dataset=held_out,
            data_collator=PadCollator(pad),
            callbacks=[progress],
            trainstream={
                **streaming_options(model, config.block_limit_bytes, self.device),
                "loss_chunk_size": _loss_chunk(model.config.vocab_size),
            },
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    def _held_out_loss(self, trainer: Any, when: str) -> float:
        started = time.perf_counter()
        loss = float(trainer.evaluate()["eval_loss"])
        self.console.print(
            f"held-out loss {when}: {loss:.4f} ({time.perf_counter() - started:.1f} s)"
        )
        return loss

    # -- ends --------------------------------------------------------------------------------

    def _interrupted(self) -> int:
        checkpoint = last_checkpoint(self.checkpoints)
        if checkpoint is None:
            self.console.print("Interrupted before the first checkpoint; nothing is kept.")
        else:
            self.console.print(
                f"Interrupted. The last complete checkpoint is {checkpoint}. Run the same command "
                f"again to continue from it."
            )
        return INTERRUPTED

    def _finish(
        self, trainer: Any, tokenizer: Any, history: History, progress: Any, after: float
    ) -> None:
        config, model = self.config, trainer.model
        blocks = find_decoder_layers(model)
        before = self.notes["held_out_before"]
        if config.method == "lora":
            saved = save_adapter(model, self.output / "adapter")
        else:
            saved = self.output / "model"
            trainer.before_save()
            with atomic_directory(saved) as aside:
                model.save_pretrained(str(aside))
                tokenizer.save_pretrained(str(aside))
        plot = self.output / "loss_and_memory.png"
        losses = {"before": before, "after": after}
        plot_run(history, losses, config.steps, plot)
        speed = history.series("tokens_per_second")[1]
        results = {
            "held_out_loss": losses,
            "steps": config.steps,
            "tokens_per_second": speed[-1] if speed else 0.0,
            "device": self.device,
            "dtype": self.notes["dtype"],
            "memory": memory_by_tier(model, config.block_limit_bytes),
            "saved": str(saved),
            "plot": str(plot),
            "config": self.notes["config"],
            "events": list(model._trainstream_session.events),
        }
        write_json(self.output / "results.json", results)
        print_report(self.console, results, len(blocks))
        self.console.print(f"saved: {saved}, {plot}, {self.output / 'results.json'}")
        limit = config.block_limit_bytes
        if limit is not None and self.device == "cpu":
            peak = results["memory"]["device"]["peak_allocated"]
            self.console.print(
                f"decoder-layer weights never took more than {format_bytes(peak)} of device pool"
            )
