"""What else could be asked of `trainstream plan`, where a training does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ts_core.engine.codec_choice import by_precision
from ts_core.optim.moments import MOMENT_KINDS
from ts_core.planning.estimate import Training
from ts_core.schedule import MachineProfile
from ts_core.schedule.remedies import LOW_HEADROOM, Change

_RANK = 16
_SHORT = 512


@dataclass(frozen=True)
class Asked:
    """What a plan is made for, but for the model: arguments of `plan_training`."""

    training: Training
    machine: MachineProfile
    quantize: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)


def changes_of(asked: Asked) -> list[Change[Asked]]:
    """What could be asked for otherwise; in parentheses, the command's own arguments for it.

    Those that change nothing of `asked`, or ask for more than it does, are left out.
    """
    return [*_of_options(asked), *_of_training(asked), *_of_storage(asked)]


def _of_options(asked: Asked) -> list[Change[Asked]]:
    found = []
    table: list[tuple[str, str, Any]] = [
        ("stream blocks as needed (--param-offload auto)", "param_offload", "auto"),
        ("recompute all blocks (--recompute true)", "recompute", True),
        ("keep activations as planned (--activation-offload auto)", "activation_offload", "auto"),
    ]
    for words, name, value in table:
        if asked.options.get(name, "auto") != value:
            found.append(Change(words, name, _option(name, value)))
    if asked.options.get("vram_headroom", 0.10) > LOW_HEADROOM:
        words = f"leave less free (--headroom {LOW_HEADROOM})"
        found.append(Change(words, "headroom", _option("vram_headroom", LOW_HEADROOM)))
    if asked.options.get("disk_offload") is None:
        words = "put weights on disk (--disk-offload DIRECTORY)"
        found.append(Change(words, "disk", _option("disk_offload", "DIRECTORY")))
    return found


def _of_training(asked: Asked) -> list[Change[Asked]]:
    training, found = asked.training, []
    if training.batch > 1:
        found.append(Change("a batch of 1 (--batch 1)", "batch", _training(batch=1)))
    if training.length > _SHORT:
        words = f"shorter sequences (--seq {_SHORT})"
        found.append(Change(words, "length", _training(length=_SHORT)))
    if training.rank is None:
        also = " --dtype bfloat16" if training.dtype_asked else ""
        words = f"train adapters (--lora {_RANK}{also})"
        found.append(Change(words, "rank", _training(rank=_RANK, dtype=torch.bfloat16)))
    return found


def _of_storage(asked: Asked) -> list[Change[Asked]]:
    found = []
    smaller = MOMENT_KINDS[MOMENT_KINDS.index(asked.training.moments) + 1 :]
    if asked.options.get("optimizer_mode") in ("gpu", "hybrid"):  # fp32 moments only
        smaller = ()
    for kind in smaller:
        words = f"keep moments in less memory (--moments {kind})"
        found.append(Change(words, "moments", _training(moments=kind)))
    if asked.quantize != "auto":  # which tries every codec
        for name in by_precision():
            words = f"store the frozen weights of the blocks in {name} (--quantize {name})"
            found.append(Change(words, "codec", _codec(name)))
    return found


def _option(name: str, value: Any) -> Callable[[Asked], Asked]:
    return lambda asked: replace(asked, options={**asked.options, name: value})


def _training(**changes: Any) -> Callable[[Asked], Asked]:
    return lambda asked: replace(asked, training=replace(asked.training, **changes))


def _codec(name: str) -> Callable[[Asked], Asked]:
    return lambda asked: replace(asked, quantize=name)
