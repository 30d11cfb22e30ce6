"""The processes of test_finetune_ranks: python finetune_ranks_worker.py SETTINGS_JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from ts_core.testing.processes import fork_ranks
from ts_hf.cli import run as run_module
from ts_hf.cli.run import INTERRUPTED, run_finetune
from ts_hf.cli.settings import FinetuneConfig


class At(TrainerCallback):  # type: ignore[misc]
    """Sends itself a signal in a step of the second process."""

    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.process_index == 1 and state.global_step + 1 == self.step:
            os.kill(os.getpid(), self.number)


def run(settings: dict[str, Any], *callbacks: TrainerCallback) -> Callable[[int], None]:
    """What one process does."""

    def work(rank: int) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
        torch.set_num_threads(1)
        original = run_module.make_trainer

        def make_trainer(*args: Any) -> Any:
            made = original(*args)
            for callback in callbacks:
                made.add_callback(callback)
            return made

        run_module.make_trainer = make_trainer
        run_module.plot_run = run_module.write_page = lambda *args: None
        values = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
        raise SystemExit(run_finetune(FinetuneConfig(**values)))

    return work


def main(lora: dict[str, Any], dpo: dict[str, Any] | None) -> None:
    fork_ranks(run({**lora, "output": f"{lora['output']}-whole"}))
    # Ctrl-C that reaches one process only: both stop after that step.
    found = fork_ranks(run(lora, At(2, signal.SIGINT)), round=1, check=False)
    assert found == [INTERRUPTED] * 2, found
    kept = sorted(path.name for path in Path(lora["output"], "checkpoints").iterdir())
    assert kept == ["checkpoint-2"], kept
    found = fork_ranks(run(lora, At(6, signal.SIGKILL)), round=2, check=False, patience=0)
    assert found[1] == -signal.SIGKILL, found
    fork_ranks(run(lora), round=3)
    if dpo is not None:
        fork_ranks(run(dpo), round=4)


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
