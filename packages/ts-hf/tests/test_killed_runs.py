"""Twenty steps at once equal ten, kill -9, and the rest: bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

STEPS, SAVE_EVERY, KILLED_AT = 20, 10, 13

# Run by another process up to the kill, and by this one for the run without interruption and for
# the resumed one.
PROGRAM = '''
import os, signal, sys
import torch
import ts_hf
from transformers import Trainer, TrainerCallback, TrainingArguments


class Killed(TrainerCallback):
    """Dies in the middle of a step, three steps after a checkpoint."""

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def build(kind, folder, output, rows, callbacks=()):
    torch.set_num_threads(1)
    torch.manual_seed(11)
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        model = ts_hf.load_model(folder, quantize="nf4", dtype=torch.float32)
        config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.2)
        model = get_peft_model(model, config)
        options = {"param_offload": True, "packing": 16}
    else:
        dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
        model = ts_hf.load_model(folder, quantize=None, dtype=dtype, attention_dropout=0.1)
        options = {"moment_dtype": "bfloat16"} if kind == "bfloat16" else {}
    arguments = TrainingArguments(
        output_dir=str(output), max_steps=STEPS, per_device_train_batch_size=2,
        gradient_accumulation_steps=2, learning_rate=1e-2, warmup_steps=4,
        lr_scheduler_type="cosine", max_grad_norm=0.5, save_strategy="steps",
        save_steps=SAVE_EVERY, save_total_limit=2, logging_steps=1, report_to=[], use_cpu=True,
        disable_tqdm=True, log_level="error",
    )
    return ts_hf.TrainStreamTrainer(
        model=model, args=arguments, train_dataset=rows, callbacks=list(callbacks),
        trainstream=options,
    )
'''
PROGRAM = PROGRAM.replace("KILLED_AT", str(KILLED_AT)).replace("SAVE_EVERY", str(SAVE_EVERY))
PROGRAM = PROGRAM.replace("STEPS", str(STEPS))
RUN_AND_DIE = (
    PROGRAM
    + """
kind, folder, output, rows = sys.argv[1:]
rows = torch.load(rows, weights_only=True)
build(kind, folder, output, rows, [Killed()]).train()
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", "float32", "bfloat16"])
def test_resumed_after_kill_9(
    kind: str,
    tmp_path: Path,
    checkpoint: Callable[..., Path],
    token_rows: Callable[..., Any],
    request: pytest.FixtureRequest,
) -> None:
    """With dropout, accumulation with a short last window, clipping, a schedule and packing."""
    if kind == "lora":
        pytest.importorskip("peft", reason="the optional package peft is not installed")
        request.getfixturevalue("codec")
    folder, rows = checkpoint("llama"), token_rows(14, 12)
    torch.save(rows, tmp_path / "rows.pt")
    command = [sys.executable, "-c", RUN_AND_DIE, kind, str(folder), str(tmp_path / "run")]
    done = subprocess.run(
        [*command, str(tmp_path / "rows.pt")],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == -9, done.stderr
    assert [p.name for p in (tmp_path / "run").iterdir()] == [f"checkpoint-{SAVE_EVERY}"]

    space: dict[str, Any] = {}
    exec(PROGRAM, space)
    whole = space["build"](kind, folder, tmp_path / "whole", rows)
    whole.train()
    resumed = space["build"](kind, folder, tmp_path / "run", rows)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == whole.state.global_step == STEPS

    def logged(trainer: Any, key: str) -> list[float]:
        return [line[key] for line in trainer.state.log_history if key in line]

    for key in ("loss", "grad_norm", "learning_rate"):
        assert len(logged(whole, key)) == STEPS
        assert logged(resumed, key) == logged(whole, key)  # the first ten by the killed process
    wanted = dict(whole.model.named_parameters())
    for name, parameter in resumed.model.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, wanted[name]), name
    one, other = whole.optimizer.state_dict(), resumed.optimizer.state_dict()
    for index, entry in one["state"].items():
        for key, value in entry.items():
            assert torch.equal(value, other["state"][index][key]), (index, key)
