"""pad_to_multiple_of: few lengths come, and losses, gradients and weights stay what they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import ts_hf
from ts_core import memory_report
from ts_core.engine.replay import setup
from ts_core.engine.replay.host_recorder import HostRecorder
from ts_core.errors import DataError, OptionError
from ts_hf import PackedCollator, PaddedCollator
from ts_hf.cli.streaming import parse_options


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A padded batch, without a mask where nothing was padded."""
    ids = [row["input_ids"] for row in rows]
    batch = {
        "input_ids": pad_sequence(ids, True, 0),
        "labels": pad_sequence([row["labels"] for row in rows], True, -100),
    }
    mask = pad_sequence([torch.ones_like(row) for row in ids], True, 0)
    return batch if bool(mask.all()) else {**batch, "attention_mask": mask}


def rows_of(*lengths: int) -> list[dict[str, torch.Tensor]]:
    tokens = [torch.arange(5, 5 + length) for length in lengths]
    return [{"input_ids": ids, "labels": ids.clone()} for ids in tokens]


def test_columns_are_padded_each_in_its_way() -> None:
    def inner(rows: Any) -> dict[str, Any]:
        batch = collate(rows)
        batch["position_ids"] = torch.arange(3).expand(2, 3)
        batch["token_type_ids"] = torch.ones(2, 3, dtype=torch.int64)
        batch["completion_mask"] = torch.ones(2, 3, dtype=torch.int64)
        return {**batch, "weight": torch.ones(2), "names": ["a", "b"]}

    batch = PaddedCollator(inner, 4, pad_id=9)(rows_of(3, 2))
    assert batch["input_ids"].tolist() == [[5, 6, 7, 9], [5, 6, 0, 9]]
    assert batch["labels"].tolist() == [[5, 6, 7, -100], [5, 6, -100, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3]] * 2
    assert batch["token_type_ids"].tolist() == [[1, 1, 1, 0]] * 2
    assert batch["completion_mask"].tolist() == [[1, 1, 1, 0]] * 2
    assert batch["weight"].tolist() == [1, 1] and batch["names"] == ["a", "b"]


@pytest.mark.parametrize("length, wanted", [(3, 8), (8, 8), (9, 16), (17, 20), (25, 25)])
def test_lengths(length: int, wanted: int) -> None:
    """Up to the multiple, but not beyond what the model takes; a mask says what is padding."""
    batch = PaddedCollator(collate, 8, max_length=20)(rows_of(length))
    assert batch["input_ids"].shape == batch["labels"].shape == (1, wanted)
    assert batch["attention_mask"].tolist() == [[1] * length + [0] * (wanted - length)]


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"inputs_embeds": torch.zeros(1, 3, 4)}, r"makes no input_ids \[B, T\]"),
        ({"input_ids": torch.arange(3)}, r"makes no input_ids \[B, T\]"),
        ({"input_ids": torch.ones(1, 3), "weights": torch.ones(1, 3)}, "column 'weights'"),
        ({"input_ids": torch.ones(1, 3), "bias": torch.ones(1, 3, 3)}, r"shape \(1, 3, 3\)"),
        (
            {"input_ids": torch.ones(1, 3), "position_ids": torch.tensor([[0, 1, 0]])},
            "packed rows",
        ),
    ],
)
def test_batches_that_cannot_be_padded(batch: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        PaddedCollator(lambda rows: dict(batch), 8)([])


def test_one_packed_row_of_few_lengths() -> None:
    batch = PackedCollator(pad_id=1, pad_to_multiple_of=4)([[5, 6, 7], [8, 9]])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 1, 1, 1]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, 9, -100, -100, -100]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    with pytest.raises(OptionError, match="rows of max_len=8 have one length already"):
        PackedCollator(8, pad_to_multiple_of=4)


@pytest.mark.parametrize("value", [0, -8, True, 8.0, "8"])
def test_values_that_are_no_multiple(value: Any) -> None:
    for make in (
        lambda: PaddedCollator(collate, value),
        lambda: PackedCollator(pad_to_multiple_of=value),
        lambda: ts_hf.TrainStreamTrainer(trainstream={"pad_to_multiple_of": value}),
    ):
        with pytest.raises(OptionError, match="pad_to_multiple_of="):
            make()


