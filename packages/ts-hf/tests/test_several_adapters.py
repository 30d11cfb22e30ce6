"""Checkpoints of models with several adapters, or with one that is not called "default"."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ts_hf
from ts_core.errors import DataError

peft = pytest.importorskip("peft", reason="the optional package peft is not installed")

ROWS, LENGTH = 14, 12


def _values(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if "lora_" in n}


def _trained(model: Any) -> set[str]:
    return {name for name, param in model.named_parameters() if param.requires_grad}


@pytest.fixture
def trainer(
    tiny_model: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> Callable[..., Any]:
    """trainer(kind, dtype, quantize, **arguments): made anew, the same each time."""

    def make(kind: str, dtype: torch.dtype, quantize: str = "none", **arguments: Any) -> Any:
        torch.manual_seed(11)
        model = tiny_model("llama").to(dtype)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
        options = {"autocast_adapter_dtype": False}
        if kind == "named":
            model = peft.get_peft_model(model, config, adapter_name="mine", **options)
        else:
            model = peft.get_peft_model(model, config, **options)
            model.add_adapter("other", config, **options)
            with torch.no_grad():  # the frozen one does something
                for name, param in model.named_parameters():
                    if "lora_B.default" in name:
                        param.copy_(torch.randn(param.shape) * 0.05)
            model.base_model.set_adapter("other" if kind == "second" else ["default", "other"])
        return ts_hf.TrainStreamTrainer(
            model=model,
            args=training_arguments(
                **{"save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-2, **arguments}
            ),
            train_dataset=token_rows(ROWS, LENGTH),
            eval_dataset=token_rows(ROWS, LENGTH),
            trainstream={"param_offload": True, "quantize": quantize},
        )

    return make


@pytest.mark.parametrize("kind", ["named", "second", "both"])
@pytest.mark.parametrize("quantize", ["none", "quantized"])
def test_resume_is_exact_for_every_adapter(
    kind: str,
    quantize: str,
    tmp_path: Path,
    trainer: Callable[..., Any],
    request: pytest.FixtureRequest,
) -> None:
    codec = "none" if quantize == "none" else request.getfixturevalue("codec")
    whole = trainer(kind, torch.bfloat16, codec)
    start, trained = _values(whole.model), _trained(whole.model)
    whole.train()
    expected = _values(whole.model)
    changed = {name for name in start if not torch.equal(start[name], expected[name])}
    assert changed and changed <= trained
    resumed = trainer(kind, torch.bfloat16, codec)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert _trained(resumed.model) == trained
    found = _values(resumed.model)
    assert {n: v.dtype for n, v in found.items()} == {n: v.dtype for n, v in expected.items()}
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("kind", ["named", "second", "both"])
def test_the_best_model_is_loaded_into_every_adapter(
    kind: str, trainer: Callable[..., Any]
) -> None:
    """The adapters of two have one shape, so that one read for the other would not be noticed.

    Best is the highest loss here, which is that of the first step.
    """
    made = trainer(
        kind,
        torch.float32,
        learning_rate=1e-2,
        greater_is_better=True,
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
    )
    frozen = _values(made.model)
    trained = _trained(made.model)
    made.train()
    losses = [line["eval_loss"] for line in made.state.log_history if "eval_loss" in line]
    assert losses[0] == max(losses) > losses[-1]
    assert made.evaluate()["eval_loss"] == pytest.approx(losses[0], rel=1e-6)
    after = _values(made.model)
    assert all(torch.equal(after[name], frozen[name]) for name in frozen.keys() - trained)


def test_a_checkpoint_of_other_adapters_is_refused(
    tmp_path: Path, trainer: Callable[..., Any]
) -> None:
    trainer("named", torch.float32).train()
    with pytest.raises(DataError, match="does not hold the adapter 'default'"):
        trainer("second", torch.float32).train(
            resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2")
        )
