"""`ts-bench quality`: what storing frozen weights in fewer bits costs, on a real model and text.

For each case the perplexity of held-out text is measured right after loading, and again after a
short LoRA run, once for every seed (which draws the adapters and the order of the training rows).
Each figure is compared with that of the bf16 model treated the same.

Every measurement is one `Row`, handed out as soon as it is done; those already known are skipped,
so that a run can be stopped and resumed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ts_bench.quality_cases import Case
from ts_core.errors import OptionError

_EVAL_BATCH = 4
"""Held-out rows at once, at least: each forward decodes every weight."""

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class QualitySettings:
    """How everything is measured; rows of different settings are not compared.

    Attributes:
        model: folder of the model.
        device: "cuda" or "cpu".
        dtype: "bfloat16" or "float32": what the model computes in. The weights are those of the
            bf16 model either way.
        seq_length: tokens per row.
        eval_rows: held-out rows.
        steps: LoRA steps; 0 for none.
        batch: rows per step.
        rank: of the adapters (alpha is twice that).
        lr: learning rate, constant after a warm-up over the first tenth.
        seeds: one LoRA run each.
    """

    model: str
    device: str
    dtype: str = "bfloat16"
    seq_length: int = 256
    eval_rows: int = 64
    steps: int = 40
    batch: int = 4
    rank: int = 16
    lr: float = 3e-4
    seeds: tuple[int, ...] = (0, 1, 2)


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        case: name of the case.
        seed: of the LoRA run, or None for the model as loaded.
        perplexity: of the held-out text.
        bytes_per_weight: stored bytes per quantized weight, scales included.
        weight_error: relative error of the stored weights (root mean square over matrices), or
            None where it was not measured.
        kept_precise: matrices stored one step more precise.
        seconds: how long it took.
        settings: `QualitySettings` as plain data, and the number of held-out tokens.
    """

    case: str
    seed: int | None
    perplexity: float
    bytes_per_weight: float
    weight_error: float | None
    kept_precise: int
    seconds: float
    settings: dict[str, Any] = field(default_factory=dict)


