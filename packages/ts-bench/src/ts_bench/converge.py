"""`ts-bench converge`: whether fused kernels and replayed blocks train as well as plain torch code.

SmolLM2-135M with an NF4 base is fine-tuned with LoRA on Python's standard library, once with
kernels, fused LoRA and block replay, once with none of them, for a few seeds each. A seed draws the
adapters and the order of the rows, so both ways start alike and see the same rows; they differ by
rounding. The loss of held-out text is measured every so many steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor

from ts_bench.quality import QualitySettings, _Text
from ts_bench.workload import PROJECTIONS

OFF, ON = "off", "on"
OPTIONS = ("kernels", "fused_lora", "cuda_graphs")
WAYS: dict[str, dict[str, Any]] = {
    OFF: dict.fromkeys(OPTIONS, False),
    ON: dict.fromkeys(OPTIONS, True),
}


@dataclass(frozen=True)
class Settings:
    """How to train.

    Attributes:
        model: folder of the model.
        device: "cuda" or "cpu".
        steps, batch, seq_length: LoRA steps, rows per step, tokens per row.
        eval_rows, every: held-out rows, and steps between two looks at them.
        seeds: one run each, of each way.
        base: the format of the frozen weights.
        rank: of the adapters (alpha is twice that).
        lr: constant after a warm-up over the first tenth.
    """

    model: str
    device: str
    steps: int = 300
    batch: int = 4
    seq_length: int = 256
    eval_rows: int = 32
    every: int = 50
    seeds: tuple[int, ...] = (0, 1, 2)
    base: str = "nf4"
    rank: int = 16
    lr: float = 3e-4


@dataclass(frozen=True)
class Point:
    """One look at held-out text.

    Attributes:
        way: a key of `WAYS`.
        seed: of the run.
        step: after how many steps.
        loss: mean cross-entropy of the held-out text's next tokens.
        train_loss: mean of the steps' losses since the point before; 0 for the first.
        seconds: since the run began to train.
        replay: recordings, and blocks replayed so far; empty where none are.
    """

    way: str
    seed: int
    step: int
    loss: float
    train_loss: float
    seconds: float
    replay: dict[str, int]


def run_one(
    settings: Settings, way: str, seed: int, on_point: Callable[[Point], None]
) -> list[Point]:
    """Train once; returns the points, each of which `on_point` gets as soon as it is there.

    Raises:
        DataError: the model or the text cannot be used.
        NotAvailableError, UnknownPluginError: ts-quant or ts-kernels is missing.
    """
    from ts_core import memory_report
    from ts_hf import load_model, wrap_hf

    text = _text(settings)
    base = load_model(settings.model, quantize=settings.base, dtype=torch.bfloat16)
    base.requires_grad_(False)
    adapted = _add_adapters(base, settings, seed).train()
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    model, optimizer = wrap_hf(
        adapted,
        torch.optim.AdamW(trained, lr=settings.lr, weight_decay=0.0),
        device=settings.device,
        max_grad_norm=1.0,
        **WAYS[way],
    )
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(text.train), generator=generator)
    points: list[Point] = []
    losses: list[Tensor] = []
    warm_up = max(settings.steps // 10, 1)
    begun = time.perf_counter()

    def look(step: int) -> None:
        loss = _held_out(model, text.held, settings)
        seconds = round(time.perf_counter() - begun, 2)
        told = memory_report(model).get("replay") or {}
        names = ("recorded", "replayed_forwards", "replayed_backwards")
        replay = {name: int(told[name]) for name in names if name in told}
        mean = fmean(float(loss) for loss in losses) if losses else 0.0
        points.append(Point(way, seed, step, loss, mean, seconds, replay))
        losses.clear()
        on_point(points[-1])

    look(0)
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, (step + 1) / warm_up)
        places = torch.arange(step * settings.batch, (step + 1) * settings.batch)
        rows = text.train[order[places % len(order)]].to(settings.device)
        with torch.autocast(settings.device, torch.bfloat16):
            loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if (step + 1) % settings.every == 0 or step + 1 == settings.steps:
            look(step + 1)
    return points


def _text(settings: Settings) -> _Text:
    return _Text(
        QualitySettings(
            model=settings.model,
            device=settings.device,
            seq_length=settings.seq_length,
            eval_rows=settings.eval_rows,
            steps=settings.steps,
            batch=settings.batch,
        )
    )


def _add_adapters(model: Any, settings: Settings, seed: int) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=2 * settings.rank,
        target_modules=PROJECTIONS,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def _held_out(model: Any, rows: Tensor, settings: Settings) -> float:
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad(), torch.autocast(settings.device, torch.bfloat16):
        for part in rows.split(settings.batch):
            ids = part.to(settings.device)
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            total += float(
                torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
                )
            )
            count += ids[:, 1:].numel()
    model.train()
    return total / count


def text_of(points: Sequence[Point], settings: Settings) -> str:
    """The losses at the last step that every run reached, and how the two ways differ."""
    runs = {(way, seed): _last(points, way, seed) for way in WAYS for seed in settings.seeds}
    ended = {run: point for run, point in runs.items() if point is not None}
    if not ended:
        return "no run got as far as its first look at held-out text"
    step = min(point.step for point in ended.values())
    at = {(p.way, p.seed): p for p in points if p.step == step}
    lines = [
        f"LoRA r={settings.rank} on {settings.base}, {settings.batch} x {settings.seq_length} "
        f"tokens; loss of {settings.eval_rows} held-out rows after {step} of {settings.steps} "
        f"steps",
        f"{'':10}" + "".join(f"{f'seed {seed}':>10}" for seed in settings.seeds)
        + f"{'mean':>10}{'sd':>9}{'s/step':>9}",
    ]  # fmt: skip
    for way in WAYS:
        mine = [at.get((way, seed)) for seed in settings.seeds]
        losses = [point.loss for point in mine if point is not None]
        cells = "".join(f"{'-' if p is None else f'{p.loss:.5f}':>10}" for p in mine)
        first = _last([p for p in points if p.step == 0], way, settings.seeds[0])
        paces = [p.seconds / step for p in mine if p is not None and step]
        lines.append(
            f"{way:10}{cells}{_or_dash(losses, fmean, 1):>10}{_or_dash(losses, stdev, 2):>9}"
            f"{f'{fmean(paces):.3f}' if paces else '-':>9}"
            + ("" if first is None else f"   (before: {first.loss:.5f})")
        )
    pairs = [(at.get((ON, seed)), at.get((OFF, seed))) for seed in settings.seeds]
    both = [(on, off) for on, off in pairs if on is not None and off is not None]
    found = [on.loss - off.loss for on, off in both]
    cells = "".join(
        f"{'-' if on is None or off is None else f'{on.loss - off.loss:+.5f}':>10}"
        for on, off in pairs
    )
    mean = f"{fmean(found):+.5f}" if found else "-"
    lines.append(f"{'on - off':10}{cells}{mean:>10}{_or_dash(found, stdev, 2):>9}")
    replayed = [point.replay for (way, _), point in ended.items() if way == ON and point.replay]
    lines.append(f"replay, by run: {replayed or 'none'}")
    return "\n".join(lines)


def _last(points: Sequence[Point], way: str, seed: int) -> Point | None:
    mine = [point for point in points if (point.way, point.seed) == (way, seed)]
    return max(mine, key=lambda point: point.step, default=None)


def _or_dash(
    values: Sequence[float], function: Callable[[Sequence[float]], float], least: int
) -> str:
    return f"{function(values):.5f}" if len(values) >= least else "-"
