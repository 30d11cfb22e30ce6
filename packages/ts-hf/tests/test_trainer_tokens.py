"""Losses are means over tokens: of windows without loss kwargs, without labels, of evaluations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Trainer

import ts_hf

LENGTH = 12


def _history(trainer: Any, key: str) -> list[float]:
    return [line[key] for line in trainer.state.log_history if key in line]


def _trained(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


# -- models whose forward takes no loss kwargs ------------------------------------------------


def _without_loss_kwargs(tiny_model: Callable[..., Any]) -> Any:
    """A Llama whose forward has no **kwargs and takes the mean over its own labels."""
    model = tiny_model("llama")
    base = type(model)

    # By its name transformers knows that its labels are to be shifted.
    class LlamaForCausalLM(base):  # type: ignore[misc, valid-type]
        def forward(
            self,
            input_ids: Any = None,
            attention_mask: Any = None,
            labels: Any = None,
            position_ids: Any = None,
            use_cache: Any = None,
        ) -> Any:
            return super().forward(
                input_ids=input_ids,
                attention_mask=attention_mask,
                labels=labels,
                position_ids=position_ids,
                use_cache=use_cache,
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
    for key in ("loss", "grad_norm"):
        assert _history(ours, key) == pytest.approx(_history(stock, key), rel=1e-5)


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
@pytest.mark.parametrize("loss", ["chunked", "own", "smoothed", "packed"])
@pytest.mark.parametrize("which", ["a batch", "a window", "an evaluation"])
def test_labels_all_masked(
    which: str,
    loss: str,
    kwargs: bool,
    token_rows: Callable[..., Any],
    tiny_model: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """Zero loss and gradients for what has no labels, the rest as it would be; and said so."""
    rows = token_rows(4, LENGTH)
    smoothing = 0.1 if loss == "smoothed" else 0.0
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
            label_smoothing_factor=smoothing,
        ),
        train_dataset=rows,
        eval_dataset=held_out,
        trainstream={"chunked_loss": loss == "chunked", "packing": loss == "packed"},
    )

    def expected(kept: torch.Tensor) -> float:
        output = tiny_model("llama")(input_ids=kept, labels=kept)
        uniform = -output.logits[:, :-1].log_softmax(-1).mean().item()
        return (1 - smoothing) * output.loss.item() + smoothing * uniform

    if which == "an evaluation":
        wanted = expected(torch.stack([held_out[index]["input_ids"] for index in (0, 2)]))
        assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-6)
        return
    before = _trained(trainer.model)
    trainer.train()
    after, (found,), (norm,) = (
        _trained(trainer.model),
        _history(trainer, "loss"),
        _history(trainer, "grad_norm"),
    )
    said = [line for line in trainer.model._trainstream_session.events if "is masked" in line]
    if which == "a window":
        assert found == 0 and norm == 0 and len(said) == 1 and "step 1" in said[0]
        assert all(torch.equal(before[name], after[name]) for name in before)
    else:
        wanted = expected(torch.stack([row["input_ids"] for row in rows[1:]]))
        assert found == pytest.approx(wanted, rel=1e-6) and norm > 0 and said == []


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