def measure(
    cases: Sequence[Case],
    settings: QualitySettings,
    *,
    known: Iterable[Row] = (),
    on_row: Callable[[Row], None] = lambda row: None,
    on_progress: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> list[Row]:
    """Measure what is not known yet.

    Args:
        cases: what to compare.
        settings: how.
        known: rows measured before with the same settings.
        on_row: called with each new row.
        on_progress: called with what is being done, and how far it is.

    Returns:
        All rows of these cases, known ones first.

    Raises:
        OptionError: known rows were measured with other settings.
        DataError: the model or the text cannot be used.
        UnknownPluginError: no installed package offers a codec.
    """
    text = _Text(settings)
    kept = [row for row in known if row.case in {case.name for case in cases}]
    for row in kept:
        if row.settings != text.settings:
            raise OptionError(
                f"the known row {row.case!r} was measured with {row.settings}, not with "
                f"{text.settings}. Give another output file, or the same settings."
            )
    done = {(row.case, row.seed) for row in kept}
    seeds: list[int | None] = [None, *(settings.seeds if settings.steps else ())]
    wanted = [(case, seed) for case in cases for seed in seeds]
    found = list(kept)
    stored: _StoredModel | None = None
    for index, (case, seed) in enumerate(wanted):
        if (case.name, seed) in done:
            continue
        what = case.name if seed is None else f"{case.name}, seed {seed}"
        on_progress(what, index, len(wanted))
        if stored is None or stored.case is not case:
            stored = None  # two models never exist at once
            stored = _StoredModel(case, settings, text)
        row = stored.measure(seed)
        found.append(row)
        on_row(row)
    on_progress("done", len(wanted), len(wanted))
    return found


class _Text:
    """Tokenized rows: the same on every machine with the same Python version."""

    def __init__(self, settings: QualitySettings) -> None:
        from transformers import AutoTokenizer

        from ts_hf.cli.rows import prepare_rows, split_sources

        tokenizer = AutoTokenizer.from_pretrained(settings.model)
        documents = split_sources(["stdlib"], None, 0.1)
        length = settings.seq_length
        train = prepare_rows(
            documents[0],
            tokenizer,
            seq_length=length,
            wanted=max(settings.steps * settings.batch, 16),
            share=4 * length,
        )
        held = prepare_rows(
            documents[1],
            tokenizer,
            seq_length=length,
            wanted=settings.eval_rows,
            share=length,
            what="held out",
        )
        self.train = torch.stack([item["input_ids"] for item in train.items])
        self.held = torch.stack([item["input_ids"] for item in held.items])
        plain = {
            name: getattr(settings, name)
            for name in (
                "device",
                "dtype",
                "seq_length",
                "eval_rows",
                "steps",
                "batch",
                "rank",
                "lr",
            )
        }
        self.settings = {
            **plain,
            "model": Path(settings.model).name,
            "held_out_tokens": self.held.numel() - self.held.shape[0],
            "text": train.fingerprint() + held.fingerprint(),
        }


class _StoredModel:
    """The model with its weights stored as one case says; adapters come and go."""

    def __init__(self, case: Case, settings: QualitySettings, text: _Text) -> None:
        self.case = case
        self._settings = settings
        self._text = text
        self._started = time.perf_counter()
        self._model = _load(settings)
        self._facts = _store(self._model, case, settings, text)

    def measure(self, seed: int | None) -> Row:
        """Perplexity as loaded (None), or after a LoRA run."""
        from ts_core import init_lora_from_error

        settings, model, adapted = self._settings, self._model, None
        if seed is not None or self.case.starts_adapters:
            model = adapted = _add_adapters(model, settings, seed or 0)
            init_lora_from_error(model)
        with _products(self.case, settings):
            if seed is not None:
                _train(model, settings, self._text, seed)
            perplexity = _perplexity(model, self._text.held, settings)
        if adapted is not None:
            self._model = adapted.unload()
        now = time.perf_counter()
        seconds, self._started = now - self._started, now
        return Row(
            case=self.case.name,
            seed=seed,
            perplexity=perplexity,
            seconds=round(seconds, 2),
            settings=self._text.settings,
            **self._facts,
        )


def _load(settings: QualitySettings) -> Any:
    from ts_hf import load_model

    model = load_model(settings.model, quantize=None, dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model.to(settings.device, DTYPES[settings.dtype])


def _products(case: Case, settings: QualitySettings) -> AbstractContextManager[None]:
    """Where tensor cores are missing, what stands for them."""
    if case.codec is None or not case.products or settings.device != "cpu":
        return nullcontext()
    from ts_core.registry import codecs

    emulated: AbstractContextManager[None] = codecs.get(case.codec).emulate_tensor_cores()
    return emulated


def _store(model: Any, case: Case, settings: QualitySettings, text: _Text) -> dict[str, Any]:
    from ts_core import quantize_model
    from ts_core.registry import codecs
    from ts_hf import find_decoder_layers

    blocks = find_decoder_layers(model)
    if case.codec is None:
        return {"bytes_per_weight": 2.0, "weight_error": 0.0, "kept_precise": 0}
    calibration = None
    if case.uses_data:
        calibration = [{"input_ids": rows.to(settings.device)} for rows in text.train[:16].split(4)]
    weights = sum(
        module.weight.numel()
        for block in blocks
        for module in block.modules()
        if isinstance(module, torch.nn.Linear)
    )
    options: dict[str, Any] = dict(case.options)
    found = quantize_model(model, case.codec, blocks=blocks, calibration=calibration, **options)
    if case.products:
        codecs.get(case.codec).configure_matmul(model, tensor_cores=True)
    report = found["report"]
    return {
        "bytes_per_weight": round(found["bytes_after"] / weights, 4),
        "weight_error": None if report is None else report.error,
        "kept_precise": found["kept_precise"],
    }


def _add_adapters(model: Any, settings: QualitySettings, seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=2 * settings.rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def _train(model: Any, settings: QualitySettings, text: _Text, seed: int) -> None:
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=settings.lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(text.train), generator=generator)
    warm_up = max(settings.steps // 10, 1)
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, (step + 1) / warm_up)
        rows = text.train[order[step * settings.batch : (step + 1) * settings.batch]]
        loss, count = _loss(model, rows.to(settings.device))
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _perplexity(model: Any, rows: Tensor, settings: QualitySettings) -> float:
    model.eval()
    total = count = 0.0
    with torch.no_grad():
        for part in rows.split(max(settings.batch, _EVAL_BATCH)):
            loss, tokens = _loss(model, part.to(settings.device))
            total, count = total + float(loss), count + tokens
    return math.exp(total / count)


def _loss(model: Any, ids: Tensor) -> tuple[Tensor, int]:
    """Summed cross-entropy of the next tokens in fp32, and their number."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    labels = ids[:, 1:]
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )
    return loss, labels.numel()
