"""TrainStreamTrainer(packing=...): the numbers of the same rows without packing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ts_hf
from ts_core.errors import OptionError
from ts_hf.packing import PackedCollator


class _Padding:
    """Rows of different lengths as a padded batch."""

    def __call__(self, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        from torch.nn.utils.rnn import pad_sequence

        ids = [row["input_ids"] for row in rows]
        labels = pad_sequence([row["labels"] for row in rows], True, -100)
        ones = [torch.ones_like(row) for row in ids]
        return {
            "input_ids": pad_sequence(ids, True, 0),
            "labels": labels,
            "attention_mask": pad_sequence(ones, True, 0),
        }


@pytest.fixture
def ragged_rows(token_rows: Callable[..., Any]) -> Callable[..., list[dict[str, torch.Tensor]]]:
    """ragged_rows(count, seed=0): rows of 3 to 18 tokens, some labels masked."""

    def make(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
        rows = token_rows(count, 18, seed=seed)
        for index, row in enumerate(rows):
            length = 3 + (index * 7) % 16
            rows[index] = {key: value[:length] for key, value in row.items()}
            rows[index]["labels"][: index % 4] = -100
        return rows

    return make


def _history(trainer: Any, key: str) -> list[float]:
    return [line[key] for line in trainer.state.log_history if key in line]


def _run(
    model: Any, arguments: Any, rows: Any, held_out: Any, options: dict[str, Any]
) -> tuple[dict[str, list[float]], dict[str, torch.Tensor], Any]:
    packed = options.get("packing", False) is not False
    trainer = ts_hf.TrainStreamTrainer(
        model=model,
        args=arguments,
        data_collator=None if packed else _Padding(),
        train_dataset=rows,
        eval_dataset=held_out,
        trainstream=options,
    )
    trainer.train()
    logged = {key: _history(trainer, key) for key in ("loss", "grad_norm", "eval_loss")}
    trained = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    return logged, trained, trainer


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("packing", [True, 24])
def test_losses_norms_and_weights_are_those_without_packing(
    packing: bool | int,
    chunked: bool,
    tiny_model: Callable[..., Any],
    ragged_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """With accumulation, an evaluation whose last batch is short, and clipping."""
    arguments: dict[str, Any] = {
        "max_steps": 5,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "adam_epsilon": 1e-4,
        "eval_strategy": "steps",
        "eval_steps": 2,
    }
    rows, held_out = ragged_rows(20), ragged_rows(5, seed=4)
    runs = [
        _run(
            tiny_model("llama"),
            training_arguments(**arguments),
            rows,
            held_out,
            {"packing": option, "chunked_loss": chunked},
        )
        for option in (False, packing)
    ]
    (padded, weights, _), (packed, packed_weights, trainer) = runs
    assert isinstance(trainer.data_collator, PackedCollator)
    for key, wanted in padded.items():
        assert len(wanted) == (3 if key == "eval_loss" else 5)
        torch.testing.assert_close(
            torch.tensor(packed[key]), torch.tensor(wanted), rtol=2e-5, atol=0
        )
    for name, wanted in weights.items():
        torch.testing.assert_close(packed_weights[name], wanted, rtol=0, atol=5e-6)


def _falcon() -> Any:
    """A model that does not tell packed sequences apart by position ids."""
    from transformers import FalconConfig

    return FalconConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        new_decoder_architecture=True,
        alibi=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def test_streamed_equals_resident_bit_for_bit(
    tiny_model: Callable[..., Any],
    lora: Callable[..., Any],
    ragged_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """On a model that needs masks of its own; the layers stream while it is tried, too."""
    from transformers import AutoModelForCausalLM

    from ts_core.testing import inject_delays

    def model() -> Any:
        torch.manual_seed(0)
        return lora(AutoModelForCausalLM.from_config(_falcon()))

    runs = []
    for offload in (True, False):
        with inject_delays(seed=1, max_ms=1.0):
            runs.append(
                _run(
                    model(),
                    training_arguments(max_steps=3),
                    ragged_rows(8),
                    ragged_rows(3),
                    {"packing": 32, "param_offload": offload, "offload": True},
                )
            )
    (streamed, one, trainer), (resident, other, _) = runs
    session = trainer.model._trainstream_session
    assert len(session.plan.paged) == 3
    assert any("packing: FalconForCausalLM is given" in line for line in session.events)
    assert streamed == resident
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_metrics_and_predictions_of_packed_rows(
    tiny_model: Callable[..., Any],
    ragged_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """Logits and labels of packed rows belong together; a custom metric sees every token once."""
    held_out = ragged_rows(5)
    seen: list[int] = []

    def metrics(prediction: Any) -> dict[str, float]:
        assert prediction.predictions.shape[:2] == prediction.label_ids.shape
        seen.append(int((prediction.label_ids != -100).sum()))
        return {"tokens": float(seen[-1])}

    trainer = ts_hf.TrainStreamTrainer(
        model=tiny_model("llama"),
        args=training_arguments(),
        train_dataset=held_out,
        eval_dataset=held_out,
        compute_metrics=metrics,
        trainstream={"packing": True},
    )
    result = trainer.evaluate()
    wanted = sum(int((row["labels"][1:] != -100).sum()) for row in held_out)
    assert result["eval_tokens"] == wanted == seen[0]
    predicted = trainer.predict(held_out)
    assert predicted.metrics["test_loss"] == pytest.approx(result["eval_loss"])


def test_batches_flattened_by_transformers_are_kept_apart_too(
    ragged_rows: Callable[..., Any], training_arguments: Callable[..., Any]
) -> None:
    """In transformers' own Trainer this model's sequences would see each other."""
    from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Trainer

    rows = [{k: v.tolist() for k, v in row.items()} for row in ragged_rows(8)]
    losses = []
    for cls, collator in (
        (ts_hf.TrainStreamTrainer, PackedCollator()),
        (ts_hf.TrainStreamTrainer, DataCollatorWithFlattening()),
        (Trainer, DataCollatorWithFlattening()),
    ):
        torch.manual_seed(0)
        trainer = cls(
            model=AutoModelForCausalLM.from_config(_falcon()),
            args=training_arguments(max_steps=2),
            data_collator=collator,
            train_dataset=rows,
        )
        trainer.train()
        losses.append(_history(trainer, "loss"))
    assert losses[1] == losses[0]
    assert abs(losses[2][0] - losses[0][0]) > 1e-4


def test_collators_that_clash(
    tiny_model: Callable[..., Any], training_arguments: Callable[..., Any]
) -> None:
    def make(collator: Any, packing: Any) -> Any:
        return ts_hf.TrainStreamTrainer(
            model=tiny_model("llama", pad_token_id=3),
            args=training_arguments(),
            data_collator=collator,
            trainstream={"packing": packing},
        )

    with pytest.raises(OptionError, match="packing=True makes the batches itself"):
        make(_Padding(), True)
    with pytest.raises(OptionError, match=r"data_collator=PackedCollator\(max_len=8"):
        make(PackedCollator(8), 16)
    given = PackedCollator(16)
    assert make(given, 16).data_collator is given
    assert make(given, False).data_collator is given
    made = make(None, 16).data_collator
    assert (made.max_len, made.pad_id) == (16, 3)


def test_a_model_that_cannot_pack_is_refused_before_a_step(
    ragged_rows: Callable[..., Any], training_arguments: Callable[..., Any]
) -> None:
    from transformers import AutoModelForCausalLM, BloomConfig

    model = AutoModelForCausalLM.from_config(
        BloomConfig(vocab_size=256, hidden_size=32, n_layer=2, n_head=4)
    )
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainer = ts_hf.TrainStreamTrainer(
        model=model,
        args=training_arguments(),
        train_dataset=ragged_rows(4),
        trainstream={"packing": True},
    )
    with pytest.raises(OptionError, match="BloomForCausalLM takes no position_ids"):
        trainer.train()
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash_attention_2"])
def test_packed_on_a_gpu(
    attention: str,
    checkpoint: Callable[..., Any],
    lora: Callable[..., Any],
    codec: str,
    ragged_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """Streamed = resident bit for bit, packed = padded within bfloat16's rounding."""
    if attention == "flash_attention_2":
        pytest.importorskip("flash_attn", reason="the package flash-attn is not installed")
    folder = checkpoint("llama")
    runs = []
    for packing, offload in ((32, True), (32, False), (False, True)):
        model = ts_hf.load_model(folder, quantize=codec, attn_implementation=attention)
        runs.append(
            _run(
                lora(model),
                training_arguments(use_cpu=False, max_steps=4, max_grad_norm=0.5),
                ragged_rows(12),
                ragged_rows(3),
                {"packing": packing, "param_offload": offload, "offload": True},
            )[:2]
        )
    (streamed, one), (resident, other), (padded, _) = runs
    assert streamed == resident
    assert all(torch.equal(one[name], other[name]) for name in one)
    torch.testing.assert_close(
        torch.tensor(streamed["loss"]), torch.tensor(padded["loss"]), rtol=1e-2, atol=0
    )
