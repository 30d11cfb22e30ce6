"""Tiny models and data for the tests of ts_hf."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

VOCABULARY = 256


@pytest.fixture(autouse=True)
def _quiet_transformers() -> Iterator[None]:
    """No progress bars; a Trainer's change of the log level does not outlive its test."""
    import transformers.utils.logging as hf_logging

    hf_logging.disable_progress_bar()
    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    yield
    hf_logging.set_verbosity(level)
    os.environ.pop("ACCELERATE_MIXED_PRECISION", None)


@pytest.fixture(autouse=True)
def _fresh_accelerate_state() -> Iterator[None]:
    """accelerate keeps process-wide state, mixed precision included."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def tiny_config() -> Callable[..., Any]:
    """tiny_config("llama", **changes): a transformers config of a few thousand values."""

    def make(family: str, **changes: Any) -> Any:
        import transformers

        common: dict[str, Any] = {
            "vocab_size": VOCABULARY,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
        llama_like = {
            **common,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
        if family == "gpt2":
            fields = {**common, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}
            fields |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            return transformers.GPT2Config(**{**fields, **changes})
        if family == "mixtral":
            fields = {**llama_like, "num_local_experts": 12, "num_hidden_layers": 2}
            return transformers.MixtralConfig(**{**fields, **changes})
        if family == "gemma2":
            fields = {**llama_like, "head_dim": 16}
            return transformers.Gemma2Config(**{**fields, **changes})
        if family == "qwen2":
            return transformers.Qwen2Config(**{**llama_like, **changes})
        assert family == "llama"
        return transformers.LlamaConfig(**{**llama_like, **changes})

    return make


@pytest.fixture
def tiny_model(tiny_config: Callable[..., Any]) -> Callable[..., Any]:
    """tiny_model("llama", seed=0, **changes): an ordinary transformers model, random weights."""

    def make(family: str, *, seed: int = 0, **changes: Any) -> Any:
        from transformers import AutoModelForCausalLM

        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(tiny_config(family, **changes))

    return make


@pytest.fixture
def checkpoint(tiny_model: Callable[..., Any], tmp_path: Path) -> Callable[..., Path]:
    """checkpoint("llama", shards=True, **changes): a saved tiny model's folder."""

    def make(family: str = "llama", *, shards: bool = False, **changes: Any) -> Path:
        folder = tmp_path / f"{family}-{'sharded' if shards else 'single'}"
        size = "60KB" if shards else "5GB"
        tiny_model(family, **changes).save_pretrained(folder, max_shard_size=size)
        assert (folder / "model.safetensors.index.json").exists() == shards
        return folder

    return make


@pytest.fixture
def token_rows() -> Callable[..., list[dict[str, torch.Tensor]]]:
    """token_rows(count, length, seed=0): rows of random tokens with labels."""

    def make(count: int, length: int, *, seed: int = 0) -> list[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        rows = []
        for _ in range(count):
            ids = torch.randint(0, VOCABULARY, (length,), generator=generator)
            rows.append({"input_ids": ids, "labels": ids.clone()})
        return rows

    return make


@pytest.fixture
def training_arguments(tmp_path: Path) -> Callable[..., Any]:
    """training_arguments(**changes): TrainingArguments for the CPU that report nothing."""

    def make(**changes: Any) -> Any:
        from transformers import TrainingArguments

        fields: dict[str, Any] = {
            "output_dir": str(tmp_path / "run"),
            "max_steps": 6,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "log_level": "error",
        }
        return TrainingArguments(**{**fields, **changes})

    return make


@pytest.fixture
def lora() -> Callable[..., Any]:
    """lora(model, seed=0, autocast=True, **changes): the model with PEFT LoRA, its adapters in
    fp32 unless `autocast` is False; skips where peft is missing."""
    peft = pytest.importorskip("peft", reason="the optional package peft is not installed")

    def make(model: Any, *, seed: int = 0, autocast: bool = True, **changes: Any) -> Any:
        torch.manual_seed(seed)
        fields: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
        config = peft.LoraConfig(**{**fields, **changes})
        adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=autocast)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():  # B starts at zero, which would hide errors in A's gradient
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
        return adapted

    return make


@pytest.fixture
def codec() -> str:
    """The name of a quantizing codec; skips where ts-quant is not installed."""
    from ts_core.registry import codecs

    if not codecs.has("nf4"):
        pytest.skip("no codec is installed (ts-quant)")
    return "nf4"


@pytest.fixture
def edit_header() -> Callable[[Path, Callable[[dict[str, Any]], None]], None]:
    """edit_header(file, change): rewrite a safetensors file's header, leaving the data."""

    def edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        change(header)
        made = json.dumps(header).encode()
        file.write_bytes(len(made).to_bytes(8, "little") + made + raw[8 + length :])

    return edit


@pytest.fixture
def tiny_llm(tmp_path: Path, tiny_model: Callable[..., Any]) -> Path:
    """A folder with a tiny model and a tokenizer of bytes, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "tiny-llm"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<end>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<end>' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tiny_model("llama", vocab_size=len(vocabulary), num_hidden_layers=6).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture
def byte_tokenizer() -> Any:
    """A tokenizer whose tokens are bytes; 0 is padding and 1 ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<pad>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="<pad>")


@pytest.fixture
def unequal_rows(token_rows: Callable[..., Any]) -> Callable[..., Any]:
    """unequal_rows(count, seed=0): rows of one length with 2 to 10 labels that count."""

    def make(count: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
        rows: list[dict[str, torch.Tensor]] = token_rows(count, 12, seed=seed)
        for index, row in enumerate(rows):
            row["labels"][: 2 + (3 * index) % 9] = -100
        return rows

    return make


@pytest.fixture
def both(
    tiny_model: Callable[..., Any], training_arguments: Callable[..., Any]
) -> Callable[..., Any]:
    """both(rows, model=..., trainer=..., **arguments): five steps of stock and of ours."""

    from transformers import Trainer

    import ts_hf

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


@pytest.fixture
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing the page takes longer than these runs; tests/test_finetune_page.py has it."""
    from ts_hf.cli import run

    monkeypatch.setattr(run, "write_page", lambda *args: None)


@pytest.fixture
def settings(tiny_llm: Path, tmp_path: Path, codec: str) -> Callable[..., Any]:
    """settings(**changes): a run of six steps on a few texts, layers streaming under a limit."""
    from ts_hf.cli.settings import FinetuneConfig

    texts = tmp_path / "texts"
    texts.mkdir()
    for index in range(30):
        (texts / f"{index}.txt").write_text(f"the quick brown fox {index} jumps over it. " * 12)

    def make(**changes: Any) -> Any:
        values: dict[str, Any] = {
            "model": str(tiny_llm),
            "data": (str(texts),),
            "output": str(tmp_path / "out"),
            "quantize": codec,
            "block_limit": "60KiB",
            "seq_length": 32,
            "batch_size": 2,
            "accumulation": 2,
            "steps": 6,
            "lr": 1e-2,
            "eval_rows": 4,
            "save_every": 2,
            "device": "cpu",
            "dtype": "float32",
            "lora_dropout": 0.1,
            "sample_tokens": 3,
        }
        return FinetuneConfig(**{**values, **changes})

    return make
