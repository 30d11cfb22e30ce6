"""Losses and gradients that are NaN or infinite stop a run, by name, before anything is saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

import ts_hf
from ts_core import OffloadAdamW
from ts_core.errors import NonFiniteError

# 14 rows in batches of 2, two batches a step: the last window of an epoch has one batch.
ROWS, LENGTH = 14, 12


class _Poison(TrainerCallback):  # type: ignore[misc]
    """Makes a weight NaN at the beginning of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **kw: Any) -> None:
        if state.global_step + 1 == self.step:
            with torch.no_grad():
                model.model.norm.weight[0] = float("nan")


@pytest.mark.parametrize("chunked", [True, False])
def test_nan_loss_names_the_step_and_saves_nothing_after(
    chunked: bool,
    tmp_path: Path,
    tiny_model: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    model = tiny_model("llama")
    trainer = ts_hf.TrainStreamTrainer(
        model=model,
        args=training_arguments(save_strategy="steps", save_steps=1),
        train_dataset=token_rows(ROWS, LENGTH),
        callbacks=[_Poison(3)],
        trainstream={"chunked_loss": chunked},
    )
    with pytest.raises(NonFiniteError, match="loss is nan at step 3"):
        trainer.train()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["checkpoint-1", "checkpoint-2"]
    weights = model.model.layers[0].mlp.up_proj.weight
    assert torch.isfinite(weights).all()  # the step that was NaN has not been applied


def test_infinite_gradient_stops_before_the_checkpoint(
    tmp_path: Path,
    tiny_model: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    model = tiny_model("llama")
    model.model.norm.weight.register_hook(lambda grad: grad * float("inf"))
    trainer = ts_hf.TrainStreamTrainer(
        model=model,
        args=training_arguments(save_strategy="steps", save_steps=1),
        train_dataset=token_rows(ROWS, LENGTH),
    )
    with pytest.raises(NonFiniteError, match=r"gradient norm is (inf|nan) at step 1"):
        trainer.train()
    assert not (tmp_path / "run").exists() or list((tmp_path / "run").iterdir()) == []


class _InfiniteGradient(TrainerCallback):
    """From step `at` on, one gradient is infinite; the loss of that step is not."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        if state.global_step + 1 == self.at:
            model.model.norm.weight.register_hook(lambda grad: grad * float("inf"))


@pytest.mark.parametrize(("at", "saved"), [(2, []), (3, ["checkpoint-2"]), (5, ["checkpoint-4"])])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_infinite_gradient_is_named_by_its_own_step(
    at: int,
    saved: list[str],
    accumulation: int,
    tmp_path: Path,
    tiny_model: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """Whether a save, the next loss (NaN by then) or the end of training comes first."""
    trainer = ts_hf.TrainStreamTrainer(
        model=tiny_model("llama"),
        args=training_arguments(
            max_steps=5,
            gradient_accumulation_steps=accumulation,
            logging_steps=100,
            save_strategy="steps",
            save_steps=2,
            save_total_limit=1,
        ),
        train_dataset=token_rows(ROWS, LENGTH),
        callbacks=[_InfiniteGradient(at)],
    )
    with pytest.raises(NonFiniteError, match=rf"gradient norm is (inf|nan) at step {at},"):
        trainer.train()
    run = tmp_path / "run"
    assert [path.name for path in run.iterdir()] == saved if run.exists() else saved == []


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_stock_trainer_stops_at_an_infinite_gradient(
    at: int,
    tmp_path: Path,
    tiny_model: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    model, optimizer = ts_hf.wrap_hf(tiny_model("llama"), device="cpu", lr=1e-3)
    trainer = Trainer(
        model=model,
        args=training_arguments(
            max_steps=3, logging_steps=100, save_strategy="steps", save_steps=2
        ),
        train_dataset=token_rows(ROWS, LENGTH),
        optimizers=(optimizer, None),
        callbacks=[_InfiniteGradient(at), ts_hf.TrainStreamCallback(optimizer)],
    )
    with pytest.raises(NonFiniteError, match=rf"gradient norm is (inf|nan) at step {at},"):
        trainer.train()
    assert (tmp_path / "run" / "checkpoint-2").exists() == (at == 3)


def test_the_norm_is_read_where_it_is_logged_only(
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """With the norms that logging every step gives."""

    def run(logging_steps: int) -> tuple[list[tuple[int, float]], list[int]]:
        trainer = ts_hf.TrainStreamTrainer(
            model=tiny_model("llama"),
            args=training_arguments(logging_steps=logging_steps, max_steps=7),
            train_dataset=token_rows(ROWS, LENGTH),
        )
        reads: list[int] = []
        original = OffloadAdamW.last_grad_norm

        def read(self: OffloadAdamW) -> float | None:
            reads.append(trainer.state.global_step)
            return original.__get__(self)

        with monkeypatch.context() as patch:
            patch.setattr(OffloadAdamW, "last_grad_norm", property(read))
            trainer.train()
        lines = [line for line in trainer.state.log_history if "grad_norm" in line]
        return [(line["step"], line["grad_norm"]) for line in lines], reads

    every, _ = run(1)
    third, reads = run(3)
    assert third == [pair for pair in every if pair[0] in (3, 6)]
    assert set(reads) == {3, 6, 7}  # 7: the summary of the run is logged


@pytest.mark.gpu
def test_nan_loss_on_a_gpu(
    tmp_path: Path,
    tiny_model: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """The flag is read one micro-batch later, but before anything is saved."""
    trainer = ts_hf.TrainStreamTrainer(
        model=tiny_model("llama"),
        args=training_arguments(use_cpu=False, save_strategy="steps", save_steps=1),
        train_dataset=token_rows(ROWS, LENGTH),
        callbacks=[_Poison(3)],
    )
    with pytest.raises(NonFiniteError, match="at step 3"):
        trainer.train()
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.gpu
@pytest.mark.parametrize("at", [2, 3, 5])
def test_an_infinite_gradient_on_a_gpu(
    at: int,
    tmp_path: Path,
    tiny_model: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """Norms are read a step later there too, from wherever the optimizer's state is by then."""
    trainer = ts_hf.TrainStreamTrainer(
        model=tiny_model("llama"),
        args=training_arguments(
            use_cpu=False, max_steps=5, logging_steps=100, save_strategy="steps", save_steps=2
        ),
        train_dataset=token_rows(ROWS, LENGTH),
        callbacks=[_InfiniteGradient(at)],
    )
    with pytest.raises(NonFiniteError, match=rf"gradient norm is (inf|nan) at step {at},"):
        trainer.train()
    saved = {path.name for path in (tmp_path / "run").glob("checkpoint-*")}
    assert saved == {f"checkpoint-{step}" for step in (2, 4) if step < at}
