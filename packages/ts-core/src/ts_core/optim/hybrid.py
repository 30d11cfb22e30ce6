"""Optimizer state between device memory, the link and host threads, by measured speed.

The split follows from rates, room and copies measured in the run, and is corrected from what the
steps after it took.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ts_core.device.base import Device
from ts_core.errors import OutOfBudgetError
from ts_core.optim.pieces import NOTHING, Bytes, Piece
from ts_core.optim.rates import Rates
from ts_core.optim.split import Split, in_words, link_share, split, timed

if TYPE_CHECKING:
    from ts_core.optim.adamw import OffloadAdamW
    from ts_core.optim.buckets import Bucket

STEPS_BETWEEN = 2
CORRECTIONS = 3
_BALANCED = 0.1
# State moves again, but into device memory, where the predicted updates are shorter by this share:
# moving takes longer than some steps, and what host threads take differs from step to step.
_WORTH_MOVING = 0.05
# The part of a shared parameter's state in device memory changes by no less: all of it is moved.
_WORTH_CUTTING = 0.1
# Values from which a parameter whose gradient comes last is updated by both sides together: over
# the link alone 32 M take 8 ms, in which the step has nothing else to do.
_LARGE = 32 << 20


class HybridSplit:
    """Moves an optimizer's state between places after its first steps, and corrects that.

    Args:
        device: where the parameters are.
        measure: measures the rates; takes a fraction of a second.
        room: device memory in bytes that state may take beyond what it takes now.
        say: told of every decision.
        waits: whether gradients wait for the end of backward: for their norm, say.
        copied: bytes that have been copied over the link so far, by anybody.
        passes: backward passes of a step.
        forward_s: seconds of a forward, at least; 0 while they are not known.
    """

    def __init__(
        self,
        device: Device,
        measure: Callable[[], Rates],
        room: Callable[[], int],
        say: Callable[[str], None],
        waits: Callable[[], bool] = lambda: False,
        copied: Callable[[], Bytes] = lambda: NOTHING,
        passes: Callable[[], int] = lambda: 1,
        forward_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._device = device
        self._measure = measure
        self._room = room
        self._say = say
        self._waits = waits
        self._copied = copied
        self._passes = passes
        self._forward_s = forward_s
        self._since: tuple[int, Bytes] | None = None  # steps and bytes when counting began
        self._others = NOTHING
        self._steps = 0
        self._corrections = 0
        self._factor = 1.0
        self._rates: Rates | None = None
        self._share = 0.5  # of the link, in what both sides update together; of the first split
        self.last: Split | None = None

    def start_again(self) -> None:
        """The buckets are others now: split them as at first, with the rates known."""
        self._steps = 0
        self._since = None
        self._corrections = 0
        self.last = None

    def leave_out(self) -> None:
        """Called in place of `after_step` after a step that is not like those to come."""
        self._since = None
        self._steps -= self._steps % STEPS_BETWEEN

    def after_step(self, optimizer: OffloadAdamW) -> None:
        """Called at the end of each step()."""
        self._steps += 1
        if self._corrections > CORRECTIONS:
            return
        if self._since is None:
            optimizer.synchronize()  # new values of this step are not of the next
            self._since = (self._steps, self._copied())
        if self._steps % STEPS_BETWEEN:
            return
        self._corrections += 1
        optimizer.synchronize()
        self._others = self._beside(optimizer)
        if self._rates is None or self.last is None:
            self._rates = self._rates or self._measure()
            self._share = link_share(self._rates)
            self._apply(optimizer, "measured")
        else:
            self._correct(optimizer)

    def _correct(self, optimizer: OffloadAdamW) -> None:
        """Plan again with how long the host's part took and what memory is left."""
        assert self.last is not None
        took = sum(bucket.place.seconds for bucket in optimizer.buckets)
        if self.last.host_s and took:
            ratio = took / self.last.host_s
            if abs(ratio - 1.0) > _BALANCED:
                self._factor /= ratio
        self._apply(optimizer, f"after {self._steps} steps: host threads took {took * 1000:.0f} ms")

    def _beside(self, optimizer: OffloadAdamW) -> Bytes:
        """What a step copies that is not for updates, on average since counting began."""
        assert self._since is not None
        steps, before = self._since
        count, now = max(self._steps - steps, 1), self._copied()
        own = NOTHING
        for piece, bucket in zip(self._pieces(optimizer.buckets), optimizer.buckets, strict=True):
            own += piece.copied_bytes(bucket.place.name)
        found = [
            max((b - a) // count - mine, 0) for a, b, mine in zip(before, now, own, strict=True)
        ]
        return Bytes(*found)

    def away(self, buckets: Sequence[Bucket]) -> tuple[int, float]:
        """(bytes of state that could be in device memory and is not, seconds that it costs a step).

        Measures the rates if they are not known.
        """
        if self._rates is None:
            self._rates = self._measure()
            self.leave_out()  # its copies are not of a step
        found = zip(self._pieces(buckets), buckets, strict=True)  # which comes last, of all
        pieces = [piece for piece, bucket in found if bucket.place.name != "resident"]
        size = sum(
            p.state_bytes - int(p.near_share * p.state_bytes) for p in pieces if not p.host_only
        )
        if not pieces:
            return size, 0.0
        forward_s = self._forward_s()
        seconds = split(pieces, self._rates, 0, self._factor, self._others, forward_s).seconds
        return size, seconds - max(self._others) / self._rates.link

    def give_back(self, optimizer: OffloadAdamW, excess: int) -> bool:
        """Take at least `excess` bytes of state from device memory; whether any went."""
        if self._rates is None:
            return False
        optimizer.build()
        before = self._taken(optimizer)
        self._apply(optimizer, "a step took too much memory", max(0, before - excess))
        return self._taken(optimizer) < before

    def _taken(self, optimizer: OffloadAdamW) -> int:
        """Device memory of state now, and of gradients that wait for it."""
        return _device_bytes(self._pieces(optimizer.buckets), _places(optimizer.buckets))

    def _pieces(self, buckets: Sequence[Bucket]) -> list[Piece]:
        waits, passes = self._waits(), self._passes()
        last = None if waits else max(buckets, key=lambda bucket: bucket.order, default=None)
        if last is None or last.home is not None or last.layout.numel < _LARGE:
            last = None
        return [
            Piece(
                bucket.layout.numel,
                bucket.layout.numel * bucket.layout.dtype.itemsize,
                bucket.has_master,
                bucket.home is not None,
                bucket.home is not None and not bucket.home.addressable(self._device),
                waits,
                1 if bucket.layout.many else passes,
                self._share if bucket is last else None,
                bucket.near_share,
            )
            for bucket in buckets
        ]

    def _apply(self, optimizer: OffloadAdamW, why: str, room: int | None = None) -> None:
        """`room`: of state and waiting gradients on the device; None: what they take now, and what
        is left beside it."""
        optimizer.build()  # a group may have been added that has had no gradient yet
        buckets = optimizer.buckets
        pieces, now = self._pieces(buckets), _places(buckets)
        assert self._rates is not None
        taken = _device_bytes(pieces, now)
        if room is None:
            room = max(self._room() + taken, 0)
        known = (self._rates, self._factor, self._others, self._forward_s())
        found = split(pieces, known[0], room, *known[1:])
        stays = self.last is not None and taken <= room
        cut_now = max((piece.near_share for piece in pieces), default=0.0)
        if found.places == now and abs(found.near_share - cut_now) < _WORTH_CUTTING and stays:
            found = timed(pieces, now, *known)
        if stays and _state_bytes(pieces, found) <= sum(b.place.device_bytes() for b in buckets):
            stay = timed(pieces, now, *known)
            if found.seconds > (1 - _WORTH_MOVING) * stay.seconds:
                found = stay
        if self.last is None or found.places != now or found.near_share != cut_now:
            optimizer.share_by(self._share, found.near_share)
            try:
                optimizer.place_state(found.places)
            except OutOfBudgetError as error:
                self._corrections = CORRECTIONS + 1  # it would be the same again
                self._say(f"optimizer state moves no more: {error}")
                found = timed(self._pieces(buckets), _places(buckets), *known)
            self._say(in_words(pieces, found, self._rates, why, self._others))
            self._device.reset_peak()
        self._since = (self._steps, self._copied())
        self.last = found


def _places(buckets: Sequence[Bucket]) -> tuple[str, ...]:
    return tuple(bucket.place.name for bucket in buckets)


def _state_bytes(pieces: Sequence[Piece], found: Split) -> int:
    """Of state in device memory."""
    by_place = {"resident": 1.0, "shared": found.near_share}
    shares = (by_place.get(place, 0.0) for place in found.places)
    return sum(int(p.state_bytes * share) for p, share in zip(pieces, shares, strict=True))


def _device_bytes(pieces: Sequence[Piece], places: Sequence[str]) -> int:
    """Device memory that these places take for the whole of a step."""
    return sum(p.device_bytes(place) for p, place in zip(pieces, places, strict=True))
