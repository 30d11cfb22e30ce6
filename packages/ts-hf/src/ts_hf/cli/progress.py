"""The progress bar, the step-by-step history, and Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback

from ts_hf.cli.history import History
from ts_hf.cli.placement import placement
from ts_hf.cli.team import Team


class Interruption:
    """Ctrl-C: stops at once, but during steps the first asks to stop after the step.

    Attributes:
        in_steps: whether there is a step to finish.
        asked: whether to stop after it.
        stopped: whether KeyboardInterrupt has been raised.
    """

    def __init__(self, console: Console) -> None:
        self.in_steps = self.asked = self.stopped = False
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
        if self.asked or not self.in_steps:
            self.stopped = True
            raise KeyboardInterrupt
        self.asked = True
        self._console.print(
            "Ctrl-C: finishing this step and saving it; again to stop at once.", style="yellow"
        )


class ProgressCallback(TrainerCallback):  # type: ignore[misc]
    """Shows loss and speed, records the history, and stops when asked to.

    A step is timed from its first micro-batch until its loss has been read, which waits for the
    device; evaluating and saving are not part of it.

    Args:
        console: where to print; without a terminal a line is printed now and then instead.
        history: gets a line per step, event, checkpoint and change of placement.
        interruption: checked after each step.
        take_tokens: tokens (without padding) of this process since it was last called.
        team: the processes that train together; all stop after the same step.
    """

    def __init__(
        self,
        console: Console,
        history: History,
        interruption: Interruption,
        take_tokens: Callable[[], int],
        team: Team,
    ) -> None:
        self._console = console
        self._history = history
        self._interruption = interruption
        self._take_tokens = take_tokens
        self._team = team
        self._step_tokens = 0
        self._process = psutil.Process()
        self._progress: Progress | None = None
        self._began = 0.0
        self._events_told = 0
        self._placement: dict[str, Any] = {}
        self._note = ""
        self._in_training = False
        self.seconds = 0.0  # spent in steps, in this session
        self.tokens = 0

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        self._in_training = True
        self._take_tokens()
        self.look(model, state.global_step)
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

    def look(self, model: Any, step: int) -> None:
        """Record what the session has decided since the last look."""
        session = getattr(model, "_trainstream_session", None)
        if session is None:
            return
        events = list(session.events)
        for text in events[self._events_told :]:
            self._history.add("event", step, text=text)
        if len(events) > self._events_told or not self._placement:
            found = placement(model)
            if found != self._placement:
                self._placement = found
                self._history.add("placement", step, **found)
        self._events_told = len(events)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._interruption.stopped:  # raised where Python drops it, such as in a destructor
            raise KeyboardInterrupt
        self._interruption.in_steps = True
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        asked, tokens = self._team.sum([self._interruption.asked, self._take_tokens()])
        self._step_tokens = int(tokens)
        if asked:
            control.should_save = True
            control.should_training_stop = True

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: Any = None,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        if not logs or "loss" not in logs:
            return
        seconds = time.perf_counter() - self._began
        tokens = self._step_tokens
        self.seconds += seconds
        self.tokens += tokens
        speed = tokens / max(seconds, 1e-9)
        extra = {
            name: value
            for name, value in logs.items()
            if name.startswith(("ts_", "reward_")) and value is not None
        }
        self._history.add(
            "step",
            state.global_step,
            loss=logs["loss"],
            grad_norm=logs.get("grad_norm"),
            lr=logs.get("learning_rate"),
            step_s=seconds,
            tokens=tokens,
            tokens_per_second=speed,
            rss_gb=self._process.memory_info().rss / 1e9,
            **extra,
        )
        self.look(model, state.global_step)
        self._note = f"loss {logs['loss']:.3f}  {self.tokens / self.seconds:,.0f} tokens/s"
        if logs.get("grad_norm") is not None:
            self._note = f"{self._note}  gradient {logs['grad_norm']:.2f}"
        if self._progress is not None:
            self._progress.update(self._task, completed=state.global_step, note=self._note)
        elif state.global_step % max(1, state.max_steps // 10) == 0:
            self._console.print(f"step {state.global_step}/{state.max_steps}  {self._note}")

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any
    ) -> None:
        found = {
            name.removeprefix("eval_"): value
            for name, value in (metrics or {}).items()
            if name.startswith(("eval_loss", "eval_reward_"))
        }
        seconds = (metrics or {}).get("eval_runtime")
        self._history.add("eval", state.global_step, seconds=seconds, **found)
        if self._in_training and "loss" in found:
            self._console.print(f"held-out loss at step {state.global_step}: {found['loss']:.4f}")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        path = f"{args.output_dir}/checkpoint-{state.global_step}"
        self._history.add("checkpoint", state.global_step, path=path)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def close(self) -> None:
        """Stop drawing."""
        self._in_training = False
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
