"""One fine-tune from settings to report, resumable at any point."""

from __future__ import annotations

import gc
import importlib.metadata
import math
import os
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import torch
from filelock import FileLock, Timeout
from rich.console import Console

from ts_core.errors import DataError, NonFiniteError, OptionError, StateError
from ts_hf.cli.dataset import (
    check_lengths,
    check_tokens,
    make_collator,
    make_rows,
    planned_steps,
    told_rows,
)
from ts_hf.cli.finish import check_merge, merge_trained, save_trained, write_page
from ts_hf.cli.folder import LOCK, RunFolder, write_json
from ts_hf.cli.history import History
from ts_hf.cli.machine import DTYPES, pick_device, pick_dtype
from ts_hf.cli.model import load_for_training, load_tokenizer, model_folder
from ts_hf.cli.progress import Interruption, ProgressCallback
from ts_hf.cli.report import PlainConsole, memory_by_tier, plot_run, print_report
from ts_hf.cli.rows import Rows, split_sources
from ts_hf.cli.samples import are_turns, generate, prompt_tokens
from ts_hf.cli.settings import FinetuneConfig
from ts_hf.cli.sources import Document, check_sources, overlaps
from ts_hf.cli.team import Team
from ts_hf.cli.trainers import make_trainer, training_arguments
from ts_hf.families import find_decoder_layers
from ts_hf.sizes import format_bytes
from ts_hf.training.checkpointing import last_checkpoint

INTERRUPTED = 130
_PROMPT_SHOWN = 80  # characters of a sample's beginning, on the screen
_PACKAGES = ("torch", "transformers", "peft", "ts-core", "ts-hf", "ts-quant", "ts-kernels")


def run_finetune(config: FinetuneConfig, console: Console | None = None) -> int:
    """Fine-tune as `config` says; continues a run that was interrupted in the same output folder.

    Leaves in the output folder what docs/finetune.md lists ("The run folder").

    Returns:
        0 when finished, 130 when interrupted.

    Raises:
        OptionError: the folder holds a run with other settings; names the keys.
        StateError: another process is at work in the folder.
        DataError, OutOfBudgetError, NonFiniteError: as the parts say.
    """
    device = pick_device(config.device)
    with ExitStack() as held, Team(device) as team:
        team.lead(lambda: _take_folder(Path(config.output), held))
        console = console or PlainConsole()
        return _Run(config, console if team.first else Console(quiet=True), team, device).run()


