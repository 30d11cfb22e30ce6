"""Checkpoints are whole or not there; resuming goes on exactly where the run was."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

import ts_hf
from ts_core.errors import DataError, NonFiniteError, StateError
from ts_hf.training.checkpointing import last_checkpoint

ROWS, LENGTH, STEPS = 14, 12, 6


def _trained(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def _losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("kind", ["lora-quantized", "lora-bf16", "full", "full-bf16"])
@pytest.mark.parametrize("save_steps", [3, 4])
def test_resume_is_exact(
    kind: str,
    save_steps: int,
    tmp_path: Path,
    checkpoint: Callable[..., Path],
    request: pytest.FixtureRequest,
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """Six steps at once = some steps, all objects made anew, the rest.

    With dropout, accumulation, clipping and a schedule; step 4 is the end of the first epoch, whose
    last window is short.
    """
    folder = checkpoint("llama")

    def trainer() -> Any:
        torch.manual_seed(17)
        if kind == "lora-quantized":
            codec = request.getfixturevalue("codec")
            model = ts_hf.load_model(folder, quantize=codec, dtype=torch.float32)
            model = request.getfixturevalue("lora")(model, lora_dropout=0.2)
        elif kind == "lora-bf16":
            model = ts_hf.load_model(folder, quantize=None, dtype=torch.bfloat16)
            model = request.getfixturevalue("lora")(model, autocast=False, lora_dropout=0.2)
        else:
            dtype = torch.bfloat16 if kind == "full-bf16" else torch.float32
            model = ts_hf.load_model(folder, quantize=None, dtype=dtype, attention_dropout=0.1)
        return ts_hf.TrainStreamTrainer(
            model=model,
            args=training_arguments(
                save_strategy="steps",
                save_steps=save_steps,
                gradient_accumulation_steps=2,
                learning_rate=1e-2,
                warmup_steps=2,
            ),
            train_dataset=token_rows(ROWS, LENGTH),
            trainstream={"param_offload": kind == "lora-quantized"},
        )

    whole = trainer()
    whole.train()
    saved = tmp_path / "run" / f"checkpoint-{save_steps}"
    resumed = trainer()
    resumed.train(resume_from_checkpoint=saved)
    assert resumed.state.global_step == STEPS
    # The first losses come from the checkpoint's log, the others from the resumed run itself.
    assert _losses(resumed) == _losses(whole)
    wanted, found = _trained(whole.model), _trained(resumed.model)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    assert {name: value.dtype for name, value in wanted.items()} == {
        name: value.dtype for name, value in found.items()
    }
    one, other = whole.optimizer.state_dict(), resumed.optimizer.state_dict()
    for index, entry in one["state"].items():
        for key, value in entry.items():
            assert torch.equal(value, other["state"][index][key]), (index, key)
    assert [g["lr"] for g in one["param_groups"]] == [g["lr"] for g in other["param_groups"]]


def test_resume_true_takes_the_last_and_evaluating_first_changes_nothing(
    tmp_path: Path,
    tiny_model: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    def trainer(**changes: Any) -> Any:
        return ts_hf.TrainStreamTrainer(
            model=tiny_model("llama").to(torch.bfloat16),
            args=training_arguments(save_strategy="steps", save_steps=2, **changes),
            train_dataset=token_rows(ROWS, LENGTH),
            eval_dataset=token_rows(2, LENGTH, seed=5),
        )

    first = trainer()
    first.train()
    for name in ("checkpoint-6", "checkpoint-4"):  # as if it had stopped after step 2
        for file in (tmp_path / "run" / name).iterdir():
            file.unlink()
        (tmp_path / "run" / name).rmdir()
    second = trainer()
    second.evaluate()  # wraps the model before the checkpoint is loaded into it
    second.train(resume_from_checkpoint=True)
    wanted, found = _trained(first.model), _trained(second.model)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_a_second_train_goes_on_from_a_checkpoint_in_place(
    tmp_path: Path,
    tiny_model: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """Weights loaded into a model whose optimizer has master copies: those follow."""
    trainer = ts_hf.TrainStreamTrainer(
        model=tiny_model("llama").to(torch.bfloat16),
        args=training_arguments(save_strategy="steps", save_steps=3),
        train_dataset=token_rows(ROWS, LENGTH),
    )
    trainer.train()
    wanted = _trained(trainer.model)
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    found = _trained(trainer.model)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


class _PoisonOnce(TrainerCallback):  # type: ignore[misc]
    """Makes a weight NaN between the two micro-batches of step 3, the first time it comes by."""

    done = False

    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any, **kw: Any) -> None:
        if state.global_step == 2 and not self.done:
            self.done = True
            with torch.no_grad():
                model.model.norm.weight[0] = float("nan")


def test_resume_in_the_same_process_after_a_nan(
    tmp_path: Path,
    tiny_model: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """The half-accumulated step is dropped; the rest is as if nothing had happened."""

    def trainer(output: str, callbacks: list[Any]) -> Any:
        return ts_hf.TrainStreamTrainer(
            model=tiny_model("llama"),
            args=training_arguments(
                output_dir=str(tmp_path / output),
                save_strategy="steps",
                save_steps=2,
                gradient_accumulation_steps=2,
            ),
            train_dataset=token_rows(ROWS, LENGTH),
            callbacks=callbacks,
        )

    broken = trainer("run", [_PoisonOnce()])
    with pytest.raises(NonFiniteError, match="at step 3"):
        broken.train()
    broken.train(resume_from_checkpoint=True)
    whole = trainer("whole", [])
    whole.train()
    wanted, found = _trained(whole.model), _trained(broken.model)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_checkpoint_contents_and_rotation(
    tmp_path: Path,
    tiny_model: Callable[..., Any],
    lora: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    trainer = ts_hf.TrainStreamTrainer(
        model=lora(tiny_model("llama")),
        args=training_arguments(save_strategy="steps", save_steps=1, save_total_limit=2),
        train_dataset=token_rows(ROWS, LENGTH),
    )
    trainer.train()
    run = tmp_path / "run"
    assert sorted(p.name for p in run.iterdir()) == ["checkpoint-5", "checkpoint-6"]
    assert last_checkpoint(run) == run / "checkpoint-6"
    names = {p.name for p in (run / "checkpoint-6").iterdir()}
    assert names >= {
        "adapter_config.json",
        "adapter_model.safetensors",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state.pth",
        "trainer_state.json",
    }
    assert "model.safetensors" not in names
    state = json.loads((run / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["global_step"] == 6
    assert all("ts_pinned_gb" in line for line in state["log_history"])


@pytest.mark.parametrize("adapters", [False, True])
def test_best_model_is_kept_and_loaded(
    adapters: bool,
    tmp_path: Path,
    tiny_model: Callable[..., Any],
    request: pytest.FixtureRequest,
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """The learning rate is far too high, so an early checkpoint stays the best.

    Adapters in bf16 stay in it, though PEFT loads them as fp32.
    """
    model = tiny_model("llama")
    if adapters:
        model = request.getfixturevalue("lora")(model.to(torch.bfloat16), autocast=False)
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    trainer = ts_hf.TrainStreamTrainer(
        model=model,
        args=training_arguments(
            learning_rate=1.0 if adapters else 0.1,
            lr_scheduler_type="constant",
            save_strategy="steps",
            save_steps=1,
            eval_strategy="steps",
            eval_steps=1,
            save_total_limit=1,
            load_best_model_at_end=True,
        ),
        train_dataset=token_rows(ROWS, LENGTH),
        eval_dataset=token_rows(4, LENGTH, seed=3),
    )
    trainer.train()
    losses = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    best = losses.index(min(losses)) + 1
    assert best < STEPS
    assert trainer.state.best_model_checkpoint == str(tmp_path / "run" / f"checkpoint-{best}")
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-6)
    assert {name: param.dtype for name, param in trainer.model.named_parameters()} == dtypes


# -- killed -------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
import torch
torch.set_num_threads(1)
import ts_hf
from transformers import AutoModelForCausalLM, LlamaConfig, TrainingArguments

folder, output = sys.argv[1:3]
rows = torch.load(sys.argv[3], weights_only=True)


class Dies(ts_hf.TrainStreamTrainer):
    def _save_optimizer_and_scheduler(self, output_dir):
        if self.state.global_step == 4:
            assert os.path.exists(os.path.join(output_dir, "model.safetensors"))
            os.kill(os.getpid(), signal.SIGKILL)
        super()._save_optimizer_and_scheduler(output_dir)


arguments = TrainingArguments(
    output_dir=output, max_steps=6, per_device_train_batch_size=2, learning_rate=1e-3,
    save_strategy="steps", save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True,
)
model = ts_hf.load_model(folder, quantize=None, dtype=torch.float32)
Dies(model=model, args=arguments, train_dataset=rows).train()
"""


