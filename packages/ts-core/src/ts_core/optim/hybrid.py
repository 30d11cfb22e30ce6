"""Splitting optimizer state between device memory, the link and host threads.

Host AdamW is bound by host memory, while the link in both directions and the device's memory lie
idle. State that fits stays in device memory; the rest is split so that what the device reads and
writes over the link and what host threads update finish together. The split follows from rates and
room measured in the run, and is corrected from what the steps after it took.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ts_core.device.base import Device
from ts_core.optim.places import HostPlace
from ts_core.optim.rates import Rates

if TYPE_CHECKING:
    from ts_core.optim.adamw import OffloadAdamW
    from ts_core.optim.buckets import Bucket

STEPS_BETWEEN = 2
CORRECTIONS = 3
# Host threads and the link share host memory. Beside each other they do about these shares of
# their rates alone (H200, PCIe 5, 16 cores: 2.6 of 4.0 G values/s and 77 of 90 GB/s).
HOST_BESIDE_LINK = 0.65
LINK_BESIDE_HOST = 0.85
_BALANCED = 0.1
_SHARES = 50
# Shares of the room that are tried for gradients which wait for updates over the link.
_LEFT_TO_GRADIENTS = (0.0, 0.05, 0.1, 0.2, 0.3)


@dataclass(frozen=True)
class Piece:
    """One bucket, for the split.

    Attributes:
        values: parameter values.
        param_bytes: of the parameter.
        has_master: whether there is an fp32 copy of it.
        paged: the parameter is in host memory: updates by the device read and write it there.
        host_only: the device cannot reach it there.
        waits: an update by the device finds its gradient in device memory at the end of backward,
            where it would have left for the host otherwise.
    """

    values: int
    param_bytes: int
    has_master: bool
    paged: bool = False
    host_only: bool = False
    waits: bool = False

    @property
    def state_bytes(self) -> int:
        """fp32 state of the bucket, in bytes."""
        return self.values * (12 if self.has_master else 8)

    def device_bytes(self, place: str) -> int:
        """Device memory that this place takes for the whole of a step: of state, of gradients."""
        if place == "host":
            return 0
        waiting = self.param_bytes if self.waits and not self.paged else 0
        return waiting + (self.state_bytes if place == "resident" else 0)

    def link_bytes(self, place: str) -> int:
        """What an update in this place moves over the link, in the busier direction."""
        if place == "host":  # the gradient one way, new values the other
            return self.param_bytes
        state = 0 if place == "resident" else self.state_bytes
        # Paged: besides the weight itself its gradient, which has left the device before.
        return state + (2 * self.param_bytes if self.paged else 0)


@dataclass(frozen=True)
class Split:
    """A place per bucket, and the seconds that host threads and the link should need."""

    places: tuple[str, ...]
    host_s: float
    link_s: float

    @property
    def seconds(self) -> float:
        """Of the slower side."""
        return max(self.host_s, self.link_s)


def split(
    pieces: Sequence[Piece], rates: Rates, room_bytes: int, host_factor: float = 1.0
) -> Split:
    """Choose a place for each bucket (a pure function).

    As much state as fits is resident, the largest buckets first (their gradient comes last, and
    they would take longest). Of the rest a share goes to host threads, spread through the stack so
    that both sides have work all the time. Where gradients wait on the device for updates over the
    link, some room may be better left to those than to state.

    Args:
        pieces: the buckets, in order of the groups.
        rates: measured.
        room_bytes: device memory that state may fill, and gradients that wait beside it.
        host_factor: correction of the host's rate, from how long its part really took.

    Returns:
        The split with the least time.
    """
    shares = _LEFT_TO_GRADIENTS if any(piece.waits for piece in pieces) else (0.0,)
    found = [_filled(pieces, rates, room_bytes, left, host_factor) for left in shares]
    return min(found, key=lambda split: split.seconds)


def _filled(
    pieces: Sequence[Piece], rates: Rates, room_bytes: int, left: float, host_factor: float
) -> Split:
    """The best split that leaves this share of the room to gradients of updates over the link."""
    for_gradients = int(left * room_bytes)
    room_bytes -= for_gradients
    places = ["host" if piece.host_only else "zero_copy" for piece in pieces]
    for index in sorted(range(len(pieces)), key=lambda index: -pieces[index].values):
        size = pieces[index].device_bytes("resident")
        if size <= room_bytes and not pieces[index].host_only:
            places[index] = "resident"
            room_bytes -= size
    candidates = [
        _with_host_share(pieces, places, share / _SHARES, rates, host_factor)
        for share in range(_SHARES + 1)
    ]
    room_bytes += for_gradients
    fitting = [found for found in candidates if _linked_bytes(pieces, found) <= room_bytes]
    return min(fitting or candidates[-1:], key=lambda found: found.seconds)


def _linked_bytes(pieces: Sequence[Piece], found: Split) -> int:
    """Device memory of what is not resident and yet updated by the device."""
    return sum(
        piece.device_bytes(place)
        for piece, place in zip(pieces, found.places, strict=True)
        if place == "zero_copy"
    )


def _with_host_share(
    pieces: Sequence[Piece],
    places: Sequence[str],
    share: float,
    rates: Rates,
    host_factor: float,
) -> Split:
    chosen = list(places)
    owed = 0.0
    for index, piece in enumerate(pieces):
        if chosen[index] == "resident":
            continue
        if piece.host_only:
            owed -= piece.values * (1 - share)
            continue
        owed += share * piece.values
        if owed >= piece.values / 2 and share > 0:
            chosen[index] = "host"
            owed -= piece.values
    on_host = sum(p.values for p, place in zip(pieces, chosen, strict=True) if place == "host")
    link_bytes = sum(piece.link_bytes(place) for piece, place in zip(pieces, chosen, strict=True))
    both = on_host and "zero_copy" in chosen
    host_rate = rates.host * host_factor * (HOST_BESIDE_LINK if both else 1.0)
    link_rate = rates.link * (LINK_BESIDE_HOST if both else 1.0)
    return Split(tuple(chosen), on_host / host_rate, link_bytes / link_rate)


class HybridSplit:
    """Moves an optimizer's state between places after its first steps, and corrects that.

    Args:
        device: where the parameters are.
        measure: measures the rates; takes a fraction of a second.
        room: device memory in bytes that state may take beyond what it takes now.
        say: told of every decision.
        waits: whether gradients wait for the end of backward: for their norm, say.
    """

    def __init__(
        self,
        device: Device,
        measure: Callable[[], Rates],
        room: Callable[[], int],
        say: Callable[[str], None],
        waits: Callable[[], bool] = lambda: False,
    ) -> None:
        self._device = device
        self._measure = measure
        self._room = room
        self._say = say
        self._waits = waits
        self._steps = 0
        self._corrections = 0
        self._factor = 1.0
        self._rates: Rates | None = None
        self.last: Split | None = None

    def start_again(self) -> None:
        """The buckets are others now: split them as at first, with the rates known."""
        self._steps = 0
        self._corrections = 0
        self.last = None

    def after_step(self, optimizer: OffloadAdamW) -> None:
        """Called at the end of each step()."""
        self._steps += 1
        if self._corrections > CORRECTIONS or self._steps % STEPS_BETWEEN:
            return
        self._corrections += 1
        optimizer.synchronize()
        if self._rates is None or self.last is None:
            self._rates = self._rates or self._measure()
            self._apply(optimizer, "measured")
        else:
            self._correct(optimizer)

    def _correct(self, optimizer: OffloadAdamW) -> None:
        """Plan again with how long the host's part took and what memory is left."""
        assert self.last is not None
        host = [bucket for bucket in optimizer.buckets if isinstance(bucket.place, HostPlace)]
        took = sum(bucket.place.seconds for bucket in host)
        if self.last.host_s and took:
            ratio = took / self.last.host_s
            if abs(ratio - 1.0) > _BALANCED:
                self._factor /= ratio
        self._apply(optimizer, f"after {self._steps} steps: host threads took {took * 1000:.0f} ms")

    def away(self, buckets: Sequence[Bucket]) -> tuple[int, float]:
        """(bytes of state that could be in device memory and is not, seconds that it costs a step).

        Measures the rates if they are not known.
        """
        self._rates = self._rates or self._measure()
        elsewhere = [bucket for bucket in buckets if not bucket.place.device_bytes()]
        pieces = self._pieces(elsewhere)
        size = sum(piece.state_bytes for piece in pieces if not piece.host_only)
        return size, split(pieces, self._rates, 0, self._factor).seconds if pieces else 0.0

    def give_back(self, optimizer: OffloadAdamW, excess: int) -> bool:
        """Take at least `excess` bytes of state from device memory; whether any went."""
        if self._rates is None or self.last is None:
            return False
        optimizer.build()
        before = self._taken(optimizer)
        self._apply(optimizer, "a step took too much memory", max(0, before - excess))
        return self._taken(optimizer) < before

    def _taken(self, optimizer: OffloadAdamW) -> int:
        """Device memory of state now, and of gradients that wait for it."""
        pieces = self._pieces(optimizer.buckets)
        return sum(
            piece.device_bytes(bucket.place.name)
            for piece, bucket in zip(pieces, optimizer.buckets, strict=True)
        )

    def _pieces(self, buckets: Sequence[Bucket]) -> list[Piece]:
        waits = self._waits()
        return [
            Piece(
                bucket.layout.numel,
                bucket.layout.numel * bucket.layout.dtype.itemsize,
                bucket.has_master,
                bucket.home is not None,
                bucket.home is not None and not bucket.home.addressable(self._device),
                waits,
            )
            for bucket in buckets
        ]

    def _apply(self, optimizer: OffloadAdamW, why: str, room: int | None = None) -> None:
        """`room`: of state and waiting gradients on the device; None: what they take now, and what
        is left beside it."""
        optimizer.build()  # a group may have been added that has had no gradient yet
        pieces = self._pieces(optimizer.buckets)
        assert self._rates is not None
        if room is None:
            room = max(self._room() + self._taken(optimizer), 0)
        found = split(pieces, self._rates, room, self._factor)
        changed = self.last is None or found.places != self.last.places
        if changed:
            optimizer.place_state(found.places)
            self._say(_in_words(pieces, found, self._rates, why))
            self._device.reset_peak()
        self.last = found


def _in_words(pieces: Sequence[Piece], found: Split, rates: Rates, why: str) -> str:
    total = sum(piece.values for piece in pieces) or 1

    def share(name: str) -> str:
        values = sum(
            p.values for p, place in zip(pieces, found.places, strict=True) if place == name
        )
        return f"{values / total:.0%}"

    return (
        f"optimizer split ({why}; host {rates.host / 1e9:.2f} G values/s, link "
        f"{rates.link / 1e9:.1f} GB/s each way): {share('resident')} of the state in device "
        f"memory, {share('zero_copy')} read and written over the link, {share('host')} by host "
        f"threads; expected {found.link_s * 1000:.0f} ms of link, {found.host_s * 1000:.0f} ms of "
        f"host"
    )
