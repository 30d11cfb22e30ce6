"""Lists of runs that belong together, most telling first, each meant for one stretch of GPU time.

A suite has entries: an engine, and the scenarios (of one model and cap) that it runs in one
process. Entries are run in order until the time limit, those of the first round, then those of the
second, and so on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ts_bench.rounds import Entry
from ts_bench.scenarios import get_scenario, toy_of
from ts_core.errors import OptionError

PLAIN, CHECKPOINTING = "plain", "checkpointing"
# At its defaults: on a quantized base fused kernels and block replay are on.
OURS = "trainstream"
EAGER = "trainstream[cuda_graphs=False]"
FP8_BACKWARD = "trainstream[fp8_backward=True]"
UNFUSED = "trainstream[kernels=False,fused_lora=False,cuda_graphs=False]"
FUSED = "trainstream[kernels=True,fused_lora=True]"
LIGER = "bitsandbytes-liger"


@dataclass(frozen=True)
class Planned:
    """An entry of a suite.

    Attributes:
        engine: with its options.
        scenarios: names, the first of which the engine is prepared for.
        variant: only this one; None tries them in order.
        rounds: in how many of the suite's rounds it runs.
        first: the first of these, from 0: what is told last waits until the rest has run.
    """

    engine: str
    scenarios: tuple[str, ...]
    variant: str | None = None
    rounds: int = 1
    first: int = 0


@dataclass(frozen=True)
class Suite:
    """See the module.

    Attributes:
        note: one line for people.
        entries: in order of importance.
        link: whether each process measures its link, too.
        warmup, steps: of each scenario.
        settling: the most steps of a warm-up, for engines that tell when they have settled.
    """

    note: str
    entries: tuple[Planned, ...]
    link: bool = False
    warmup: int = 4
    steps: int = 30
    settling: int = 36


def _lora(limit: str, *sizes: str) -> tuple[str, ...]:
    return tuple(f"lora-14b-nf4-{size}-{limit}" for size in sizes)


_ALL_24 = _lora("24g", "1x512", "1x2048")
_ALL_12 = _lora("12g", "1x512", "1x2048")
_PACKED_24, _PACKED_12 = _lora("24g", "packed-2x2048"), _lora("12g", "packed-2x2048")
_FULL, _CLIP = "full-1.5b-4x512-24g", "full-1.5b-4x512-24g-clip"

SUITES: dict[str, Suite] = {
    "lora": Suite(
        "LoRA on a 14B shape in NF4: small and middle batches, 24 and 12 GB, and every rival",
        (
            Planned(OURS, _ALL_24, rounds=3),
            Planned("unsloth", _ALL_24, rounds=2),
            Planned(OURS, _ALL_12, rounds=3),
            Planned(OURS, ("lora-14b-fp8-1x2048-24g",)),
            Planned(OURS, ("lora-14b-fp8_row-1x2048-24g",)),
            Planned(FP8_BACKWARD, ("lora-14b-fp8_row-1x2048-24g",)),
            Planned(OURS, _PACKED_24),
            Planned("bitsandbytes", _ALL_24[:1], PLAIN),
            Planned(LIGER, _ALL_24, CHECKPOINTING),
            Planned("trainstream-0.4.1", _ALL_24),
            Planned("bitsandbytes", _ALL_24, CHECKPOINTING),
            Planned(LIGER, _ALL_12, CHECKPOINTING),
            Planned("unsloth", _ALL_12),
            Planned("bitsandbytes", _ALL_12, CHECKPOINTING),
            Planned(UNFUSED, _ALL_24, first=3),
            Planned("trainstream-0.4.1", _ALL_12[:1], first=3),
            Planned(EAGER, _ALL_24, first=3),
            Planned(LIGER, _PACKED_24, CHECKPOINTING, first=3),
            Planned(EAGER, _ALL_12, first=3),
            Planned(OURS, _PACKED_12, first=3),
        ),
    ),
    "optim": Suite(
        "full fine-tunes of 1.5B and 3B shapes: OffloadAdamW's modes, DeepSpeed, stock torch",
        (
            Planned("trainstream-auto", (_FULL,), rounds=2),
            Planned("deepspeed-zero2", (_FULL,), rounds=2),
            Planned("trainstream-auto", (_CLIP,)),
            Planned("deepspeed-zero2", (_CLIP,)),
            Planned("torch", ("full-1.5b-4x512-nocap",), PLAIN),
            Planned("trainstream", (_FULL,)),
            Planned("trainstream-gpu", (_FULL,)),
            Planned("trainstream-auto", ("full-1.5b-4x512-8g",)),
            Planned("trainstream-auto", ("full-3b-8x1024-24g",)),
            Planned("trainstream", (_CLIP,)),
            Planned("trainstream-auto[cuda_graphs=False]", ("full-3b-8x1024-24g",)),
            Planned("deepspeed-zero3", ("full-3b-8x1024-24g",)),
            Planned("trainstream-hybrid", (_FULL,)),
            Planned("trainstream-gpu", (_CLIP,)),
            Planned("trainstream-gpu", ("full-1.5b-4x512-8g",)),
            Planned("trainstream-auto", ("full-1.5b-4x512-8g-clip",)),
            Planned("trainstream-gpu", ("full-3b-8x1024-24g",)),
            Planned("torch", ("full-3b-8x1024-nocap",), CHECKPOINTING),
            Planned("torch", (_FULL,)),
        ),
    ),
    "stream": Suite(
        "LoRA on an exact bf16 base of 29.5 GB: share of the link, predicted and measured peaks",
        (
            Planned("trainstream", ("lora-14b-bf16-1x512-24g",), rounds=2),
            Planned("trainstream", ("lora-14b-bf16-1x512-9g",)),
            Planned("trainstream", ("lora-14b-bf16-1x512-12g",)),
            Planned("trainstream-0.4.1", ("lora-14b-bf16-1x512-24g",)),
            Planned(FUSED, ("lora-14b-bf16-1x512-24g",)),
            Planned("trainstream", ("lora-14b-bf16-1x512-16g",)),
        ),
        link=True,
    ),
}


def get_suite(name: str) -> Suite:
    """The suite called `name`.

    Raises:
        OptionError: there is none; the message lists all names.
    """
    if name not in SUITES:
        raise OptionError(f"suite: {name!r} is not accepted; use one of {', '.join(SUITES)}.")
    return SUITES[name]


def rounds_of(
    suite: Suite, *, toy: bool = False, rounds: int | None = None, only: Sequence[str] = ()
) -> list[list[Entry]]:
    """The entries of each round.

    Args:
        suite: from `SUITES`.
        toy: with toys in place of the models, once each: for trying the suite out on a CPU.
        rounds: at most so many rounds, of those that have such entries.
        only: keep the entries whose engine or a scenario of whose contains one of these texts.
    """
    found: list[list[Entry]] = []
    for repeat in range(max(entry.first + entry.rounds for entry in suite.entries)):
        entries = []
        for planned in suite.entries:
            told = (planned.engine, *planned.scenarios)
            now = planned.first <= repeat < planned.first + planned.rounds
            if not now or not _chosen(told, only):
                continue
            scenarios = [get_scenario(name) for name in planned.scenarios]
            if toy:
                scenarios = [toy_of(scenario) for scenario in scenarios]
            entries.append(Entry(planned.engine, tuple(scenarios), planned.variant))
        found.append(entries)
    found = [entries for entries in found if entries]
    if toy and found:
        found = [list(dict.fromkeys(entry for entries in found for entry in entries))]
    return found[:rounds]


def _chosen(told: Sequence[str], only: Sequence[str]) -> bool:
    return not only or any(text in name for text in only for name in told)


def with_steps(suite: Suite, *, toy: bool) -> Suite:
    """With as few steps as a try-out needs."""
    return dataclasses.replace(suite, warmup=1, steps=2, settling=3) if toy else suite
