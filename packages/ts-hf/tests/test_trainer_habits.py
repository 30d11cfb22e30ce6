"""What people do with a Trainer, each against transformers' own with the same seed."""

from __future__ import annotations

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


@pytest.fixture
def unequal_rows(token_rows: Callable[..., Any]) -> Callable[..., Any]:
    """unequal_rows(count, seed=0): rows of one length with 2 to 10 labels that count."""

    def make(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
        rows: list[dict[str, torch.Tensor]] = token_rows(count, LENGTH, seed=seed)
        for index, row in enumerate(rows):
            row["labels"][: 2 + (3 * index) % 9] = -100
        return rows

    return make


@pytest.fixture
def both(
    tiny_model: Callable[..., Any], training_arguments: Callable[..., Any]
) -> Callable[..., Any]:
    """both(rows, model=..., trainer=..., **arguments): five steps of stock and of ours."""

    def run(
        rows: Any,
        *,
        model: Callable[[], Any] | None = None,
        trainer: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> list[Any]:
        fields = {"max_steps": 5, "adam_epsilon": 1e-4, **arguments}
        trainers = []
        for cls, more in ((Trainer, {}), (ts_hf.TrainStreamTrainer, {"trainstream": options})):
            made = cls(
                model=model() if model else tiny_model("llama"),
                args=training_arguments(**fields),
                train_dataset=rows,
                **(trainer or {}),
                **more,
            )
            made.train()
            trainers.append(made)
        return trainers

    return run


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


# -- models whose forward takes no loss kwargs ------------------------------------------------


def _without_loss_kwargs(tiny_model: Callable[..., Any]) -> Any:
    """A Llama whose forward has no **kwargs and takes the mean over its own labels."""
    model = tiny_model("llama")
    base = type(model)

    # By its name transformers knows that its labels are to be shifted.
    class LlamaForCausalLM(base):  # type: ignore[misc, valid-type]
        def forward(
            self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None
        ) -> Any:
            return super().forward(
                input_ids=input_ids, attention_mask=attention_mask, labels=labels
            )

    model.__class__ = LlamaForCausalLM
    return model


def test_without_loss_kwargs_as_transformers_where_batches_are_equal(
    both: Callable[..., Any], token_rows: Callable[..., Any], tiny_model: Callable[..., Any]
) -> None:
    stock, ours = both(
        token_rows(18, LENGTH),  # windows of three, the last of one batch
        model=lambda: _without_loss_kwargs(tiny_model),
        gradient_accumulation_steps=3,
    )
    assert not stock.model_accepts_loss_kwargs
    _check_equal(stock, ours)


@pytest.mark.parametrize("loss", ["own", "smoothed"])
def test_without_loss_kwargs_the_loss_is_still_a_mean_over_tokens(
    loss: str,
    unequal_rows: Callable[..., Any],
    tiny_model: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """However a window is split into micro-batches, as for a model that takes them."""
    more = {"label_smoothing_factor": 0.1} if loss == "smoothed" else {}
    runs = []
    for size, accumulation, model in (
        (4, 1, tiny_model("llama")),
        (4, 1, _without_loss_kwargs(tiny_model)),
        (1, 4, _without_loss_kwargs(tiny_model)),
    ):
        trainer = ts_hf.TrainStreamTrainer(
            model=model,
            args=training_arguments(
                max_steps=3,
                per_device_train_batch_size=size,
                gradient_accumulation_steps=accumulation,
                adam_epsilon=1e-4,
                train_sampling_strategy="sequential",
                **more,
            ),
            train_dataset=unequal_rows(12),
        )
        trainer.train()
        runs.append((_history(trainer, "loss"), _history(trainer, "grad_norm")))
    for found in runs[1:]:
        for wanted, values in zip(runs[0], found, strict=True):
            torch.testing.assert_close(
                torch.tensor(values), torch.tensor(wanted), rtol=1e-5, atol=0
            )


@pytest.mark.parametrize("kwargs", [True, False])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("which", ["a batch", "a window", "an evaluation"])
def test_labels_all_masked(
    which: str,
    chunked: bool,
    kwargs: bool,
    token_rows: Callable[..., Any],
    tiny_model: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """Zero loss and gradients for what has no labels, the rest as it would be; and said so."""
    rows = token_rows(4, LENGTH)
    if which != "an evaluation":
        for row in rows if which == "a window" else rows[:1]:
            row["labels"][:] = -100
    held_out = token_rows(3, LENGTH, seed=6)
    held_out[1]["labels"][:] = -100
    trainer = ts_hf.TrainStreamTrainer(
        model=tiny_model("llama") if kwargs else _without_loss_kwargs(tiny_model),
        args=training_arguments(
            max_steps=1,
            per_device_train_batch_size=1,
            per_device_eval_batch_size=1,
            gradient_accumulation_steps=4,
            weight_decay=0.0,
            train_sampling_strategy="sequential",
        ),
        train_dataset=rows,
        eval_dataset=held_out,
        trainstream={"chunked_loss": chunked},
    )
    if which == "an evaluation":
        model = tiny_model("llama")
        kept = torch.stack([held_out[index]["input_ids"] for index in (0, 2)])
        wanted = model(input_ids=kept, labels=kept).loss.item()
        assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-6)
        return
    before = _trained(trainer.model)
    trainer.train()
    after, (loss,), (norm,) = (
        _trained(trainer.model),
        _history(trainer, "loss"),
        _history(trainer, "grad_norm"),
    )
    said = [line for line in trainer.model._trainstream_session.events if "is masked" in line]
    if which == "a window":
        assert loss == 0 and norm == 0 and len(said) == 1 and "step 1" in said[0]
        assert all(torch.equal(before[name], after[name]) for name in before)
    else:
        ids = torch.stack([row["input_ids"] for row in rows[1:]])
        wanted = tiny_model("llama")(input_ids=ids, labels=ids).loss.item()
        assert loss == pytest.approx(wanted, rel=1e-6) and norm > 0 and said == []


# -- evaluation --------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_an_evaluation_does_not_depend_on_its_batches(
    smoothing: float,
    unequal_rows: Callable[..., Any],
    tiny_model: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    found = []
    for size in (1, 2, 7):
        trainer = ts_hf.TrainStreamTrainer(
            model=tiny_model("llama"),
            args=training_arguments(
                per_device_eval_batch_size=size, label_smoothing_factor=smoothing
            ),
            eval_dataset=unequal_rows(7),
        )
        found.append(trainer.evaluate()["eval_loss"])
    assert found[1:] == pytest.approx([found[0]] * 2, rel=1e-6)


def test_what_a_subclass_adds_to_the_loss_is_in_its_evaluation(
    unequal_rows: Callable[..., Any],
    tiny_model: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    class Doubled(ts_hf.TrainStreamTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            found = super().compute_loss(*args, **kwargs)
            return (found[0] * 2, found[1]) if isinstance(found, tuple) else found * 2

    found = [
        cls(
            model=tiny_model("llama"), args=training_arguments(), eval_dataset=unequal_rows(5)
        ).evaluate()["eval_loss"]
        for cls in (ts_hf.TrainStreamTrainer, Doubled)
    ]
    assert found[1] == pytest.approx(2 * found[0], rel=1e-6)


def test_predictions_and_metrics_during_streaming(
    unequal_rows: Callable[..., Any],
    tiny_model: Callable[..., Any],
    lora: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """predict(), compute_metrics, its batched form and preprocessed logits: as transformers'."""

    class Accuracy:
        def __init__(self) -> None:
            self.hits, self.total = 0, 0

        def __call__(self, prediction: Any, compute_result: bool = True) -> dict[str, float]:
            picked = torch.as_tensor(prediction.predictions)
            labels = torch.as_tensor(prediction.label_ids)
            counts = labels != -100
            self.hits += int(((picked == labels) & counts).sum())
            self.total += int(counts.sum())
            return {"accuracy": self.hits / self.total} if compute_result else {}

    rows, results = unequal_rows(7), []
    for cls, more in (
        (Trainer, {}),
        (ts_hf.TrainStreamTrainer, {"trainstream": {"param_offload": True}}),
    ):
        for batched in (False, True):
            trainer = cls(
                model=lora(tiny_model("llama")),
                args=training_arguments(
                    max_steps=2, batch_eval_metrics=batched, eval_strategy="steps", eval_steps=1
                ),
                train_dataset=rows,
                eval_dataset=rows,
                compute_metrics=Accuracy(),
                preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
                **more,
            )
            trainer.train()
            trainer.compute_metrics = None
            predicted = trainer.predict(rows).predictions
            results.append((_history(trainer, "eval_accuracy"), torch.as_tensor(predicted)))
    for accuracy, predicted in results[1:]:
        assert accuracy == results[0][0] and len(accuracy) == 2
        assert torch.equal(predicted, results[0][1])


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
