"""The global gradient norm of a step, from parts measured on the device and on the host."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from ts_core.device.base import Event
from ts_core.memory.arena import PinnedArena
from ts_core.optim.buckets import Bucket, Measured
from ts_core.optim.layout import is_sharded
from ts_core.transfer import CopyEngine


@dataclass(frozen=True)
class Verdict:
    """What the norm says of a step: the norm, the factor on its gradients, whether to skip it."""

    norm: float
    scale: float = 1.0
    skip: bool = False


class NormParts:
    """Device memory for the norms of parameters (fp64), and its way to the host.

    Two sets in turn, so that a step's parts are not overwritten while the host reads them.

    Args:
        sizes: parameters per bucket. (One norm each, so that the sum does not depend on how
            parameters are grouped.)
        copies: engine of the link.
        arena: where host buffers come from.
    """

    def __init__(self, sizes: Sequence[int], copies: CopyEngine, arena: PinnedArena) -> None:
        count = sum(sizes)
        self.sizes = list(sizes)
        self._ends = list(itertools.accumulate(sizes))
        self._copies = copies
        self._device_sets: list[torch.Tensor] = []
        self._host_sets: list[torch.Tensor] = []
        if copies.device.separate_memory:
            where = copies.device.torch_device
            self._device_sets = [
                torch.zeros(count, dtype=torch.float64, device=where) for _ in range(2)
            ]
            self._host_sets = [
                arena.empty((count,), torch.float64, tag="gradients") for _ in range(2)
            ]

    def take_over(self, before: NormParts) -> None:
        """Buckets have come after those of `before`, perhaps in the middle of a step."""
        if before.sizes != self.sizes[: len(before.sizes)]:
            return  # between steps
        for here, there in zip(self._device_sets, before._device_sets, strict=False):
            here[: there.numel()].copy_(there)

    def part(self, step: int, index: int) -> torch.Tensor | None:
        """Where bucket `index` puts its norms in this step (1-D); None on the host device."""
        return self.of(self._device_sets[step % 2], index) if self._device_sets else None

    def of(self, parts: torch.Tensor, index: int) -> torch.Tensor:
        """The norms of bucket `index` among all, in the order of its parameters."""
        end = self._ends[index]
        return parts[end - self.sizes[index] : end]

    def fetch(self, step: int) -> tuple[Event, torch.Tensor] | None:
        """Queue the copy of this step's parts to the host."""
        if not self._device_sets:
            return None
        here, there = self._host_sets[step % 2], self._device_sets[step % 2]
        return self._copies.d2h(here, there, after=self._copies.record_compute()), here

    def arrived(self, event: Event, parts: torch.Tensor) -> torch.Tensor:
        """What `fetch` returned, once it is on the host; waiting holds no core (worker thread)."""
        self._copies.device.host_wait(event)
        return parts


def judge(
    norm: float,
    bad: str,
    max_grad_norm: float | None,
    skip_nonfinite: bool,
    step: int,
    say: Callable[[str], None],
) -> Verdict:
    """The verdict on a step with this norm; says so when a gradient is not finite."""
    if not math.isfinite(norm):
        what = "is skipped, as asked" if skip_nonfinite else "is applied, as torch would"
        say(f"step {step}: {bad or 'gradients'} NaN or infinite; the update {what}")
        if skip_nonfinite:
            return Verdict(norm, skip=True)
    if max_grad_norm is None:
        return Verdict(norm)
    scale = max_grad_norm / (norm + 1e-6)
    return Verdict(norm, scale if math.isnan(scale) else min(1.0, scale))


def total_squares(
    device_parts: Sequence[float], host_parts: Sequence[Future[Measured]]
) -> tuple[float, int]:
    """Sum of squares and count of non-finite values (of the host's parts)."""
    measured = [part.result() for part in host_parts]
    squares = [norm * norm for norm in device_parts]
    squares += [square for m in measured for square in m.squares]
    try:
        total = math.fsum(squares)
    except (OverflowError, ValueError):  # infinities of both signs, or a sum beyond fp64
        total = math.nan if any(math.isnan(s) for s in squares) else math.inf
    return total, sum(m.nonfinite for m in measured)


def sharded_squares(buckets: Sequence[Bucket], squares: Sequence[float]) -> float:
    """Sum over all processes of the squares of DTensor buckets' local gradients.

    Every process of the meshes must call it at the same point. A part that several processes hold
    (replicated over a mesh dimension) counts once.
    """
    total = 0.0
    by_mesh: dict[tuple[Any, Any], list[float]] = {}
    for bucket, value in zip(buckets, squares, strict=True):
        param: Any = bucket.params[0]
        by_mesh.setdefault((param.device_mesh, param.placements), []).append(value)
    for (mesh, placements), values in by_mesh.items():
        part = torch.tensor(math.fsum(values), dtype=torch.float64, device=mesh.device_type)
        for dimension, placement in enumerate(placements):
            if placement.is_shard():
                torch.distributed.all_reduce(part, group=mesh.get_group(dimension))
        total += float(part)
    return total


def any_sharded(buckets: Sequence[Bucket]) -> bool:
    """Whether a bucket holds a DTensor."""
    return any(is_sharded(bucket.params[0]) for bucket in buckets)
