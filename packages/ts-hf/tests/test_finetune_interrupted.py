"""`trainstream finetune` that is interrupted or killed, and goes on with the same command."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from ts_core.errors import OptionError
from ts_hf.cli import run as run_module
from ts_hf.cli.run import INTERRUPTED
from ts_hf.cli.settings import FinetuneConfig
from ts_hf.testing.runs import adapter_of, lines_of, results_of, run, steps_of

pytest.importorskip("peft", reason="the optional package peft is not installed")
pytestmark = pytest.mark.usefixtures("no_page")


class _At(TrainerCallback):  # type: ignore[misc]
    """Does something at the beginning of a step."""

    def __init__(self, step: int, action: Callable[[], None]) -> None:
        self.step, self.action = step, action

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            self.action()


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """at_step(n, action): run `action` at the beginning of step n of the next run."""

    def install(step: int, action: Callable[[], None]) -> None:
        original = run_module.make_trainer

        def trainer(*args: Any) -> Any:
            made = original(*args)
            made.add_callback(_At(step, action))
            return made

        monkeypatch.setattr(run_module, "make_trainer", trainer)

    return install


def test_ctrl_c_then_the_same_command_again(
    settings: Callable[..., FinetuneConfig], at_step: Callable[..., None]
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    whole = settings(output=settings().output + "-whole")
    assert run(whole)[0] == 0
    config = settings()
    at_step(3, lambda: os.kill(os.getpid(), signal.SIGINT))
    status, printed = run(config)
    assert status == INTERRUPTED
    assert "finishing this step" in printed and "Run the same command again" in printed
    assert "checkpoint-3" in printed
    assert not (Path(config.output) / "results.json").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    status, printed = run(config)  # the callback's step has passed
    assert status == 0 and "continuing after step 3" in printed
    assert results_of(config)["held_out_loss"] == results_of(whole)["held_out_loss"]
    wanted, found = adapter_of(whole), adapter_of(config)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    assert steps_of(config) == [1, 2, 3, 4, 5, 6]
    kinds = [line["kind"] for line in lines_of(config)]
    assert kinds.count("session") == kinds.count("end") == 2


def test_second_ctrl_c_stops_at_once(
    settings: Callable[..., FinetuneConfig], at_step: Callable[..., None]
) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    at_step(4, twice)
    config = settings()
    status, printed = run(config)
    assert status == INTERRUPTED
    names = sorted(p.name for p in (Path(config.output) / "checkpoints").iterdir())
    assert names == ["checkpoint-2"] and "checkpoint-2" in printed


KILLED = """
import os, signal, sys, json
import torch
torch.set_num_threads(1)
from ts_hf.cli import run as module
from ts_hf.cli.settings import FinetuneConfig
from ts_hf.cli.progress import ProgressCallback

original = ProgressCallback.on_step_begin

def on_step_begin(self, args, state, control, **kwargs):
    if state.global_step + 1 == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    original(self, args, state, control, **kwargs)

ProgressCallback.on_step_begin = on_step_begin
values = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(sys.argv[1]).items()}
module.run_finetune(FinetuneConfig(**values))
"""


def test_kill_9_then_the_same_command_again(settings: Callable[..., FinetuneConfig]) -> None:
    config = settings()
    values = json.dumps(dataclasses.asdict(config))
    done = subprocess.run(
        [sys.executable, "-c", KILLED, values], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == -9, done.stderr
    assert "step 4/6" in done.stdout or (Path(config.output) / "checkpoints/checkpoint-4").is_dir()
    status, printed = run(config)
    assert status == 0 and "continuing after step 4" in printed
    whole = settings(output=config.output + "-whole")
    assert run(whole)[0] == 0
    wanted, found = adapter_of(whole), adapter_of(config)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    assert steps_of(config) == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in lines_of(config) if line["kind"] in ("step", "eval")] == [
        line["loss"] for line in lines_of(whole) if line["kind"] in ("step", "eval")
    ]


def test_killed_before_the_first_checkpoint(
    settings: Callable[..., FinetuneConfig],
    at_step: Callable[[int, Callable[[], None]], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The held-out loss is not measured again, and training still repeats itself."""

    def dies() -> None:
        raise KeyboardInterrupt

    config = settings()
    at_step(2, dies)
    assert run(config)[0] == INTERRUPTED
    monkeypatch.undo()
    status, printed = run(config)
    assert status == 0 and "held-out loss before" not in printed
    whole = settings(output=config.output + "-whole")
    assert run(whole)[0] == 0
    wanted, found = adapter_of(whole), adapter_of(config)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_a_run_that_never_came_to_train_does_not_hold_the_folder(
    settings: Callable[..., FinetuneConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError("no such luck")

    config = settings(steps=1)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no such luck"):
        patch.setattr(run_module, "generate", fails)
        run(config)
    assert [line["kind"] for line in lines_of(config)][-1] == "end"
    assert lines_of(config)[-1]["reason"] == "RuntimeError: no such luck"
    changed = dataclasses.replace(config, lr=0.5)
    assert run(changed)[0] == 0
    assert [line["kind"] for line in lines_of(config)].count("session") == 1


def test_killed_after_the_last_step(
    settings: Callable[..., FinetuneConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is trained, nothing is reported yet: the same command finishes it."""

    def dies(self: Any, *args: Any) -> None:
        raise KeyboardInterrupt

    config = settings()
    with monkeypatch.context() as patch:
        patch.setattr(run_module._Run, "_finish", dies)
        assert run(config)[0] == INTERRUPTED
    status, printed = run(config)
    assert status == 0 and "continuing after step 6" in printed
    whole = settings(output=config.output + "-whole")
    run(whole)
    assert results_of(config)["held_out_loss"] == results_of(whole)["held_out_loss"]


def test_changed_settings_are_refused_by_name(
    settings: Callable[..., FinetuneConfig], at_step: Callable[..., None]
) -> None:
    at_step(3, lambda: os.kill(os.getpid(), signal.SIGINT))
    config = settings()
    assert run(config)[0] == INTERRUPTED
    with pytest.raises(OptionError, match=r"other settings \(lora_rank: 8 -> 4, lr: 0.01 -> 0.5\)"):
        run(dataclasses.replace(config, lr=0.5, lora_rank=4))
    texts = Path(config.data[0])
    for file in texts.iterdir():
        file.write_text("something else entirely. " * 40)
    with pytest.raises(OptionError, match=r"data of the run .* has changed"):
        run(config)
