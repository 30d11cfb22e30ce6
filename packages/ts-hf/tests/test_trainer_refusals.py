"""What TrainStreamTrainer refuses, before anything is moved or written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import ts_hf
from ts_core.errors import NotAvailableError, OptionError, StateError

LENGTH = 12


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"optim": "sgd"}, OptionError, "optim='sgd'"),
        ({"optim": "adafactor"}, OptionError, "optim='adafactor'"),
        ({"optim": "adamw_torch_4bit"}, OptionError, "optim='adamw_torch_4bit'.*adamw_8bit"),
        ({"auto_find_batch_size": True}, NotAvailableError, "auto_find_batch_size"),
        ({"torch_compile": True}, NotAvailableError, "torch_compile"),
        ({"bf16_full_eval": True}, NotAvailableError, "bf16_full_eval"),
    ],
)
def test_arguments_refused(
    arguments: dict[str, Any],
    error: type[Exception],
    words: str,
    tiny_model: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    with pytest.raises(error, match=words):
        ts_hf.TrainStreamTrainer(model=tiny_model("llama"), args=training_arguments(**arguments))


def test_fp16_refused(
    tiny_model: Callable[..., Any], training_arguments: Callable[..., Any]
) -> None:
    arguments = training_arguments()
    arguments.fp16 = True  # TrainingArguments itself refuses it on a CPU
    with pytest.raises(OptionError, match="fp16=True"):
        ts_hf.TrainStreamTrainer(model=tiny_model("llama"), args=arguments)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"packing": 0}, OptionError, "packing=0"),
        ({"packing": -8}, OptionError, "packing=-8"),
        ({"packing": "yes"}, OptionError, "packing='yes'"),
        ({"chunked_loss": 1}, OptionError, "chunked_loss=1"),
        ({"loss_chunk_size": 0}, OptionError, "loss_chunk_size=0"),
        ({"max_grad_norm": 1.0}, OptionError, r"TrainingArguments\(max_grad_norm="),
        ({"accumulation_steps": 2}, OptionError, "gradient_accumulation_steps"),
        ({"lr": 1e-3}, OptionError, "learning_rate"),
        ({"param_ofload": True}, OptionError, "Did you mean 'param_offload'"),
        ({"vram_limit": "12 apples"}, OptionError, "vram_limit='12 apples'"),
        ({"peer": True}, NotAvailableError, "peer=True"),
        ("fast", OptionError, "expected a dict"),
    ],
)
def test_trainstream_options_refused(
    options: Any,
    error: type[Exception],
    words: str,
    tiny_model: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    with pytest.raises(error, match=words):
        ts_hf.TrainStreamTrainer(
            model=tiny_model("llama"), args=training_arguments(), trainstream=options
        )


def test_no_trainable_parameter(
    tiny_model: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    trainer = ts_hf.TrainStreamTrainer(
        model=tiny_model("llama").requires_grad_(False),
        args=training_arguments(),
        train_dataset=token_rows(2, LENGTH),
    )
    with pytest.raises(OptionError, match="nothing to train"):
        trainer.train()


def test_already_wrapped(
    tiny_model: Callable[..., Any], training_arguments: Callable[..., Any]
) -> None:
    model, _ = ts_hf.wrap_hf(tiny_model("llama"), device="cpu")
    with pytest.raises(StateError, match="already wrapped"):
        ts_hf.TrainStreamTrainer(model=model, args=training_arguments())
    with pytest.raises(StateError, match="already wrapped"):
        ts_hf.wrap_hf(model)
