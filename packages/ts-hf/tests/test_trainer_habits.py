"""What people do with a Trainer, each against transformers' own with the same seed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback

import ts_hf

LENGTH = 12


def _history(trainer: Any, key: str) -> list[float]:
    return [line[key] for line in trainer.state.log_history if key in line]


def _trained(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def _check_equal(stock: Any, ours: Any, *, steps: int = 5, rtol: float = 2e-6) -> None:
    for key, tolerance in (("loss", rtol), ("grad_norm", 2e-5), ("learning_rate", 0.0)):
        wanted, found = _history(stock, key), _history(ours, key)
        assert len(found) == len(wanted) == steps
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(wanted), rtol=tolerance, atol=0
        )
    for (name, wanted), found in zip(
        _trained(stock.model).items(), _trained(ours.model).values(), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=0, atol=5e-6, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "mixtral", "gemma2"])
def test_five_steps_of_a_family(
    family: str, both: Callable[..., Any], unequal_rows: Callable[..., Any], tiny_model: Any
) -> None:
    stock, ours = both(
        unequal_rows(20),
        model=lambda: tiny_model(family, **({"attn_implementation": "eager"})),
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
    )
    _check_equal(stock, ours)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_label_smoothing(
    accumulation: int, both: Callable[..., Any], unequal_rows: Callable[..., Any]
) -> None:
    stock, ours = both(
        unequal_rows(16),
        label_smoothing_factor=0.1,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=1.0,
    )
    _check_equal(stock, ours)


@pytest.mark.parametrize("strategy", ["group_by_length", "sequential", "random"])
def test_order_of_the_data(
    strategy: str, both: Callable[..., Any], token_rows: Callable[..., Any]
) -> None:
    rows = token_rows(12, LENGTH)
    for index, row in enumerate(rows):
        length = 4 + (5 * index) % 8
        rows[index] = {key: value[:length] for key, value in row.items()}
    stock, ours = both(
        rows,
        train_sampling_strategy=strategy,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
    )
    _check_equal(stock, ours)


@pytest.mark.parametrize(
    ("schedule", "more"),
    [
        ("cosine_with_min_lr", {"lr_scheduler_kwargs": {"min_lr": 1e-5}, "warmup_steps": 2}),
        ("polynomial", {"warmup_steps": 1}),
        ("constant_with_warmup", {"warmup_steps": 3}),
        ("inverse_sqrt", {"warmup_steps": 1}),
    ],
)
def test_schedules(
    schedule: str, more: dict[str, Any], both: Callable[..., Any], token_rows: Callable[..., Any]
) -> None:
    _check_equal(*both(token_rows(10, LENGTH), lr_scheduler_type=schedule, **more))


def test_reduce_on_plateau_steps_with_the_evaluations(
    both: Callable[..., Any], token_rows: Callable[..., Any]
) -> None:
    stock, ours = both(
        token_rows(10, LENGTH),
        trainer={"eval_dataset": token_rows(4, LENGTH, seed=8)},
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0, "factor": 0.5, "threshold": 0.5},
        eval_strategy="steps",
        eval_steps=1,
    )
    _check_equal(stock, ours)
    assert len(set(_history(ours, "learning_rate"))) > 2


def test_parameters_that_do_not_decay(
    both: Callable[..., Any], token_rows: Callable[..., Any], tiny_model: Callable[..., Any]
) -> None:
    """GPT-2 has biases and LayerNorms; a decay this strong would show on them."""
    stock, ours = both(
        token_rows(10, LENGTH),
        model=lambda: tiny_model("gpt2"),
        weight_decay=20.0,
        learning_rate=1e-2,
    )
    _check_equal(stock, ours, rtol=1e-5)
    groups = ours.optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [20.0, 0.0]
    assert [len(g["params"]) for g in groups] == [len(g["params"]) for g in _plain(stock)]


def _plain(trainer: Any) -> Any:
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer).param_groups


@pytest.mark.parametrize("name", ["adamw_8bit", "adamw_torch_8bit", "paged_adamw_8bit"])
def test_eight_bit_adamw_keeps_eight_bit_moments(
    name: str,
    tiny_model: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """Near fp32's losses at about a quarter of its moments; an option given overrules the name."""
    losses, sizes = [], []
    for optim, options in (
        ("adamw_torch", {}),
        (name, {}),
        (name, {"moment_dtype": "float32"}),
    ):
        trainer = ts_hf.TrainStreamTrainer(
            model=tiny_model("llama"),
            args=training_arguments(optim=optim, max_steps=4),
            train_dataset=token_rows(8, LENGTH),
            trainstream=options,
        )
        trainer.train()
        losses.append(_history(trainer, "loss"))
        sizes.append(_history(trainer, "ts_host_state_gb")[-1])
    assert losses[1] == pytest.approx(losses[0], rel=2e-3) and losses[1] != losses[0]
    assert losses[2] == losses[0] and sizes[2] == sizes[0] > 1.3 * sizes[1]


