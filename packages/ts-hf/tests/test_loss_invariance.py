"""The same tokens give the same losses, norms and weights, however they are cut into batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import ts_hf

# (rows of a micro-batch, micro-batches of a step, packing): eight rows a step in each.
CUTS = [
    (8, 1, False),
    (4, 2, False),
    (2, 4, False),
    (1, 8, False),
    (8, 1, True),
    (4, 2, True),
    (2, 4, 24),
]


@pytest.fixture
def ragged_rows(token_rows: Callable[..., Any]) -> list[dict[str, torch.Tensor]]:
    """24 rows of 3 to 16 tokens, of which 0 to all are masked."""
    rows = token_rows(24, 16)
    for index, row in enumerate(rows):
        length = 3 + (index * 5) % 14
        rows[index] = {key: value[:length] for key, value in row.items()}
        rows[index]["labels"][: index % 7] = -100
    rows[9]["labels"][:] = -100
    return rows


def _padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    ids = [row["input_ids"] for row in rows]
    return {
        "input_ids": pad_sequence(ids, True, 0),
        "labels": pad_sequence([row["labels"] for row in rows], True, -100),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], True, 0),
    }


def _without_loss_kwargs(model: Any) -> Any:
    """The same model with a forward that takes the mean over the labels it is given, no more."""
    base = type(model)

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


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("kwargs", [True, False])
def test_training_and_evaluation(
    kwargs: bool,
    chunked: bool,
    tiny_model: Callable[..., Any],
    ragged_rows: list[dict[str, torch.Tensor]],
    training_arguments: Callable[..., Any],
) -> None:
    """Whether the model takes num_items_in_batch or not; with clipping."""

    def run(rows: int, accumulation: int, packing: bool | int) -> Any:
        model = tiny_model("llama", num_hidden_layers=2)
        trainer = ts_hf.TrainStreamTrainer(
            model=model if kwargs else _without_loss_kwargs(model),
            args=training_arguments(
                max_steps=3,
                per_device_train_batch_size=rows,
                per_device_eval_batch_size=rows,
                gradient_accumulation_steps=accumulation,
                max_grad_norm=0.5,
                adam_epsilon=1e-4,
                train_sampling_strategy="sequential",
                eval_strategy="steps",
                eval_steps=3,
            ),
            data_collator=None if packing else _padded,
            train_dataset=ragged_rows,
            eval_dataset=ragged_rows[5:18],
            trainstream={"packing": packing, "chunked_loss": chunked},
        )
        assert trainer.model_accepts_loss_kwargs is kwargs
        trainer.train()
        history = trainer.state.log_history
        logs = {
            key: torch.tensor([line[key] for line in history if key in line])
            for key in ("loss", "grad_norm", "eval_loss")
        }
        return logs, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}

    logs, weights = run(*CUTS[0])
    assert len(logs["loss"]) == 3 and len(logs["eval_loss"]) == 1
    for cut in CUTS[1:]:
        found, values = run(*cut)
        for key, wanted in logs.items():
            torch.testing.assert_close(
                found[key], wanted, rtol=2e-5, atol=0, msg=lambda m, c=cut, k=key: f"{c} {k}: {m}"
            )
        for name, wanted in weights.items():
            torch.testing.assert_close(
                values[name], wanted, rtol=0, atol=5e-6, msg=lambda m, c=cut, n=name: f"{c} {n} {m}"
            )