def _take_folder(output: Path, held: ExitStack) -> None:
    """Make the folder, and keep other runs out of it until `held` ends."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"output={str(output)!r} cannot be made: {error.strerror}.") from error
    try:
        held.enter_context(FileLock(output / LOCK, timeout=0))
    except Timeout as error:
        raise StateError(
            f"another process is fine-tuning into {output} now. Wait for it, or use another output."
        ) from error


class _Run:
    def __init__(self, config: FinetuneConfig, console: Console, team: Team, device: str) -> None:
        self.config = config
        self.console = console
        self.team = team
        self.device = device
        self.history: History | None = None
        self._turns = True
        self.notes: dict[str, Any] = team.lead(self._open)
        if not team.first:
            self.folder = RunFolder(config, self.notes)

    def _open(self) -> dict[str, Any]:
        """Check the settings against the folder; what it knows of its run (first process)."""
        check_merge(self.config)
        self.folder = RunFolder(self.config)
        notes = self.folder.notes
        begun_with = notes.get("processes", 1)
        if self.folder.begun and begun_with != self.team.size:
            raise OptionError(
                f"{self.folder.path} holds a run of {begun_with} processes, and these are "
                f"{self.team.size}. Start {begun_with} to continue it, or use another output."
            )
        notes["processes"] = self.team.size
        others = self.folder.others()
        for line in [*self.folder.tidy(), *([] if others is None else [others])]:
            self.console.print(line, markup=False, highlight=False)
        notes.setdefault("dtype", pick_dtype(self.config.dtype, self.device))
        given = self.config.held_out
        if not self.folder.finished():
            check_sources([*self.config.data, *([] if given is None else [given])])
        return notes

    def run(self) -> int:
        if self.team.lead(self.folder.finished):
            if not self.team.first:
                return 0
            if self._to_merge():
                self._merge()
            else:
                self.console.print(
                    f"{self.folder.path} holds a finished run (results.json). Choose another "
                    f"output to train again."
                )
            return 0
        interruption = Interruption(self.console)
        try:
            with interruption.watch():
                status = self._prepare_and_train(interruption)
        except KeyboardInterrupt:
            status = self._interrupted()
        except BaseException as error:
            if not interruption.stopped:
                self._end("failed", f"{type(error).__name__}: {error}")
                raise
            status = self._interrupted()  # an import makes another error of it
        if status == 0 and self.team.first:
            if self._to_merge():
                self._merge()
            write_page(self.folder.path, self.console)
        return status

    def _prepare_and_train(self, interruption: Interruption) -> int:
        folder = self.team.lead(lambda: model_folder(self.config))  # a GGUF is converted once
        model, tokenizer, train, held_out = self.team.together(lambda: self._prepare(folder))
        marks = self.team.gather(f"{train.fingerprint()}-{held_out.fingerprint()}")
        self.team.together(lambda: self._check_data(marks))
        return self._train(model, tokenizer, train, held_out, interruption)

    def _prepare(self, folder: Path) -> tuple[Any, Any, Rows, Rows]:
        """(model, tokenizer, rows to train on, held-out rows)."""
        config = self.config
        documents = split_sources(
            config.data, config.held_out, config.held_out_share, pairs=config.method == "dpo"
        )
        self._turns = are_turns(documents[0])
        tokenizer = load_tokenizer(config, folder)
        torch.manual_seed(config.seed)
        started = time.perf_counter()
        model = load_for_training(config, folder, DTYPES[self.notes["dtype"]])
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        inner = model if config.method == "full" else model.get_base_model()
        self.console.print(
            f"{config.model}: {inner.trainstream_load.summary()}; {trained:,} trained values; "
            f"{self.notes['dtype']} on {self.device}; "
            f"ready after {time.perf_counter() - started:.1f} s"
        )
        self.notes["device"] = self.device
        self.notes["model"] = {
            "class": type(inner).__name__,
            "parameters": sum(p.numel() for p in inner.parameters()),
            "trained": trained,
        }
        return model, tokenizer, *self._rows(documents, tokenizer, inner.config)

    def _rows(
        self,
        documents: tuple[list[Document], list[Document]],
        tokenizer: Any,
        model_config: Any,
    ) -> tuple[Rows, Rows]:
        config = self.config
        check_lengths(config, model_config)
        train, held_out = make_rows(config, documents, tokenizer, self.team.size)
        check_tokens(train, held_out, model_config)
        remarks = overlaps(config.data, config.held_out)
        for line in [*told_rows(config, train, held_out, self.team.size), *remarks]:
            self.console.print(f"data: {line}", markup=False, highlight=False)
        self.notes["rows"] = {
            "train": len(train),
            "train_of": train.of,
            "train_tokens": train.tokens,
            "held_out": len(held_out),
            "held_out_tokens": held_out.tokens,
            "notes": [*train.notes, *remarks],
        }
        return train, held_out

    def _check_data(self, marks: list[str]) -> None:
        if self.notes.setdefault("data", marks[0]) != marks[0]:
            raise OptionError(
                f"the data of the run in {self.folder.path} has changed since it began. Restore "
                f"it to continue, or use another output for a new run."
            )
        if set(marks) != {marks[0]}:
            raise DataError("data: the processes read different data. Give all of them the same.")

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
        steps = planned_steps(config, len(train), self.team.size)
        checkpoint = self.team.lead(lambda: last_checkpoint(self.folder.checkpoints))
        done = 0 if checkpoint is None else int(checkpoint.name.rpartition("-")[2])
        self.folder.keep(steps=steps)  # first, so that what follows is known as this run's
        history = History(self.folder.history if self.team.first else None, upto_step=done)
        self.history = history
        history.add("session", done, **_session())
        pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        arguments = training_arguments(config, self.folder.checkpoints, self.device, steps)
        collator = make_collator(config, pad)
        trainer = make_trainer(config, model, arguments, train, held_out, collator)
        if config.method == "dpo":
            self._add_references(trainer, train, held_out, pad)
        progress = ProgressCallback(
            self.console, history, interruption, trainer.take_tokens, self.team
        )
        trainer.add_callback(progress)
        if checkpoint is not None:
            self.console.print(f"continuing after step {done}, from {checkpoint}")
        prompts = prompt_tokens(
            tokenizer, config.prompts, held_out.openings, config.samples, self._turns
        )
        if "held_out_before" not in self.notes:
            before = self._measure(trainer, progress, "before", 0)
            if self.team.first and not _has_samples(history, "before"):
                self._samples(trainer, tokenizer, prompts, "before", 0)
            self.folder.keep(held_out_before=before)
        if done >= steps:
            trainer._load_from_checkpoint(str(checkpoint))
            trainer.create_optimizer()  # wraps the model
            trainer.state.global_step = done
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
            interruption.in_steps = False
            if trainer.state.global_step < steps:
                return self._interrupted()
        measured = self.team.lead(
            lambda: [line["loss"] for line in history.of("eval") if line["step"] == steps]
        )
        if measured:  # eval_every fell on the last step
            after = float(measured[-1])
        else:
            after = self._measure(trainer, progress, "after", steps)
        if not math.isfinite(after):
            raise NonFiniteError(
                f"the held-out loss after training is {after}: the last update made the weights "
                f"unusable, and they are not saved. Use another output and a lower learning rate "
                f"(lr={config.lr})."
            )
        if not self.team.first:
            return 0  # the first process writes what is left to write
        self._samples(trainer, tokenizer, prompts, "after", steps)
        self._finish(trainer, tokenizer, history, progress, steps, after)
        return 0

    def _add_references(self, trainer: Any, train: Rows, held_out: Rows, pad: int) -> None:
        from ts_hf.cli.preference import add_references

        rows = add_references(
            trainer,
            {"train": train, "held_out": held_out},
            self.folder.path,
            mark=self.notes["data"],
            batch_size=self.config.batch_size,
            pad_id=pad,
            console=self.console,
            team=self.team,
        )
        trainer.train_dataset, trainer.eval_dataset = rows["train"], rows["held_out"]

    def _measure(self, trainer: Any, progress: ProgressCallback, when: str, step: int) -> float:
        """The held-out loss; kept in the history by the callback."""
        started = time.perf_counter()
        metrics = trainer.evaluate()
        progress.look(trainer.model, step)
        loss = float(metrics["eval_loss"])
        self.console.print(
            f"held-out loss {when}: {loss:.4f} ({time.perf_counter() - started:.1f} s)"
        )
        return loss

    def _samples(
        self, trainer: Any, tokenizer: Any, prompts: list[list[int]], when: str, step: int
    ) -> None:
        if not prompts:
            return
        assert self.history is not None
        device = trainer.args.device
        for sample in generate(
            trainer.model, tokenizer, prompts, self.config.sample_tokens, device
        ):
            self.history.add("sample", step, when=when, prompt=sample.prompt, text=sample.text)
            given = sample.prompt[-_PROMPT_SHOWN:]
            given = given if given == sample.prompt else f"...{given}"
            given, made = (text.replace("\n", "\\n") for text in (given, sample.text))
            made = made or "(nothing: it ends there)"
            self.console.print(
                f"sample {when}: [{given}] goes on: {made}", markup=False, highlight=False
            )

    # -- ends --------------------------------------------------------------------------------

    def _end(self, status: str, reason: str | None = None) -> None:
        if self.history is None:
            return
        step = max((line["step"] for line in self.history.of("step")), default=0)
        try:
            self.history.add("end", step, status=status, reason=reason)
        except OSError as error:  # it must not take the place of the reason
            self.console.print(f"{self.history.file} cannot be written: {error.strerror}")

    def _interrupted(self) -> int:
        self._end("interrupted")
        checkpoint = last_checkpoint(self.folder.checkpoints)
        if checkpoint is None:
            self.console.print("Interrupted before the first checkpoint; nothing is kept.")
        else:
            self.console.print(
                f"Interrupted. The last complete checkpoint is {checkpoint}. Run the same command "
                f"again to continue from it."
            )
        return INTERRUPTED

    def _finish(
        self,
        trainer: Any,
        tokenizer: Any,
        history: History,
        progress: ProgressCallback,
        steps: int,
        after: float,
    ) -> None:
        config, model = self.config, trainer.model
        blocks = find_decoder_layers(model)
        saved = save_trained(config, trainer, tokenizer, self.folder.path)
        progress.look(model, steps)
        plot = self.folder.path / "loss_and_memory.png"
        losses = {"before": self.notes["held_out_before"], "after": after}
        plot_run(history, plot)
        timed = history.of("step")
        seconds = sum(line["step_s"] for line in timed)
        results = {
            "format": self.notes["format"],
            "held_out_loss": losses,
            "held_out_rewards": _rewards(history),
            "steps": steps,
            "tokens_per_second": sum(line["tokens"] for line in timed) / max(seconds, 1e-9),
            "seconds": seconds,
            "device": self.device,
            "processes": self.team.size,
            "dtype": self.notes["dtype"],
            "memory": memory_by_tier(model, config.block_limit_bytes),
            "saved": str(saved),
            "plot": str(plot),
            "config": self.notes["config"],
            "events": list(model._trainstream_session.events),
        }
        write_json(self.folder.results, results)
        self._end("finished")
        print_report(self.console, results, len(blocks))
        self.console.print(f"saved: {saved}, {plot}, {self.folder.results}")
        limit = config.block_limit_bytes
        if limit is not None and self.device == "cpu":
            peak = results["memory"]["device"]["peak_allocated"]
            self.console.print(
                f"decoder-layer weights never took more than {format_bytes(peak)} of device pool"
            )

    def _to_merge(self) -> bool:
        return self.config.merge != "none" and not (self.folder.path / "merged").exists()

    def _merge(self) -> None:
        gc.collect()  # the trained model, which nothing here refers to any more
        dtype = DTYPES[self.notes["dtype"]]
        merge_trained(self.config, dtype, self.folder.path, self.console)


def _rewards(history: History) -> dict[str, dict[str, float]] | None:
    """Of preference training, the held-out pairs' rewards before and after; else None."""
    names = ("reward_accuracy", "reward_margin")
    found = [
        {name: line[name] for name in names} for line in history.of("eval") if names[0] in line
    ]
    return {"before": found[0], "after": found[-1]} if found else None


def _has_samples(history: History, when: str) -> bool:
    return any(line.get("when") == when for line in history.of("sample"))


def _session() -> dict[str, Any]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    process = psutil.Process(os.getpid())
    return {
        "pid": process.pid,
        "process_started": process.create_time(),
        "host": socket.gethostname(),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "ram_gb": psutil.virtual_memory().total / 1e9,
        "gpu": gpu,
        "versions": versions,
    }
