"""TrainStreamTrainer against transformers.Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback

import ts_core
import ts_hf
from ts_core.errors import OptionError, StateError
from ts_core.registry import codecs
from ts_hf.training.schedulers import parted, rebind

MEMORY_KEYS = {
    "ts_vram_alloc_gb",
    "ts_vram_peak_gb",
    "ts_pinned_gb",
    "ts_host_state_gb",
    "ts_d2h_gb",
    "ts_h2d_gb",
}
# 14 rows in batches of 2, two batches a step: the last window of an epoch has one batch.
ROWS, LENGTH = 14, 12


def _history(trainer: Any, key: str) -> list[float]:
    return [line[key] for line in trainer.state.log_history if key in line]


def _trained(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("kind", ["llama", "gpt2", "lora", "lora-resident"])
@pytest.mark.parametrize("max_grad_norm", [0.5, 0.0])
def test_equals_transformers_trainer(
    kind: str,
    max_grad_norm: float,
    tiny_model: Callable[..., Any],
    request: pytest.FixtureRequest,
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """Losses, norms, learning rates, evaluation and weights, with accumulation and a schedule."""

    def model() -> Any:
        made = tiny_model(kind if kind == "gpt2" else "llama", tie_word_embeddings=True)
        return request.getfixturevalue("lora")(made) if kind.startswith("lora") else made

    arguments: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "max_grad_norm": max_grad_norm,
        "weight_decay": 0.1,
        "adam_epsilon": 1e-4,  # else Adam turns a rounding of a zero gradient into a whole step
        "warmup_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 3,
    }
    rows, held_out = token_rows(ROWS, LENGTH), token_rows(4, LENGTH, seed=9)
    rows[3]["labels"][2:] = -100  # windows with different numbers of labels
    options: dict[str, Any] = {"param_offload": kind == "lora", "loss_chunk_size": 7}
    stock = Trainer(
        model=model(),
        args=training_arguments(**arguments),
        train_dataset=rows,
        eval_dataset=held_out,
    )
    ours = ts_hf.TrainStreamTrainer(
        model=model(),
        args=training_arguments(**arguments),
        train_dataset=rows,
        eval_dataset=held_out,
        trainstream=options,
    )
    stock.train()
    ours.train()
    for key, rtol in (("loss", 2e-6), ("eval_loss", 2e-6), ("learning_rate", 0)):
        wanted, found = _history(stock, key), _history(ours, key)
        assert len(found) == len(wanted) > 1
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(wanted), rtol=rtol, atol=0, msg=lambda m, k=key: k + m
        )
    if max_grad_norm:
        norms = torch.tensor(_history(stock, "grad_norm"))
        assert (norms > max_grad_norm).any()  # clipping did something
        torch.testing.assert_close(
            torch.tensor(_history(ours, "grad_norm")), norms, rtol=1e-5, atol=0
        )
    for (name, wanted), found in zip(
        _trained(stock.model).items(), _trained(ours.model).values(), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6, msg=lambda m, n=name: n + m)
    for line in ours.state.log_history:
        assert set(line) >= MEMORY_KEYS
    assert ours.model._trainstream_session.config.blocks is not None


def test_bf16_autocast_follows_transformers(
    tiny_model: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """fp32 weights with bf16=True: the same precision as transformers', within bf16's rounding."""
    losses = []
    for cls in (Trainer, ts_hf.TrainStreamTrainer):
        trainer = cls(
            model=tiny_model("llama"),
            args=training_arguments(bf16=True, max_steps=3),
            train_dataset=token_rows(ROWS, LENGTH),
        )
        trainer.train()
        losses.append(_history(trainer, "loss"))
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=2e-3, atol=0)


def test_bf16_weights_train_through_fp32_masters(
    tiny_model: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """Updates far below a bf16 step still add up."""
    model = tiny_model("llama").to(torch.bfloat16)
    trainer = ts_hf.TrainStreamTrainer(
        model=model,
        args=training_arguments(learning_rate=1e-5, max_steps=4),
        train_dataset=token_rows(ROWS, LENGTH),
    )
    before = _trained(model)
    trainer.train()
    name = "model.layers.0.mlp.up_proj.weight"
    state = trainer.optimizer.state_dict()["state"]
    masters = [entry["master"] for entry in state.values()]
    moved = [master for master in masters if master.shape == before[name].shape]
    assert moved and all(master.dtype == torch.float32 for master in masters)
    drift = min((master - before[name].float()).abs().max() for master in moved)
    assert 1e-5 < drift < 1e-4
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


class _Endless(IterableDataset):  # type: ignore[type-arg]
    """Has no length, and ends in the middle of an accumulation window."""

    def __init__(self, rows: list[dict[str, torch.Tensor]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(self.rows)


def test_data_that_ends_within_a_window(
    tiny_model: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """Five batches, windows of two; transformers carries the fifth into the next window."""
    results = []
    for cls in (Trainer, ts_hf.TrainStreamTrainer):
        trainer = cls(
            model=tiny_model("llama"),
            args=training_arguments(
                gradient_accumulation_steps=2, max_steps=5, adam_epsilon=1e-4, max_grad_norm=0.0
            ),
            train_dataset=_Endless(token_rows(10, LENGTH)),
        )
        trainer.train()
        results.append((_history(trainer, "loss"), _trained(trainer.model)))
    (stock_losses, stock), (losses, ours) = results
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(stock_losses), rtol=2e-6, atol=0)
    for name, wanted in stock.items():
        torch.testing.assert_close(ours[name], wanted, rtol=0, atol=2e-6)


def test_evaluation_before_training_and_with_metrics(
    tiny_model: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    rows = token_rows(4, LENGTH)
    model = tiny_model("llama")
    with torch.no_grad():
        batch = {k: torch.stack([row[k] for row in rows]) for k in rows[0]}
        wanted = model(**batch).loss.item()
    seen: list[Any] = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(prediction.predictions.shape)
        return {"rows": float(len(prediction.predictions))}

    trainer = ts_hf.TrainStreamTrainer(
        model=model,
        args=training_arguments(),
        train_dataset=rows,
        eval_dataset=rows,
        compute_metrics=metrics,
    )
    result = trainer.evaluate()
    assert result["eval_loss"] == pytest.approx(wanted, rel=1e-6)
    assert seen == [(4, LENGTH, 256)] and result["eval_rows"] == 4  # whole logits for metrics
    trainer.compute_metrics = None
    assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-6)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < wanted


def test_a_frozen_model_can_be_evaluated(
    tiny_model: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    model = tiny_model("llama").requires_grad_(False)
    trainer = ts_hf.TrainStreamTrainer(
        model=model, args=training_arguments(), eval_dataset=token_rows(2, LENGTH)
    )
    assert trainer.evaluate()["eval_loss"] > 0
    with pytest.raises(OptionError, match="no parameter that requires a gradient"):
        trainer.train_dataset = token_rows(2, LENGTH)
        trainer.train()


def test_lora_on_a_quantized_streamed_base(
    checkpoint: Callable[..., Path],
    lora: Callable[..., Any],
    codec: str,
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """Streaming changes nothing, bit for bit; and the loss goes down."""
    folder = checkpoint("llama")
    runs = []
    for offload in (True, False):
        model = lora(ts_hf.load_model(folder, quantize=codec, dtype=torch.float32))
        trainer = ts_hf.TrainStreamTrainer(
            model=model,
            args=training_arguments(learning_rate=1e-2, max_steps=8),
            train_dataset=token_rows(2, LENGTH),
            trainstream={"param_offload": offload, "offload": True},
        )
        trainer.train()
        session = trainer.model._trainstream_session
        assert len(session.plan.paged) == (4 if offload else 0)
        runs.append((_history(trainer, "loss"), _trained(trainer.model)))
    (streamed, one), (resident, other) = runs
    assert streamed == resident and streamed[-1] < streamed[0] - 0.1
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("codec", ["nf4", "int8", "fp8", "nvfp4", "mxfp4"])
def test_every_adapter_of_a_streamed_base_is_trained_under_checkpointing(
    codec: str,
    checkpoint: Callable[..., Path],
    lora: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """Of either kind, and recomputed or paged by trainstream: the bits of a run without."""
    if not codecs.has(codec):
        pytest.skip("no codec is installed (ts-quant)")
    folder = checkpoint("llama")

    def run(options: dict[str, Any], **arguments: Any) -> dict[str, torch.Tensor]:
        model = lora(ts_hf.load_model(folder, quantize=codec, dtype=torch.float32))
        before = _trained(model)
        trainer = ts_hf.TrainStreamTrainer(
            model=model,
            args=training_arguments(max_steps=2, learning_rate=1e-2, **arguments),
            train_dataset=token_rows(4, LENGTH),
            trainstream={"param_offload": True, **options},
        )
        trainer.train()
        after = _trained(model)
        assert [name for name in before if torch.equal(before[name], after[name])] == []
        return after

    def checkpointing(reentrant: bool) -> dict[str, Any]:
        kwargs = {"use_reentrant": reentrant}
        return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs}

    wanted = run({})
    for found in (
        run({}, **checkpointing(True)),
        run({}, **checkpointing(False)),
        run({"recompute": True}),
        run({"activation_offload": True, "min_offload_bytes": 1}),
    ):
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# -- NaN ----------------------------------------------------------------------------------------


def test_the_operations_counted_are_transformers_own(
    monkeypatch: pytest.MonkeyPatch,
    tiny_model: Callable[..., Any],
    lora: Callable[..., Any],
    unequal_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """Though parameters are counted once."""
    totals, counted = [], []
    for cls in (Trainer, ts_hf.TrainStreamTrainer):
        model = lora(tiny_model("llama"))
        original, calls = type(model.get_base_model()).num_parameters, []

        def count(self: Any, *args: Any, _of: Any = original, _in: Any = calls, **kw: Any) -> Any:
            _in.append(1)
            return _of(self, *args, **kw)

        rows = unequal_rows(10)
        for index, row in enumerate(rows):
            rows[index] = {key: value[: 4 + index // 2 * 2] for key, value in row.items()}
        trainer = cls(
            model=model,
            args=training_arguments(train_sampling_strategy="sequential", max_steps=5),
            train_dataset=rows,
        )
        with monkeypatch.context() as patch:
            patch.setattr(type(model.get_base_model()), "num_parameters", count)
            trainer.train()
        totals.append(trainer.state.total_flos)
        counted.append(len(calls))
    assert totals[0] == totals[1] > 0
    assert counted[0] - counted[1] == 4


class _PutsToSleep(TrainerCallback):
    """Puts one dropout into eval mode at the end of step 2, and looks at all at each step."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        model.register_forward_hook(self._look) if state.global_step == 0 else None

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
        if state.global_step == 2:
            next(m for m in model.modules() if isinstance(m, torch.nn.Dropout)).eval()

    def _look(self, model: Any, args: Any, output: Any) -> None:
        self.seen.append(all(module.training for module in model.modules()))


