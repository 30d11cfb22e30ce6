"""TRL's trainers on a model that streams: their own numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainingArguments

import ts_hf
from ts_core.errors import OptionError, StateError

pytestmark = [
    # TRL announces what it will remove, and trains in bf16 where the CPU has it unless told not to.
    pytest.mark.filterwarnings("ignore::FutureWarning:trl"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(datasets|multiprocess|dill|trl)"),
]

WORDS = ("one two three", "four five", "six seven eight nine", "ten", "eleven twelve", "zero")


@pytest.fixture
def trl() -> Any:
    found = pytest.importorskip("trl", reason="the package trl is not installed")
    from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

    assert SFTTrainer and DPOTrainer and SFTConfig and DPOConfig  # loaded on first use
    return found


@pytest.fixture
def arguments(tmp_path: Any) -> Callable[..., Any]:
    """arguments(config class, **changes)"""

    def make(config: Any, **changes: Any) -> Any:
        fields: dict[str, Any] = {
            "output_dir": str(tmp_path / "run"),
            "max_steps": 5,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 5e-3,
            "adam_epsilon": 1e-4,
            "max_grad_norm": 1.0,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
            "log_level": "error",
        }
        return config(**{**fields, **changes})

    return make


@pytest.fixture
def model_for_text(tiny_model: Callable[..., Any], byte_tokenizer: Any) -> Callable[..., Any]:
    """model_for_text(): a tiny Llama for the tokens of `byte_tokenizer`."""

    def make() -> Any:
        return tiny_model("llama", vocab_size=len(byte_tokenizer), pad_token_id=0, eos_token_id=1)

    return make


def _history(trainer: Any, key: str) -> list[float]:
    return [line[key] for line in trainer.state.log_history if key in line]


def _adapter(rank: int = 4) -> Any:
    peft = pytest.importorskip("peft", reason="the optional package peft is not installed")
    return peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM")


def _compare(stock: Any, ours: Any, keys: tuple[str, ...], rtol: float = 2e-5) -> None:
    for key in keys:
        wanted, found = _history(stock, key), _history(ours, key)
        assert len(wanted) >= 2, key
        assert found == pytest.approx(wanted, rel=rtol, abs=1e-6), key
    assert "ts_pinned_gb" in ours.state.log_history[0]
    wanted = {n: p for n, p in stock.model.named_parameters() if p.requires_grad}
    for name, parameter in ours.model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter, wanted[name], rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_sft(
    kind: str,
    trl: Any,
    arguments: Callable[..., Any],
    model_for_text: Callable[..., Any],
    byte_tokenizer: Any,
) -> None:
    """On prompts and completions, with evaluation; TRL's own metrics too."""
    from datasets import Dataset

    rows = [{"prompt": f"{word} is ", "completion": word.upper()} for word in WORDS * 2]
    trainers = []
    for cls, more in (
        (trl.SFTTrainer, {}),
        (ts_hf.streaming_trainer(trl.SFTTrainer), {"trainstream": {"param_offload": True}}),
    ):
        if kind == "full" and more:
            more = {"trainstream": None}
        torch.manual_seed(0)
        trainer = cls(
            model=model_for_text(),
            args=arguments(trl.SFTConfig, eval_strategy="steps", eval_steps=2),
            train_dataset=Dataset.from_list(rows),
            eval_dataset=Dataset.from_list(rows[:4]),
            processing_class=byte_tokenizer,
            peft_config=_adapter() if kind == "lora" else None,
            **more,
        )
        trainer.train()
        trainers.append(trainer)
    assert isinstance(trainers[1], trl.SFTTrainer)
    if kind == "lora":
        session = trainers[1].model._trainstream_session
        assert len(session.plan.paged) == 4
    _compare(*trainers, ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens"))


@pytest.mark.parametrize("precompute", [False, True])
def test_dpo(
    precompute: bool,
    trl: Any,
    arguments: Callable[..., Any],
    model_for_text: Callable[..., Any],
    byte_tokenizer: Any,
) -> None:
    from datasets import Dataset

    rows = [
        {"prompt": f"{word} is ", "chosen": word.upper(), "rejected": "nothing"}
        for word in WORDS * 2
    ]
    trainers = []
    # Ours first: TRL keeps precomputed references by the model's and the data's hash.
    for cls, more in (
        (ts_hf.streaming_trainer(trl.DPOTrainer), {"trainstream": {"param_offload": True}}),
        (trl.DPOTrainer, {}),
    ):
        torch.manual_seed(0)
        trainer = cls(
            model=model_for_text(),
            args=arguments(trl.DPOConfig, beta=0.3, precompute_ref_log_probs=precompute),
            train_dataset=Dataset.from_list(rows),
            processing_class=byte_tokenizer,
            peft_config=_adapter(),
            **more,
        )
        assert hasattr(trainer.model, "_trainstream_session") == (precompute and bool(more))
        trainer.train()
        trainers.append(trainer)
    ours, stock = trainers
    assert _history(ours, "loss")[0] == pytest.approx(0.693147, rel=1e-5)
    assert _history(ours, "loss")[-1] < 0.69
    _compare(stock, ours, ("loss", "grad_norm", "rewards/margins", "rewards/accuracies"))


@pytest.mark.parametrize("which", ["sft", "dpo"])
def test_a_stock_trainer_on_a_wrapped_model(
    which: str,
    trl: Any,
    arguments: Callable[..., Any],
    model_for_text: Callable[..., Any],
    byte_tokenizer: Any,
    lora: Callable[..., Any],
) -> None:
    """On the host device, with TrainStreamCallback. DPO adds a reference adapter afterwards."""
    from datasets import Dataset

    if which == "sft":
        rows = [{"prompt": f"{word} is ", "completion": word.upper()} for word in WORDS * 2]
        trainer_class, config = trl.SFTTrainer, trl.SFTConfig
    else:
        rows = [
            {"prompt": f"{word} is ", "chosen": word.upper(), "rejected": "nothing"}
            for word in WORDS * 2
        ]
        trainer_class, config = trl.DPOTrainer, trl.DPOConfig
    trainers = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model, more = lora(model_for_text()), {}
        if wrapped:
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=5e-3, eps=1e-4, weight_decay=0.0)
            model, optimizer = ts_hf.wrap_hf(model, optimizer, device="cpu", param_offload=True)
            more["optimizers"] = (optimizer, None)
            more["callbacks"] = [ts_hf.TrainStreamCallback(optimizer)]
        trainer = trainer_class(
            model=model,
            args=arguments(config),
            train_dataset=Dataset.from_list(rows),
            processing_class=byte_tokenizer,
            **more,
        )
        trainer.train()
        trainers.append(trainer)
    _compare(*trainers, ("loss", "grad_norm"))