def test_a_loss_function_of_the_users(
    both: Callable[..., Any], unequal_rows: Callable[..., Any]
) -> None:
    def squared(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        logits, targets = outputs["logits"][:, :-1], labels[:, 1:]
        picked = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
        return ((picked - 1) ** 2 * (targets != -100)).sum() / num_items_in_batch

    stock, ours = both(
        unequal_rows(20), trainer={"compute_loss_func": squared}, gradient_accumulation_steps=2
    )
    _check_equal(stock, ours)


# -- callbacks and saving ----------------------------------------------------------------------


class _Diary(TrainerCallback):  # type: ignore[misc]
    """Writes down every event, and asks for a log, a save, an evaluation and the end."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        found = object.__getattribute__(self, name)
        if not name.startswith("on_"):
            return found

        def note(args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
            self.lines.append(f"{name} {state.global_step}")
            assert kwargs.get("model") is not None
            if name == "on_step_end":
                control.should_save = state.global_step == 2
                control.should_evaluate = state.global_step == 3
                control.should_training_stop = state.global_step == 4
            return control

        return note


def test_callbacks_see_what_they_see_in_transformers(
    both: Callable[..., Any], token_rows: Callable[..., Any], tmp_path: Path
) -> None:
    diaries: list[_Diary] = []

    class Kept(_Diary):
        def __init__(self) -> None:
            super().__init__()
            diaries.append(self)

    stock, ours = both(
        token_rows(16, LENGTH),
        trainer={"callbacks": [Kept], "eval_dataset": token_rows(2, LENGTH, seed=1)},
        gradient_accumulation_steps=2,
        save_strategy="no",
        max_steps=8,
    )
    _check_equal(stock, ours, steps=4)
    assert diaries[0].lines == diaries[1].lines
    assert "on_save 2" in diaries[1].lines and "on_evaluate 3" in diaries[1].lines
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["checkpoint-2"]


def test_what_is_saved_loads_in_transformers(
    tmp_path: Path,
    tiny_model: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """save_model, a checkpoint, and save_only_model; tied weights are stored once."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    trainer = ts_hf.TrainStreamTrainer(
        model=tiny_model("llama", tie_word_embeddings=True),
        args=training_arguments(
            max_steps=2, save_strategy="steps", save_steps=2, save_only_model=True
        ),
        train_dataset=token_rows(4, LENGTH),
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    wanted = _trained(trainer.model)
    for folder in (tmp_path / "final", tmp_path / "run" / "checkpoint-2"):
        assert "lm_head.weight" not in load_file(folder / "model.safetensors")
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
        assert all(torch.equal(wanted[n], p) for n, p in loaded.named_parameters())
    assert not (tmp_path / "run" / "checkpoint-2" / "optimizer.pt").exists()


def test_a_model_made_anew_for_each_train(
    tiny_model: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """`model_init`: the second train() starts from a new model, wrapped anew, and ends the same."""
    results = []
    for cls in (Trainer, ts_hf.TrainStreamTrainer):
        trainer = cls(
            model_init=lambda: tiny_model("llama"),
            args=training_arguments(max_steps=3, adam_epsilon=1e-4),
            train_dataset=token_rows(6, LENGTH),
        )
        for _ in range(2):
            trainer.train()
            results.append(_history(trainer, "loss"))
            if cls is not Trainer:
                assert hasattr(trainer.model, "_trainstream_session")
    assert results[2] == results[3] == pytest.approx(results[0], rel=2e-6)
    assert results[1] == results[0]


def test_full_collections_leave_what_is_there_alone_until_training_ends(
    tiny_model: Callable[..., Any],
    training_arguments: Callable[..., Any],
    unequal_rows: Callable[..., Any],
) -> None:
    class Watch(TrainerCallback):  # type: ignore[misc]
        stop_at = 0
        frozen: list[int]

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.frozen.append(gc.get_freeze_count())
            if len(self.frozen) == self.stop_at:
                raise KeyError("the user's own")

    watch = Watch()
    trainer = ts_hf.TrainStreamTrainer(
        model=tiny_model("llama"),
        args=training_arguments(max_steps=12),
        train_dataset=unequal_rows(20),
        callbacks=[watch],
    )
    for stop_at in (0, 12):
        watch.frozen, watch.stop_at = [], stop_at
        if stop_at:
            with pytest.raises(KeyError, match="own"):
                trainer.train()
        else:
            trainer.train()
        assert watch.frozen[:10] == [0] * 10 and min(watch.frozen[10:]) > 10_000
        assert gc.get_freeze_count() == 0
    gc.freeze()
    try:  # what the user sets aside stays so
        watch.frozen, watch.stop_at = [], 0
        trainer.train()
        assert min(watch.frozen) > 10_000 and gc.get_freeze_count() > 10_000
    finally:
        gc.unfreeze()