def test_kill_9_during_a_save(
    tmp_path: Path,
    checkpoint: Callable[..., Path],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    folder, run = checkpoint("llama"), tmp_path / "run"
    rows = token_rows(ROWS, LENGTH)
    torch.save(rows, tmp_path / "rows.pt")
    command = [sys.executable, "-c", KILLED, str(folder), str(run), str(tmp_path / "rows.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == -9, done.stderr
    names = sorted(p.name for p in run.iterdir())
    assert names[-1] == "checkpoint-2" and len(names) == 2
    assert names[0].startswith(".partial-checkpoint-4-")  # half-written, under another name

    def trainer(output: Path) -> Any:
        return ts_hf.TrainStreamTrainer(
            model=ts_hf.load_model(folder, quantize=None, dtype=torch.float32),
            args=training_arguments(output_dir=str(output), save_strategy="steps", save_steps=2),
            train_dataset=rows,
        )

    resumed = trainer(run)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6
    assert sorted(p.name for p in run.iterdir()) == [f"checkpoint-{n}" for n in (2, 4, 6)]
    whole = trainer(tmp_path / "other")
    whole.train()
    wanted, found = _trained(whole.model), _trained(resumed.model)
    # The killed process ran with another number of threads, which may round sums differently.
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=0, atol=1e-5)


def test_incomplete_folders_are_not_resumed_from(
    tmp_path: Path,
    tiny_model: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    run = tmp_path / "run"
    (run / "checkpoint-9").mkdir(parents=True)
    (run / "checkpoint-x").mkdir()
    assert last_checkpoint(run) is None
    assert last_checkpoint(tmp_path / "nowhere") is None
    trainer = ts_hf.TrainStreamTrainer(
        model=tiny_model("llama"),
        args=training_arguments(),
        train_dataset=token_rows(2, LENGTH),
    )
    with pytest.raises(DataError, match="checkpoint-9 is not a complete checkpoint"):
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-9"))


# -- adapters -----------------------------------------------------------------------------------


def test_saved_adapter_loads_in_plain_peft(
    tmp_path: Path,
    checkpoint: Callable[..., Path],
    lora: Callable[..., Any],
    codec: str,
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No missing or unexpected keys, the trained values, and the base is never decoded to save."""
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import AutoModelForCausalLM

    folder = checkpoint("llama")
    model = lora(ts_hf.load_model(folder, quantize=codec, dtype=torch.float32))
    trainer = ts_hf.TrainStreamTrainer(
        model=model,
        args=training_arguments(save_strategy="steps", save_steps=6),
        train_dataset=token_rows(ROWS, LENGTH),
        trainstream={"param_offload": True},
    )
    quantized = model.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight

    def decoded(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the base was decoded to save an adapter")

    trainer.train()
    with monkeypatch.context() as patch:
        patch.setattr(type(quantized), "dequantize", decoded)
        written = ts_hf.save_adapter(model, tmp_path / "adapter")
    assert sorted(p.name for p in tmp_path.glob("adapter*")) == ["adapter"]
    for place in (written, tmp_path / "run" / "checkpoint-6"):
        stored = load_file(place / "adapter_model.safetensors")
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        loaded = PeftModel.from_pretrained(plain, place)
        wanted = get_peft_model_state_dict(loaded)
        assert set(wanted) == set(stored)
        trained = _trained(model)
        assert len(stored) == len(trained) == 4 * 7 * 2
        for name, tensor in trained.items():
            assert torch.equal(stored[name.replace(".default", "")], tensor), name
        # Strict: nothing missing, nothing unexpected.
        result = loaded.load_adapter(place, "again")
        assert result.missing_keys == [] and result.unexpected_keys == []


def test_modules_to_save_and_trained_embeddings_are_in_the_adapter(
    tmp_path: Path, tiny_model: Callable[..., Any], lora: Callable[..., Any]
) -> None:
    model = lora(tiny_model("llama", tie_word_embeddings=False), modules_to_save=["embed_tokens"])
    ts_hf.save_adapter(model, tmp_path / "adapter")
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any("embed_tokens" in name for name in stored)


def test_save_adapter_replaces_and_refuses(
    tmp_path: Path, tiny_model: Callable[..., Any], lora: Callable[..., Any]
) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "old-file").write_text("x")
    ts_hf.save_adapter(lora(tiny_model("llama")), tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "old-file").exists()
    with pytest.raises(StateError, match="no adapters"):
        ts_hf.save_adapter(tiny_model("llama"), tmp_path / "other")
    assert not (tmp_path / "other").exists()