def test_on_a_quantized_base_with_checkpoints(
    trl: Any,
    arguments: Callable[..., Any],
    model_for_text: Callable[..., Any],
    byte_tokenizer: Any,
    codec: str,
    tmp_path: Any,
) -> None:
    """Streamed equals resident; the run resumes bit for bit."""
    from datasets import Dataset

    model_for_text().save_pretrained(tmp_path / "model")
    rows = Dataset.from_list([{"text": text} for text in WORDS * 2])
    weights = []
    for offload, resume in ((True, None), (False, None), (True, f"{tmp_path}/0/checkpoint-3")):
        torch.manual_seed(0)
        trainer = ts_hf.streaming_trainer(trl.SFTTrainer)(
            ts_hf.load_model(tmp_path / "model", quantize=codec, dtype=torch.float32),
            arguments(
                trl.SFTConfig,
                output_dir=f"{tmp_path}/{len(weights)}",
                save_strategy="steps",
                save_steps=3,
            ),
            train_dataset=rows,
            processing_class=byte_tokenizer,
            peft_config=_adapter(),
            trainstream={"param_offload": offload, "offload": True},
        )
        trainer.train(resume_from_checkpoint=resume)
        weights.append([p.detach() for p in trainer.model.parameters() if p.requires_grad])
    for others in weights[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights[0], others, strict=True))


