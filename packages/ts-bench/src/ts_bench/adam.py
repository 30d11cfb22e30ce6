"""`ts-bench adam`: host AdamW at every SIMD level and moment type, beside what else there is.

All contestants update the same number of parameters, turn by turn in random order, in one process:
a noisy neighbour then slows all of them, and ratios are taken within a round.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

import torch

from ts_bench import adam_updates, environment
from ts_core import _native
from ts_core.errors import OptionError

PAUSE_S = 0.05
WARMUP_ROUNDS = 2


@dataclass
class Timing:
    """What one contestant took; the attributes of `adam_updates.Update`, and seconds by round."""

    name: str
    parameters: str
    moments: str
    level: str
    bytes_each: float
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


@dataclass
class AdamRun:
    """One run of the comparison, as it is written to JSON."""

    date: str
    command: str
    machine: dict[str, Any]
    versions: dict[str, str | None]
    count: int
    threads: int
    rounds: int
    timings: list[Timing]
    missing: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """Plain data, with the medians beside the seconds."""
        data = asdict(self)
        for told, timing in zip(data["timings"], self.timings, strict=True):
            told["params_per_s"] = self.params_per_s(timing)
            told["bytes_per_s"] = self.bytes_per_s(timing)
            told["of_stream"] = self.of_stream(timing)
            told["of_torch"] = self.of_torch(timing)
        return {"kind": "adam", **data}

    def params_per_s(self, timing: Timing) -> float:
        """Parameters updated (or streamed) per second, median over rounds."""
        return self.count / median(timing.wall_s)

    def bytes_per_s(self, timing: Timing) -> float:
        """Bytes read and written per second, median over rounds."""
        return self.count * timing.bytes_each / median(timing.wall_s)

    def of_stream(self, timing: Timing) -> float | None:
        """Its rate over that of the stream of the same bytes, median over rounds."""
        return self._ratio(timing, adam_updates.STREAM)

    def of_torch(self, timing: Timing) -> float | None:
        """Its parameters per second over torch's (fp32 only), median over rounds."""
        return self._ratio(timing, adam_updates.TORCH)

    def _ratio(self, timing: Timing, name: str) -> float | None:
        layout = (timing.parameters, timing.moments)
        for base in self.timings:
            if base.name == name and (base.parameters, base.moments) == layout:
                pairs = zip(base.wall_s, timing.wall_s, strict=True)
                return median(a / b for a, b in pairs)
        return None


def measure(
    *,
    count: int,
    rounds: int,
    threads: int,
    levels: Sequence[str] | None = None,
    moments: Sequence[str] | None = None,
    command: str = "",
    on_round: Callable[[int], None] = lambda done: None,
) -> AdamRun:
    """Runs the comparison.

    Args:
        count: parameters each contestant updates. Make it several times the last-level cache.
        rounds: timed turns of each contestant, after two more that warm up.
        threads: of every contestant but DeepSpeed's (OMP_NUM_THREADS); 0 for all usable cores.
        levels: SIMD levels; None for all that this machine can run.
        moments: of the native updates: "float32", "bfloat16", "int8"; None for all.
        command: recorded in the result.
        on_round: called after each round with the number of those done.

    Raises:
        OptionError: a number, level or moment type not accepted.
    """
    for name, value, least in (("count", count, 1), ("rounds", rounds, 1), ("threads", threads, 0)):
        if value < least:
            raise OptionError(f"{name}: {value} is not accepted; use {least} or more.")
    chosen_levels = _chosen("levels", levels, _native.available_simd_levels())
    chosen_moments = _chosen("moments", moments, list(adam_updates.MOMENTS))
    cores = _native.usable_cores()
    threads = min(threads, cores) or cores
    before_level, before_threads = _native.simd_level(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        updates = list(adam_updates.native_updates(count, chosen_levels, chosen_moments, threads))
        updates.append(adam_updates.torch_fused(count))
        missing = {}
        rival = adam_updates.deepspeed(count)
        if isinstance(rival, str):
            missing[adam_updates.DEEPSPEED] = rival
        else:
            updates.append(rival)
        timings = _take_turns(updates, rounds, on_round)
    finally:
        _native.set_simd_level(before_level)
        torch.set_num_threads(before_threads)
    return AdamRun(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=command,
        machine=environment.machine(),
        versions={**environment.versions(), "deepspeed": _deepspeed_version()},
        count=count,
        threads=threads,
        rounds=rounds,
        timings=timings,
        missing=missing,
    )


def _chosen(option: str, names: Sequence[str] | None, accepted: Sequence[str]) -> list[str]:
    """`names` in the order of `accepted`, which is best first."""
    for name in names or []:
        if name not in accepted:
            raise OptionError(
                f"{option}: {name!r} is not accepted here; use {', '.join(accepted)}."
            )
    return [name for name in accepted if not names or name in names]


def _take_turns(
    updates: Sequence[adam_updates.Update], rounds: int, on_round: Callable[[int], None]
) -> list[Timing]:
    timings = [
        Timing(update.name, update.parameters, update.moments, update.level, update.bytes_each)
        for update in updates
    ]
    pairs = list(zip(updates, timings, strict=True))
    for turn in range(-WARMUP_ROUNDS, rounds):
        for update, timing in random.sample(pairs, len(pairs)):
            # OpenMP's threads spin for a while after their work and would take cores from whoever
            # is measured next.
            time.sleep(PAUSE_S)
            wall, cpu = time.perf_counter(), time.process_time()
            update.run()
            if turn >= 0:
                timing.wall_s.append(time.perf_counter() - wall)
                timing.cpu_s.append(time.process_time() - cpu)
        if turn >= 0:
            on_round(turn + 1)
    return timings


def _deepspeed_version() -> str | None:
    try:
        return version("deepspeed")
    except PackageNotFoundError:
        return None
