"""The global gradient norm of a step, from parts measured on the device and on the host."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from ts_core.device.base import Device, Event
from ts_core.memory.arena import PinnedArena
from ts_core.optim.buckets import Bucket, Measured
from ts_core.optim.device_norms import in_one, norms_of
from ts_core.optim.layout import is_sharded
from ts_core.transfer import CopyEngine


@dataclass(frozen=True)
class Verdict:
    """What the norm says of a step: the norm, the factor on its gradients, whether to skip it."""

    norm: float
    scale: float = 1.0
    skip: bool = False


@dataclass(frozen=True)
class Fetched:
    """Norms on their way to the host.

    Attributes:
        event: after which they are there.
        buffer_h: holds them, one after the other.
        parts: by bucket, where they come from; kept until they have been read.
        device: that has measured them.
        free: takes the buffer when they have been read.
    """

    event: Event
    buffer_h: torch.Tensor
    parts: Mapping[int, torch.Tensor]
    device: Device
    free: deque[torch.Tensor]

    def by_bucket(self) -> dict[int, list[float]]:
        """Norms by index of their bucket; waiting holds no core (worker thread)."""
        self.device.host_wait(self.event)
        sizes = [part.numel() for part in self.parts.values()]
        each = self.buffer_h[: sum(sizes)].split(sizes)
        found = {index: norms.tolist() for index, norms in zip(self.parts, each, strict=True)}
        self.free.append(self.buffer_h)
        return found


class NormParts:
    """Norms of parameters (fp64) that the device has measured, and their way to the host.

    They stay as the device returned them, and are put together once all have come: one launch and
    one copy, however many buckets there are. Each copy has a buffer of its own until its norms have
    been read: steps that share no parameter may be queued one after the other meanwhile.

    Args:
        sizes: parameters per bucket. (One norm each, so that the sum does not depend on how
            parameters are grouped.)
        copies: engine of the link.
        arena: where host buffers come from.
    """

    def __init__(self, sizes: Sequence[int], copies: CopyEngine, arena: PinnedArena) -> None:
        self.sizes = list(sizes)
        self._copies = copies
        self._parts: dict[int, torch.Tensor] = {}
        self._arena = arena
        self._free: deque[torch.Tensor] = deque()
        if copies.device.separate_memory:
            self._free.extend(self._buffer() for _ in range(2))

    def _buffer(self) -> torch.Tensor:
        return self._arena.empty((sum(self.sizes),), torch.float64, tag="gradients")

    def take_over(self, before: NormParts) -> None:
        """Buckets have come after those of `before`, perhaps in the middle of a step."""
        if before.sizes == self.sizes[: len(before.sizes)]:  # else between steps
            self._parts = before._parts

    def add(self, index: int, norms: torch.Tensor) -> None:
        """Bucket `index` has been measured (1-D, one per parameter)."""
        self._parts[index] = norms

    def __contains__(self, index: int) -> bool:
        return index in self._parts

    @torch.no_grad()
    def measure(self, gradients: Mapping[int, Sequence[torch.Tensor]]) -> None:
        """Measure the gradients of several buckets together."""
        norms = in_one(norms_of([one for each in gradients.values() for one in each]))
        parts = norms.split([len(each) for each in gradients.values()])
        self._parts.update(zip(gradients, parts, strict=True))

    def drop(self) -> None:
        """The step's gradients are dropped."""
        self._parts = {}

    @torch.no_grad()
    def fetch(self) -> Fetched | None:
        """Queue the copy of this step's norms to the host; they are gone from here then."""
        if not self._parts:
            return None
        parts = dict(sorted(self._parts.items()))
        self._parts = {}
        norms = torch.cat(list(parts.values()))
        buffer_h = self._free.popleft() if self._free else self._buffer()
        behind = self._copies.record_compute()
        event = self._copies.d2h(buffer_h[: norms.numel()], norms, after=behind)
        return Fetched(event, buffer_h, parts, self._copies.device, self._free)


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
