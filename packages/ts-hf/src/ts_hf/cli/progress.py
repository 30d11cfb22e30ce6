"""The progress bar, the step-by-step history, and Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

from ts_hf.cli.history import History


class Interruption:
    """Ctrl-C during training: the first asks to stop after the step, the second stops at once."""

    def __init__(self, console: Console) -> None:
        self.asked = False
        self._console = console

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Take SIGINT while the block runs (in the main thread; elsewhere nothing is taken)."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.signal(signal.SIGINT, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self._console.print(
            "[yellow]Ctrl-C: finishing this step and saving it; again to stop at once.[/yellow]"
        )


class ProgressCallback(TrainerCallback):  # type: ignore[misc]
    """Shows loss and speed, records the history, and stops when asked to.

    Args:
        console: where to print; without a terminal a line is printed now and then instead.
        history: gets a line per step: loss, memory, speed.
        interruption: checked after each step.
        tokens_per_step: for the speed.
    """

    def __init__(
        self,
        console: Console,
        history: History,
        interruption: Interruption,
        tokens_per_step: int,
    ) -> None:
        self._console = console
        self._history = history
        self._interruption = interruption
        self._tokens = tokens_per_step
        self._process = psutil.Process()
        self._progress: Progress | None = None
        self._last = 0.0
        self.seconds = 0.0  # spent in steps, in this session
        self.steps = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._last = time.perf_counter()
        if self._console.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._progress.add_task(
                "training", total=state.max_steps, completed=state.global_step, note=""
            )
            self._progress.start()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._last = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds += time.perf_counter() - self._last
        self.steps += 1
        if self._interruption.asked:
            control.should_save = True
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        speed = self._tokens * self.steps / max(self.seconds, 1e-9)
        memory = {name: value for name, value in logs.items() if name.startswith("ts_")}
        self._history.add(
            step=state.global_step,
            loss=logs["loss"],
            grad_norm=logs.get("grad_norm"),
            lr=logs.get("learning_rate"),
            tokens_per_second=speed,
            rss_gb=self._process.memory_info().rss / 1e9,
            **memory,
        )
        note = f"loss {logs['loss']:.3f}  {speed:,.0f} tokens/s"
        if self._progress is not None:
            self._progress.update(self._task, completed=state.global_step, note=note)
        elif state.global_step % max(1, state.max_steps // 10) == 0:
            self._console.print(f"step {state.global_step}/{state.max_steps}  {note}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Stop drawing."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