def test_modes_are_set_as_transformers_sets_them(
    tiny_model: Callable[..., Any],
    lora: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """Every module trains at every step, after evaluations and changes by callbacks too."""
    seen, losses, counts = [], [], []
    for cls in (Trainer, ts_hf.TrainStreamTrainer):
        model = lora(tiny_model("llama"), lora_dropout=0.3).eval()
        calls: list[bool] = []

        def train(
            self: Any, mode: bool = True, _of: Any = torch.nn.Dropout.train, _in: Any = calls
        ) -> Any:
            _in.append(mode)
            return _of(self, mode)

        looks = _PutsToSleep()
        torch.manual_seed(3)
        trainer = cls(
            model=model,
            args=training_arguments(eval_strategy="steps", eval_steps=3),
            train_dataset=token_rows(ROWS, LENGTH),
            eval_dataset=token_rows(2, LENGTH),
            callbacks=[looks],
            **({} if cls is Trainer else {"trainstream": {"chunked_loss": False}}),
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.Dropout, "train", train)
            trainer.train()
        assert "train" not in vars(model)
        seen.append([mode for mode in looks.seen if mode])
        losses.append(_history(trainer, "loss"))
        dropouts = sum(isinstance(module, torch.nn.Dropout) for module in model.modules())
        counts.append(calls.count(True) / dropouts)
    assert len(seen[0]) == len(seen[1]) == 6
    assert losses[1] == pytest.approx(losses[0], rel=5e-6)
    assert counts == [6, 3]  # at first, after the callback, after an evaluation


@pytest.mark.gpu
def test_streamed_equals_resident_on_a_gpu(
    checkpoint: Callable[..., Path],
    lora: Callable[..., Any],
    codec: str,
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    folder = checkpoint("llama")
    runs = []
    for offload in (True, False):
        model = lora(ts_hf.load_model(folder, quantize=codec))
        trainer = ts_hf.TrainStreamTrainer(
            model=model,
            args=training_arguments(use_cpu=False, gradient_accumulation_steps=2),
            train_dataset=token_rows(ROWS, LENGTH),
            # A kernel by timings ("auto") might be another one in each of two runs.
            trainstream={"param_offload": offload, "offload": True, "attention": None},
        )
        trainer.train()
        assert next(iter(_trained(trainer.model).values())).device.type == "cuda"
        runs.append((_history(trainer, "loss"), _trained(trainer.model)))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(runs[0][1][name], runs[1][1][name]) for name in runs[0][1])


# -- an optimizer of the user's, and a stock Trainer --------------------------------------------


def test_given_optimizer_and_scheduler(
    tiny_model: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    results = []
    for cls in (Trainer, ts_hf.TrainStreamTrainer):
        model = tiny_model("llama")
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-4)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        trainer = cls(
            model=model,
            args=training_arguments(max_steps=4),
            train_dataset=token_rows(ROWS, LENGTH),
            optimizers=(optimizer, scheduler),
        )
        trainer.train()
        results.append((_history(trainer, "learning_rate"), _trained(model)))
    assert results[0][0] == results[1][0] == [2e-3, 1e-3, 5e-4, 2.5e-4]
    for name, wanted in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], wanted, rtol=0, atol=2e-6)


