"""Splitting optimizer state between device memory, the link and host threads.

Host AdamW is bound by host memory, while the link in both directions and the device's memory lie
idle. State that fits stays in device memory; the rest is split so that what streams through the
device and what host threads update finish together. The split follows from rates measured in the
run, and is corrected from how long each side really took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ts_core.device.base import Device
from ts_core.memory.arena import PinnedArena
from ts_core.optim.places import HostPlace
from ts_core.transfer import CopyEngine

if TYPE_CHECKING:
    from ts_core.optim.adamw import OffloadAdamW

STEPS_BEFORE = 2
CORRECTIONS = 3
# Host threads and the link share host memory: beside a busy link the host does about this share of
# its rate alone (H200, PCIe 5: 2.6 of 4.0 G values/s).
HOST_SHARE_BESIDE_LINK = 0.65
_PROBE_BYTES = 64 << 20
_BALANCED = 0.1


@dataclass(frozen=True)
class Rates:
    """What was measured.

    Attributes:
        host: values per second that host threads update.
        link: bytes per second in each direction of the link, both busy.
    """

    host: float
    link: float


@dataclass(frozen=True)
class Piece:
    """One bucket, for the split: values, bytes of the parameter, and whether it has a master."""

    values: int
    param_bytes: int
    has_master: bool

    @property
    def state_bytes(self) -> int:
        """fp32 state per bucket, in bytes."""
        return self.values * (12 if self.has_master else 8)


@dataclass(frozen=True)
class Split:
    """A place per bucket, and the seconds each side should need."""

    places: tuple[str, ...]
    host_s: float
    link_s: float


def split(
    pieces: Sequence[Piece],
    rates: Rates,
    room_bytes: int,
    *,
    keeps_gradients: bool,
    ring_bytes: int,
    host_factor: float = 1.0,
) -> Split:
    """Choose a place for each bucket (a pure function).

    Args:
        pieces: the buckets, in order of the groups.
        rates: measured.
        room_bytes: device memory that may be filled.
        keeps_gradients: gradients of buckets updated on the device wait there for step()
            (clipping, accumulation), which takes room too.
        ring_bytes: device memory that streaming takes: its buffers, and the gradients that wait
            for their state.
        host_factor: correction of the host's rate, from how long the last split really took.

    Returns:
        The split with the least time, where the host and the link finish together.
    """

    def waiting(index: int) -> int:
        return pieces[index].param_bytes if keeps_gradients else 0

    def needed(index: int) -> int:
        return pieces[index].state_bytes + waiting(index)

    # The largest first: the fewest launches per byte.
    order = sorted(range(len(pieces)), key=lambda index: -pieces[index].values)

    def fill(resident_room: int, stream_room: int | None) -> Split:
        places = ["host"] * len(pieces)
        for index in order:
            if needed(index) <= resident_room:
                places[index] = "resident"
                resident_room -= needed(index)
        best = Split(tuple(places), *_times(pieces, places, rates, host_factor))
        if stream_room is None:
            return best
        room = resident_room + stream_room
        for index in order:
            if places[index] == "host" and waiting(index) <= room:
                places[index] = "streamed"
                room -= waiting(index)
                found = Split(tuple(places), *_times(pieces, places, rates, host_factor))
                best = min(best, found, key=_slowest)
        return best

    if sum(needed(index) for index in order) <= room_bytes:
        return fill(room_bytes, None)
    candidates = [fill(room_bytes, None)]
    if room_bytes >= ring_bytes:
        spare = room_bytes - ring_bytes
        for tenth in range(11 if keeps_gradients else 1):
            streamed = spare * tenth // 10
            candidates.append(fill(spare - streamed, streamed))
    return min(candidates, key=_slowest)


def _slowest(found: Split) -> float:
    return max(found.host_s, found.link_s)


def _times(
    pieces: Sequence[Piece], places: Sequence[str], rates: Rates, host_factor: float
) -> tuple[float, float]:
    host_values = link_bytes = streamed = 0
    for piece, place in zip(pieces, places, strict=True):
        if place == "host":
            host_values += piece.values
            link_bytes += piece.param_bytes  # gradient one way, new values the other
        elif place == "streamed":
            link_bytes += piece.state_bytes
            streamed += piece.values
    rate = rates.host * host_factor * (HOST_SHARE_BESIDE_LINK if streamed else 1.0)
    return host_values / rate, link_bytes / rates.link


class HybridSplit:
    """Moves an optimizer's state between places after its first steps, and corrects that.

    Args:
        device: where the parameters are.
        copies: engine of the link, for measuring it.
        arena: pinned memory for that.
        room: device memory in bytes that optimizer state may take now.
        say: told of every decision.
    """

    def __init__(
        self,
        device: Device,
        copies: CopyEngine,
        arena: PinnedArena,
        room: Callable[[], int],
        say: Callable[[str], None],
    ) -> None:
        self._device = device
        self._copies = copies
        self._arena = arena
        self._room = room
        self._say = say
        self._steps = 0
        self._corrections = 0
        self._factor = 1.0
        self._room_bytes = 0
        self._rates: Rates | None = None
        self.last: Split | None = None

    def after_step(self, optimizer: OffloadAdamW) -> None:
        """Called at the end of each step()."""
        self._steps += 1
        if self._rates is None:
            if self._steps >= STEPS_BEFORE:
                self._decide(optimizer)
        elif self._corrections < CORRECTIONS and self._steps % STEPS_BEFORE == 0:
            self._correct(optimizer)

    def _decide(self, optimizer: OffloadAdamW) -> None:
        optimizer.synchronize()
        host = [b for b in optimizer.buckets if isinstance(b.place, HostPlace)]
        seconds = sum(bucket.place.seconds for bucket in host)
        values = sum(bucket.layout.numel for bucket in host)
        if not values or not seconds:
            self._corrections = CORRECTIONS
            return
        self._rates = Rates(values / seconds, self._measure_link())
        self._room_bytes = max(self._room(), 0)
        self._apply(optimizer, "measured")

    def _correct(self, optimizer: OffloadAdamW) -> None:
        """The host's part took longer or shorter than planned: plan with what it took."""
        self._corrections += 1
        assert self.last is not None
        if "streamed" not in self.last.places or not self.last.host_s:
            self._corrections = CORRECTIONS
            return
        optimizer.synchronize()
        host = [b for b in optimizer.buckets if isinstance(b.place, HostPlace)]
        took = sum(bucket.place.seconds for bucket in host)
        if abs(took / self.last.host_s - 1.0) <= _BALANCED:
            self._corrections = CORRECTIONS
            return
        self._factor *= self.last.host_s / took
        self._apply(optimizer, f"host threads took {took * 1000:.0f} ms; measured again")

    def _apply(self, optimizer: OffloadAdamW, why: str) -> None:
        pieces = [
            Piece(
                bucket.layout.numel,
                bucket.layout.numel * bucket.layout.dtype.itemsize,
                bucket.has_master,
            )
            for bucket in optimizer.buckets
        ]
        assert self._rates is not None
        found = split(
            pieces,
            self._rates,
            self._room_bytes,
            keeps_gradients=not optimizer.eager or optimizer.accumulation_steps > 1,
            ring_bytes=optimizer.streaming_bytes,
            host_factor=self._factor,
        )
        optimizer.place_state(found.places)
        self.last = found
        self._say(_in_words(pieces, found, self._rates, why))

    def _measure_link(self) -> float:
        """Bytes per second in each direction, both busy, on this run's own streams."""
        where = self._device.torch_device
        host = [self._arena.empty((_PROBE_BYTES,), torch.uint8, tag="measuring") for _ in range(2)]
        device = [torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=where) for _ in range(2)]
        best = float("inf")
        for _ in range(4):
            self._copies.synchronize()
            start = time.perf_counter()
            self._copies.h2d(device[0], host[0])
            self._copies.d2h(host[1], device[1])
            self._copies.synchronize()
            best = min(best, time.perf_counter() - start)
        return _PROBE_BYTES / best


def _in_words(pieces: Sequence[Piece], found: Split, rates: Rates, why: str) -> str:
    total = sum(piece.values for piece in pieces) or 1
    shares = {
        place: sum(
            p.values for p, where in zip(pieces, found.places, strict=True) if where == place
        )
        / total
        for place in ("resident", "streamed", "host")
    }
    return (
        f"optimizer split ({why}: host {rates.host / 1e9:.2f} G values/s, link "
        f"{rates.link / 1e9:.1f} GB/s each way): {shares['resident']:.0%} of the state in device "
        f"memory, {shares['streamed']:.0%} streams through the device, {shares['host']:.0%} by "
        f"host threads; expected {found.host_s * 1000:.0f} ms and {found.link_s * 1000:.0f} ms"
    )