@pytest.fixture
def ragged(token_rows: Callable[..., Any]) -> Callable[..., list[dict[str, torch.Tensor]]]:
    """ragged(count, seed=0): rows of 3 to 18 tokens."""

    def make(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
        rows = token_rows(count, 18, seed=seed)
        return [
            {key: value[: 3 + (index * 7) % 16] for key, value in row.items()}
            for index, row in enumerate(rows)
        ]

    return make


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("packing", [False, True])
def test_training_is_what_it_was_with_few_lengths(
    packing: bool,
    chunked: bool,
    tiny_model: Callable[..., Any],
    ragged: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    runs = []
    for multiple in (None, 16):
        model, lengths = tiny_model("llama"), []

        def note(layer: Any, args: Any, lengths: list[int] = lengths) -> None:
            if layer.training:  # not where packing and the head are tried out
                lengths.append(args[0].shape[1])

        model.model.layers[0].register_forward_pre_hook(note)
        trainer = ts_hf.TrainStreamTrainer(
            model=model,
            args=training_arguments(
                max_steps=6,
                gradient_accumulation_steps=2,
                max_grad_norm=0.5,
                adam_epsilon=1e-4,
                eval_strategy="steps",
                eval_steps=3,
            ),
            data_collator=None if packing else collate,
            train_dataset=ragged(24),
            eval_dataset=ragged(5, seed=4),
            trainstream={
                "packing": packing,
                "chunked_loss": chunked,
                "pad_to_multiple_of": multiple,
            },
        )
        trainer.train()
        logged = {
            key: [line[key] for line in trainer.state.log_history if key in line]
            for key in ("loss", "grad_norm", "eval_loss")
        }
        weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        runs.append((logged, weights, lengths))
    (plain, weights, lengths), (padded, padded_weights, few) = runs
    assert len(few) == len(lengths) == 12 and {length % 16 for length in few} == {0}
    assert len(set(few)) < len(set(lengths))
    for key, wanted in plain.items():
        assert len(wanted) == (2 if key == "eval_loss" else 6)
        torch.testing.assert_close(
            torch.tensor(padded[key]), torch.tensor(wanted), rtol=2e-5, atol=0
        )
    for name, wanted in weights.items():
        torch.testing.assert_close(padded_weights[name], wanted, rtol=0, atol=5e-6)


def test_what_the_trainer_makes_of_it(
    tiny_model: Callable[..., Any], training_arguments: Callable[..., Any]
) -> None:
    def make(collator: Any, **options: Any) -> Any:
        model = tiny_model("llama", pad_token_id=3)
        return ts_hf.TrainStreamTrainer(
            model=model, args=training_arguments(), data_collator=collator, trainstream=options
        ).data_collator

    assert make(collate) is collate  # nothing unless it is asked for
    made = make(collate, pad_to_multiple_of=8)
    assert isinstance(made, PaddedCollator) and made.collator is collate
    assert (made.pad_to_multiple_of, made.pad_id) == (8, 3)
    assert made.max_length == tiny_model("llama").config.max_position_embeddings
    made = make(None, pad_to_multiple_of=8, packing=True)
    assert isinstance(made, PackedCollator) and made.pad_to_multiple_of == 8
    given = PackedCollator(pad_to_multiple_of=8)
    assert make(given, packing=True) is given
    assert make(given, packing=True, pad_to_multiple_of=8) is given
    with pytest.raises(OptionError, match="packing=16 makes rows of that length already"):
        make(None, pad_to_multiple_of=8, packing=16)
    with pytest.raises(OptionError, match="packing=True makes the batches itself"):
        make(given, pad_to_multiple_of=4, packing=True)
    with pytest.raises(OptionError, match=r"packs\. Pass it to that collator"):
        make(PackedCollator(), pad_to_multiple_of=8)


def test_the_option_of_the_command() -> None:
    assert parse_options(("pad_to_multiple_of=64",)) == {"pad_to_multiple_of": 64}
    with pytest.raises(OptionError, match="loader can only be given from Python"):
        parse_options(("loader=x",))


def test_blocks_are_replayed_where_few_lengths_come(
    tiny_model: Callable[..., Any],
    lora: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows of 30 lengths; recorded on the host, as a GPU would."""
    monkeypatch.setattr(setup, "recorder_for", lambda device: HostRecorder())
    rows = [
        {key: value[: 3 + index] for key, value in row.items()}
        for index, row in enumerate(token_rows(30, 32))
    ]
    found = {}
    for multiple in (None, 16):
        model = lora(tiny_model("llama"))
        trainer = ts_hf.TrainStreamTrainer(
            model=model,
            args=training_arguments(max_steps=30, per_device_train_batch_size=1),
            data_collator=collate,
            train_dataset=rows,
            trainstream={
                "cuda_graphs": True,
                "pad_to_multiple_of": multiple,
                "chunked_loss": False,
            },
        )
        trainer.train()
        found[multiple] = memory_report(model)
    told = {
        multiple: any("cuda_graphs: batches of" in event for event in report["events"])
        for multiple, report in found.items()
    }
    assert told == {None: True, 16: False}
    assert found[None]["replay"]["replayed_forwards"] == 0
    assert found[16]["replay"]["replayed_backwards"] > 40  # 3 blocks, 30 steps
