"""Asynchronous copies, ordered by events, counted, and bounded in flight."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from ts_core.config import default_inflight_bytes, default_leaving_bytes
from ts_core.device.base import Device, Event, Stream
from ts_core.transfer import edges
from ts_core.transfer.pending import PendingCopy
from ts_core.transfer.totals import DIRECTIONS, DirectionStats, count

After: TypeAlias = Event | Sequence[Event | None] | None
Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # destination, source


def events_of(after: After) -> list[Event]:
    """The events to wait for: one, several, or none."""
    if after is None:
        return []
    several: Sequence[Event | None] = after if isinstance(after, Sequence) else [after]
    return [event for event in several if event is not None]


@dataclass
class _InFlight:
    event: Event
    size_bytes: int
    keep: tuple[torch.Tensor, ...]
    source: torch.Tensor | None = None  # made on `stream`, which may wait in place of us
    stream: Stream | None = None


class _Lane:
    """One direction: its stream, what is in flight on it, and its counters."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.in_flight: deque[_InFlight] = deque()
        self.in_flight_bytes = 0
        self.most_bytes = 0  # in flight at once, since the device's peak was reset
        self.peaks = 0  # how often it had been
        self.stats = DirectionStats()
        self.lock = threading.Lock()

    def retire(self) -> None:
        while self.in_flight and self.in_flight[0].event.query():
            self.in_flight_bytes -= self.in_flight.popleft().size_bytes

    def add(self, copy: _InFlight, peaks: int) -> None:
        before = self.most_bytes_since(peaks)
        self.in_flight.append(copy)
        self.in_flight_bytes += copy.size_bytes
        self.most_bytes = max(before, self.in_flight_bytes)

    def most_bytes_since(self, peaks: int) -> int:
        if self.peaks != peaks:
            self.peaks, self.most_bytes = peaks, self.in_flight_bytes
        return self.most_bytes


# Lanes, and the direction of each.
_LANES = {"h2d": "h2d", "values": "h2d", "d2h": "d2h"}