def test_a_scheduler_within_a_given_one_drives_the_new_optimizer_too() -> None:
    class Warmup(torch.optim.lr_scheduler.LambdaLR):
        def __init__(self, optimizer: Any, after: Any) -> None:
            self.after = after
            super().__init__(optimizer, lambda step: 1.0)

    def make() -> tuple[Any, Any, Warmup]:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        after = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return model, optimizer, Warmup(optimizer, after)

    model, optimizer, scheduler = make()
    with parted(scheduler, optimizer):
        _, streaming = ts_core.wrap(model, optimizer, device="cpu")
    rebind(scheduler, streaming)
    assert scheduler.optimizer is scheduler.after.optimizer is streaming

    model, optimizer, scheduler = make()
    with pytest.raises(OptionError), parted(scheduler, optimizer):
        ts_core.wrap(model, optimizer, device="cpu", optimizer_mode="none")
    assert scheduler.optimizer is scheduler.after.optimizer is optimizer


def test_callback_for_a_stock_trainer(
    tiny_model: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    """Accumulation and clipping reach the optimizer; the logs get its norm and the memory."""
    arguments: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "adam_epsilon": 1e-4,
        "max_steps": 4,
    }
    stock = Trainer(
        model=tiny_model("llama"),
        args=training_arguments(**arguments),
        train_dataset=token_rows(ROWS, LENGTH),
    )
    stock.train()
    model = tiny_model("llama")
    model, optimizer = ts_hf.wrap_hf(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, weight_decay=0.0),
        device="cpu",
    )
    wrapped = Trainer(
        model=model,
        args=training_arguments(**arguments),
        train_dataset=token_rows(ROWS, LENGTH),
        optimizers=(optimizer, None),
        callbacks=[ts_hf.TrainStreamCallback(optimizer)],
    )
    wrapped.train()
    for key, rtol in (("loss", 2e-6), ("grad_norm", 1e-5)):
        torch.testing.assert_close(
            torch.tensor(_history(wrapped, key)),
            torch.tensor(_history(stock, key)),
            rtol=rtol,
            atol=0,
        )
    assert all(set(line) >= MEMORY_KEYS for line in wrapped.state.log_history if "loss" in line)
    with pytest.raises(StateError, match="max_grad_norm"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