# -- any Trainer ---------------------------------------------------------------------------------


class _OwnOrder(Trainer):  # type: ignore[misc]
    """Takes its arguments in another order, and computes its own loss."""

    def __init__(self, model: Any, weight: float, args: Any, **kwargs: Any) -> None:
        self.weight = weight
        super().__init__(model, args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kw: Any) -> Any:
        assert not return_outputs  # asked for only where it is needed
        return super().compute_loss(model, inputs, **kw) * self.weight


def test_a_trainer_of_the_users(
    tiny_model: Callable[..., Any],
    token_rows: Callable[..., Any],
    training_arguments: Callable[..., Any],
) -> None:
    losses = []
    for cls in (_OwnOrder, ts_hf.streaming_trainer(_OwnOrder)):
        trainer = cls(
            tiny_model("llama"),
            0.5,
            training_arguments(max_steps=2),
            train_dataset=token_rows(4, 12),
        )
        assert trainer.weight == 0.5 and trainer.args.max_steps == 2
        trainer.train()
        losses.append(_history(trainer, "loss"))
    assert losses[1] == pytest.approx(losses[0], rel=2e-6)


def test_the_class(tiny_model: Callable[..., Any], tmp_path: Any) -> None:
    made = ts_hf.streaming_trainer(Trainer)
    assert made is ts_hf.streaming_trainer(Trainer) and made.__name__ == "StreamingTrainer"
    assert ts_hf.streaming_trainer(made) is made
    assert ts_hf.streaming_trainer(ts_hf.TrainStreamTrainer) is ts_hf.TrainStreamTrainer
    for wrong in (int, "Trainer", TrainingArguments):
        with pytest.raises(OptionError, match=r"no.* a subclass of transformers\.Trainer"):
            ts_hf.streaming_trainer(wrong)
    arguments = TrainingArguments(output_dir=str(tmp_path), optim="sgd", use_cpu=True)
    with pytest.raises(OptionError, match="optim='sgd'"):
        made(tiny_model("llama"), arguments)
    with pytest.raises(TypeError, match="model cannot be placed"):
        made(tiny_model("llama"), model=None)
    wrapped, _ = ts_hf.wrap_hf(tiny_model("llama"), device="cpu")
    with pytest.raises(StateError, match="already wrapped"):
        made(wrapped, TrainingArguments(output_dir=str(tmp_path), use_cpu=True))


# -- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("which", ["sft", "dpo", "dpo precomputed"])
def test_streamed_equals_resident_on_a_gpu(
    which: str,
    trl: Any,
    arguments: Callable[..., Any],
    model_for_text: Callable[..., Any],
    byte_tokenizer: Any,
    codec: str,
    tmp_path: Any,
) -> None:
    """In bfloat16 with TRL's defaults (autocast, gradient checkpointing), bit for bit."""
    from datasets import Dataset

    model_for_text().save_pretrained(tmp_path / "model")
    base, config = (
        (trl.SFTTrainer, trl.SFTConfig) if which == "sft" else (trl.DPOTrainer, trl.DPOConfig)
    )
    rows = [
        {"prompt": f"{word} is ", "completion": word.upper()}
        if which == "sft"
        else {"prompt": f"{word} is ", "chosen": word.upper(), "rejected": "nothing"}
        for word in WORDS * 2
    ]
    more = {"precompute_ref_log_probs": True} if which == "dpo precomputed" else {}
    runs = []
    for offload in (True, False):
        torch.manual_seed(0)
        trainer = ts_hf.streaming_trainer(base)(
            model=ts_hf.load_model(tmp_path / "model", quantize=codec),
            args=arguments(config, use_cpu=False, bf16=True, **more),
            train_dataset=Dataset.from_list(rows),
            processing_class=byte_tokenizer,
            peft_config=_adapter(),
            trainstream={"param_offload": offload, "offload": True},
        )
        trainer.train()
        trained = [p.detach().clone() for p in trainer.model.parameters() if p.requires_grad]
        assert all(p.is_cuda for p in trained)
        runs.append((_history(trainer, "loss"), trained))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