class CopyEngine:
    """Queues copies on one stream per direction, and on one for updated values.

    What fills buffers waits for these to become free, and whatever is behind it on its stream waits
    with it. New values of weights have memory of their own, so they go by themselves.

    A copy keeps its tensors alive until it has finished, so a source may be dropped by the caller
    at once; the caller must not write to it before the returned event.

    Args:
        device: the accelerator.
        max_inflight_bytes: a stream holds at most this many bytes of unfinished copies (one
            larger copy is let through alone); the host waits for the oldest beyond it. None: 1 GiB,
            or a tenth of the memory of a device that has its own, to the host a twentieth: what
            leaves takes device memory until it has gone.

    Attributes:
        max_inflight_bytes, max_leaving_bytes: the limits of copies to the device, and to the host.
    """

    def __init__(self, device: Device, max_inflight_bytes: int | None = None) -> None:
        self.device = device
        usable = device.usable_bytes() if device.separate_memory else None
        self.max_inflight_bytes = max_inflight_bytes or default_inflight_bytes(usable)
        self.max_leaving_bytes = max_inflight_bytes or default_leaving_bytes(usable)
        self._lanes = {name: _Lane(device.new_stream(name)) for name in _LANES}

    def h2d(self, dst_d: torch.Tensor, src_h: torch.Tensor, after: After = None) -> Event:
        """Queue a copy to the device after `after`; returns the event of its completion."""
        return self._copy("h2d", dst_d, src_h, after)

    def values_h2d(self, dst_d: torch.Tensor, src_h: torch.Tensor, after: After = None) -> Event:
        """As `h2d`, for new values of weights that stay on the device."""
        return self._copy("values", dst_d, src_h, after)

    def h2d_pieces(
        self,
        dst_d: torch.Tensor,
        src_h: torch.Tensor,
        pieces: Sequence[tuple[int, int, int]],
        after: After = None,
    ) -> Event:
        """Queue copies of several stretches of bytes to the device after `after`, as one.

        Args:
            dst_d, src_h: uint8 [..] each.
            pieces: (first byte in dst_d, first byte in src_h, bytes), at least one.
            after: what the first waits for.

        Returns:
            The event of the completion of all.
        """
        pairs = [(dst_d[to : to + n], src_h[at : at + n]) for to, at, n in pieces]
        return self._copy_all("h2d", pairs, after, keep=(dst_d, src_h))

    def h2d_all(self, pairs: Sequence[Pair], after: After = None) -> Event:
        """Queue copies (dst_d, src_h) after `after`; returns the event of the completion of all."""
        return self._copy_all("h2d", pairs, after, keep=tuple(itertools.chain(*pairs)))

    def d2h_all(self, pairs: Sequence[Pair], after: After = None, leave_bytes: int = 0) -> Event:
        """Queue copies (dst_h, src_d) after `after`; returns the event of the completion of all.

        Args:
            pairs: at least one.
            after: what the first waits for.
            leave_bytes: of the limit on bytes in flight, for what the caller holds back itself.
        """
        keep = tuple(itertools.chain(*pairs))
        return self._copy_all("d2h", pairs, after, keep, leave_bytes)

    def d2h(
        self,
        dst_h: torch.Tensor,
        src_d: torch.Tensor,
        after: After = None,
        *,
        made_here: bool = False,
        keep_source: bool = True,
    ) -> Event:
        """Queue a copy to the host after `after`; returns the event of its completion.

        Args:
            dst_h, src_d: of one shape and dtype.
            after: what it waits for.
            made_here: `src_d` was made on the calling thread's compute stream, so `let_go` may drop
                it before the copy has finished.
            keep_source: False: the caller keeps `src_d` until then.
        """
        if made_here:
            here = self.device.compute_stream()
            return self._copy_all("d2h", [(dst_h, src_d)], after, (dst_h,), lent=(src_d, here))
        keep = (dst_h, src_d) if keep_source else (dst_h,)
        return self._copy_all("d2h", [(dst_h, src_d)], after, keep)

    def let_go(self) -> None:
        """Keep no source of copies to the host that was `made_here`.

        The streams that these were made on wait for the copies, and torch gives their memory to
        later work of those streams only. For the end of a step's copies: the last sources would be
        kept until the first copy of the next one.
        """
        lane = self._lanes["d2h"]
        with lane.lock:
            lane.retire()
            for copy in lane.in_flight:
                if copy.stream is not None:
                    edges.wait(self.device, copy.stream, copy.event)
                    copy.source = copy.stream = None

    def wait_compute(self, event: Event) -> None:
        """Make the calling thread's compute stream wait for `event`.

        Of a `PendingCopy` the calling host thread first waits until it has been queued.
        """
        if isinstance(event, PendingCopy):
            event = event.queued()
        edges.wait(self.device, self.device.compute_stream(), event)

    def record_compute(self) -> Event:
        """An event after everything queued so far on the calling thread's compute stream."""
        return self.device.compute_stream().record()

    def record_h2d(self) -> Event:
        """An event after every copy to the device queued so far, but for updated values."""
        return self._lanes["h2d"].stream.record()

    def unseen_bytes(self, size_bytes: int) -> int:
        """Device memory that copies to the host may take beyond what the device's peak shows.

        A host that runs ahead of the link has more of them in flight.

        Args:
            size_bytes: what a step copies there in all.
        """
        lane = self._lanes["d2h"]
        with lane.lock:
            seen = lane.most_bytes_since(self.device.peaks)
        return max(0, min(size_bytes, self.max_leaving_bytes) - seen)

    def retire(self) -> None:
        """Let go of the tensors of copies that have finished, without waiting for others."""
        for lane in self._lanes.values():
            with lane.lock:
                lane.retire()

    def synchronize(self) -> None:
        """Block until every queued copy has finished."""
        for lane in self._lanes.values():
            lane.stream.synchronize()
            with lane.lock:
                lane.retire()

    def stats(self) -> dict[str, DirectionStats]:
        """Counters by direction, "h2d" and "d2h"."""
        found = {direction: DirectionStats() for direction in DIRECTIONS}
        for name, lane in self._lanes.items():
            found[_LANES[name]].add(lane.stats)
        return found

    def _copy(self, lane: str, dst: torch.Tensor, src: torch.Tensor, after: After) -> Event:
        return self._copy_all(lane, [(dst, src)], after, keep=(dst, src))

    def _copy_all(
        self,
        name: str,
        pairs: Sequence[Pair],
        after: After,
        keep: tuple[torch.Tensor, ...],
        leave_bytes: int = 0,
        lent: tuple[torch.Tensor, Stream] | None = None,
    ) -> Event:
        lane = self._lanes[name]
        leaves = _LANES[name] == "d2h"
        most = (self.max_leaving_bytes if leaves else self.max_inflight_bytes) - leave_bytes
        size_bytes = sum(src.numel() * src.element_size() for _, src in pairs)
        with lane.lock:
            waits = lane.stats.limit_waits
            lane.retire()
            while lane.in_flight and lane.in_flight_bytes + size_bytes > most:
                lane.stats.limit_waits += 1
                self.device.host_wait(lane.in_flight[0].event)
                lane.in_flight_bytes -= lane.in_flight.popleft().size_bytes
            for event in events_of(after):
                edges.wait(self.device, lane.stream, event)
            self.device.copy_all(self._paused(pairs, lane.stream), lane.stream)
            edges.pause(self.device, lane.stream)
            event = lane.stream.record()
            lane.add(_InFlight(event, size_bytes, keep, *(lent or ())), self.device.peaks)
            lane.stats.bytes += size_bytes
            lane.stats.copies += len(pairs)
            waits = lane.stats.limit_waits - waits
        count(self.device.torch_device, _LANES[name], size_bytes, len(pairs), waits)
        return event

    def _paused(self, pairs: Sequence[Pair], stream: Stream) -> Iterator[Pair]:
        for pair in pairs:
            edges.pause(self.device, stream)
            yield pair
