"""`ts-bench fits`: what wrapping costs where everything fits on the device.

The same model is trained twice in one process: by torch alone with its fused AdamW, and wrapped
with `offload="auto"`. Steps are timed in turns, a few of one and a few of the other, so that
whatever slows the machine slows both; a ratio is taken within each round. The order of attention's
kernels, which wrapping sets for the process, counts for both.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from statistics import median
from typing import Any

import torch

from ts_bench import environment
from ts_bench.engines.ours import Settled
from ts_bench.measure import MODEL_SEED, Counts, warm_up
from ts_bench.scenarios import SCENARIOS, Scenario, toy_of
from ts_bench.workload import (
    LEARNING_RATE,
    TrainStep,
    adamw,
    add_adapters,
    build_model,
    trainable,
)

NAMES = ("full-0.5b-4x512-nocap", "lora-0.5b-bf16-4x512-nocap")
WARMUP, SETTLING = 6, 36


@dataclass(frozen=True)
class Fit:
    """One scenario.

    Attributes:
        scenario: its name.
        ours_ms, torch_ms: the median step of each round.
        losses_equal: of the first two steps, whether both had the same losses bit for bit.
        settled: whether ours had stopped adapting before it was timed.
        warmup_steps: how many steps that took.
        decision: what was decided about the optimizer's state.
    """

    scenario: str
    ours_ms: list[float]
    torch_ms: list[float]
    losses_equal: bool
    settled: bool | None
    warmup_steps: int
    decision: str

    @property
    def ratios(self) -> list[float]:
        """Our step time over torch's, by round."""
        return [own / other for own, other in zip(self.ours_ms, self.torch_ms, strict=True)]


def text_of(fit: Fit) -> str:
    """A line for people, and one with what was decided."""
    ratios = sorted(fit.ratios)
    quarter = len(ratios) // 4
    settled = "" if fit.settled else "not settled after "
    return (
        f"{fit.scenario}: trainstream {median(fit.ours_ms):.2f} ms, "
        f"torch {median(fit.torch_ms):.2f} ms, ratio {median(ratios):.3f} "
        f"(middle half {ratios[quarter]:.3f} to {ratios[-1 - quarter]:.3f}, "
        f"all {ratios[0]:.3f} to {ratios[-1]:.3f}, {len(ratios)} rounds)\n"
        f"    {settled}{fit.warmup_steps} steps of warm-up; losses of the first steps "
        f"{'equal' if fit.losses_equal else 'differ'}; {fit.decision}"
    )


def as_json(fits: list[Fit], command: str, device: torch.device) -> dict[str, Any]:
    """Plain data for a file."""
    return {
        "kind": "fits",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        "machine": environment.machine(),
        "versions": environment.versions(),
        "device": environment.device(device.type),
        "fits": [{**asdict(fit), "ratio": median(fit.ratios)} for fit in fits],
    }


def measure(
    device: torch.device,
    *,
    rounds: int,
    steps: int,
    tiny: bool = False,
    on_fit: Callable[[Fit], None] = lambda fit: None,
) -> list[Fit]:
    """Compare on both scenarios.

    Args:
        device: where; everything must fit there twice.
        rounds: turns of each, in alternating order.
        steps: timed steps of a turn.
        tiny: with toys in place of the models.
        on_fit: called with each result as soon as it is known.
    """
    found = []
    for name in NAMES:
        scenario = toy_of(SCENARIOS[name]) if tiny else SCENARIOS[name]
        found.append(_fit(scenario, device, rounds, steps))
        on_fit(found[-1])
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def _fit(scenario: Scenario, device: torch.device, rounds: int, steps: int) -> Fit:
    from ts_core import memory_report
    from ts_hf import wrap_hf

    lora = scenario.mode == "lora"
    torch.manual_seed(MODEL_SEED)
    dtype = torch.bfloat16 if lora else torch.float32
    model = build_model(scenario, torch.device("cpu"), dtype)
    if lora:
        model.requires_grad_(False)
        model = add_adapters(model, scenario)
    plain = copy.deepcopy(model).to(device)
    rival = TrainStep(plain, adamw(plain, device), scenario, device, {})
    wrapped, optimizer = wrap_hf(
        model,
        torch.optim.AdamW(trainable(model), lr=LEARNING_RATE),
        device=device,
        offload="auto",
    )
    ours = TrainStep(wrapped, optimizer, scenario, device, {}, settled=Settled(wrapped))

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    own, settled = warm_up(ours, Counts(WARMUP, 1, settling=SETTLING), synchronize)
    others, _ = warm_up(rival, Counts(WARMUP, 1), synchronize)
    turns: dict[str, tuple[TrainStep, list[float]]] = {"ours": (ours, []), "torch": (rival, [])}
    for number in range(rounds):
        for name in list(turns) if number % 2 else reversed(turns):
            step, medians = turns[name]
            step()  # not timed: it finds the caches of the other's steps
            medians.append(1000 * median(_timed(step, synchronize) for _ in range(steps)))
    events = [str(event) for event in memory_report(wrapped)["events"]]
    decisions = [event for event in events if event.startswith("offload=")]
    return Fit(
        scenario=scenario.name,
        ours_ms=turns["ours"][1],
        torch_ms=turns["torch"][1],
        losses_equal=[float(loss) for loss in own[:2]] == [float(loss) for loss in others[:2]],
        settled=settled,
        warmup_steps=len(own),
        decision=decisions[-1] if decisions else "offload='auto': nothing was decided",
    )


def _timed(step: TrainStep, synchronize: Callable[[], None]) -> float:
    synchronize()
    begun = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - begun
