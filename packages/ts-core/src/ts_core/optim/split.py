"""Splitting optimizer state between device memory, the link and host threads.

Host AdamW is bound by host memory, while the link in both directions and the device's memory lie
idle. State that fits stays in device memory; the rest is split so that what the device reads and
writes over the link, beside all else that a step copies, and what host threads update finish
together; or host threads a little later, where updates begin during backward: they take the newest
gradients first, so that their last ones, of weights that the next forward reads last, go on beside
it. A pure function; `HybridSplit` measures what it needs and applies what it says.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ts_core.optim.pieces import NOTHING, Bytes, Piece
from ts_core.optim.rates import Rates
from ts_core.schedule.places import spread

# Host threads and the link share host memory. Beside each other they do about these shares of
# their rates alone (H200, PCIe 5, 16 cores: 2.6 of 4.0 G values/s and 77 of 90 GB/s).
HOST_BESIDE_LINK = 0.65
LINK_BESIDE_HOST = 0.85
_SHARES = 50
_LEAST_PART = 0.1
_MUCH_LARGER = 4
_ROUNDS = 8
# Shares of the room that are tried for gradients which wait for updates over the link.
_LEFT_TO_GRADIENTS = (0.0, 0.05, 0.1, 0.2, 0.3)


@dataclass(frozen=True)
class Split:
    """A place per bucket, and the seconds that host threads and the link should need.

    Attributes:
        places, host_s, link_s: see above.
        beside_s: so much longer than the link's may the updates of host threads take.
        near_share: `Piece.near_share` of the one in the place "shared".
    """

    places: tuple[str, ...]
    host_s: float
    link_s: float
    beside_s: float = 0.0
    near_share: float = 0.0

    @property
    def seconds(self) -> float:
        """Of the side that takes too long."""
        return max(self.host_s - self.beside_s, self.link_s)

    @property
    def cost(self) -> tuple[float, float]:
        """By which splits are compared. Backward takes twice as long as forward, at least."""
        return max(self.seconds, 2 * self.beside_s), self.host_s


class _Conditions(NamedTuple):
    """What does not depend on the split; as the arguments of `split`."""

    rates: Rates
    host_factor: float
    others: Bytes
    forward_s: float


def split(
    pieces: Sequence[Piece],
    rates: Rates,
    room_bytes: int,
    host_factor: float = 1.0,
    others: Bytes = NOTHING,
    forward_s: float = 0.0,
) -> Split:
    """Choose a place for each bucket (a pure function).

    As much state as fits is resident. First that of much larger buckets than others: their gradient
    comes last, and they would take longest; of one that would be shared also a part. Then the
    smallest buckets, as each that is elsewhere takes Python as long as a large one; and of those of
    one size some throughout the stack. Weights that stream come last, and only where the link is
    fast enough. Of the rest a share goes to host threads, spread through the stack so that both
    sides have work all the time. Weights that stream come last to the device, since their updates
    there move twice the bytes; but those need no room. Where gradients wait on the device for
    updates over the link, some room may be better left to those than to state.

    Splits whose updates are all done beside the products of backward are equal but for what they
    ask of host threads, beside which Python queues a step's work more slowly.

    Args:
        pieces: the buckets, in order of the groups.
        rates: measured.
        room_bytes: device memory that state may fill, and gradients that wait beside it.
        host_factor: correction of the host's rate, from how long its part really took.
        others: what a step copies besides: streamed weights, paged activations.
        forward_s: seconds of a forward at least; 0 where they are not known.

    Returns:
        The split with the least time.
    """
    now = _Conditions(rates, host_factor, others, forward_s)
    shares = _LEFT_TO_GRADIENTS if any(piece.waits for piece in pieces) else (0.0,)
    streaming = (True, False) if any(piece.paged for piece in pieces) else (True,)
    found = [
        _filled(pieces, now, room_bytes, left, paged) for paged in streaming for left in shares
    ]
    return min(found, key=lambda split: split.cost)


def _filled(
    pieces: Sequence[Piece], now: _Conditions, room_bytes: int, left: float, paged: bool
) -> Split:
    """The best split that leaves this share of the room to gradients of updates over the link.

    `paged`: state of weights that stream may fill the room too.
    """
    for_gradients = int(left * room_bytes)
    room_bytes -= for_gradients
    places = [
        "host" if piece.host_only else "zero_copy" if piece.link_share is None else "shared"
        for piece in pieces
    ]
    pieces = list(pieces)
    for alike in _by_worth(pieces):
        piece, size = pieces[alike[0]], pieces[alike[0]].device_bytes("resident")
        if piece.host_only or (piece.paged and not paged):
            continue
        fit = len(alike) if not size else min(len(alike), max(room_bytes, 0) // size)
        for index in (alike[k] for k in spread(fit, len(alike))):
            places[index] = "resident"
        room_bytes -= fit * size
        if piece.link_share is not None and not fit:
            share = room_bytes / size
            piece = replace(piece, near_share=share if share >= _LEAST_PART else 0.0)
            room_bytes -= piece.device_bytes("shared")
            pieces[alike[0]] = piece
    room_bytes += for_gradients
    candidates = [
        _with_host_share(pieces, places, share / _SHARES, now, room_bytes)
        for share in range(_SHARES + 1)
    ]
    return min(candidates, key=lambda found: found.cost)


def _by_worth(pieces: Sequence[Piece]) -> list[list[int]]:
    """Indices of pieces that are alike, in the order in which their state should be resident."""
    sizes = sorted(piece.values for piece in pieces)
    up_to = itertools.accumulate(sizes)
    usual = next(
        (size for size, sum_ in zip(sizes, up_to, strict=True) if 2 * sum_ > sum(sizes)), 0
    )
    alike: dict[tuple[bool | int, ...], list[int]] = {}
    for index, piece in enumerate(pieces):
        alone = piece.link_share is not None or piece.values > _MUCH_LARGER * usual
        order = -piece.values if alone else piece.values
        key = (piece.paged, not alone, order, piece.state_bytes, piece.host_only, alone * index)
        alike.setdefault(key, []).append(index)
    return [alike[key] for key in sorted(alike)]


def _with_host_share(
    pieces: Sequence[Piece],
    places: Sequence[str],
    share: float,
    now: _Conditions,
    room_bytes: int,
) -> Split:
    """The host gets `share` of what is not resident, and what waits where `room_bytes` is full."""
    chosen = list(places)
    movable = [index for index, place in enumerate(places) if place == "zero_copy"]
    elsewhere = sum(piece.values for piece in pieces if piece.host_only)
    total = elsewhere + sum(pieces[index].values for index in movable)
    by_device = total - max(share * total, elsewhere)
    for paged in (False, True):
        alike = [index for index in movable if pieces[index].paged == paged]
        size = sum(pieces[index].values for index in alike)
        waiting = sum(pieces[index].device_bytes("zero_copy") for index in alike)
        part = min(by_device, size, room_bytes / waiting * size if waiting else size)
        for index in _spread(pieces, alike, size - part, size):
            chosen[index] = "host"
        for index in alike:
            needed = pieces[index].device_bytes("zero_copy")
            if needed > room_bytes:
                chosen[index] = "host"
            if chosen[index] != "host":
                room_bytes -= needed
                by_device = max(0, by_device - pieces[index].values)
    return timed(pieces, chosen, now.rates, now.host_factor, now.others, now.forward_s)


def timed(
    pieces: Sequence[Piece],
    places: Sequence[str],
    rates: Rates,
    host_factor: float = 1.0,
    others: Bytes = NOTHING,
    forward_s: float = 0.0,
) -> Split:
    """The split with these places, whatever room they take; arguments as of `split`."""
    on_host, moved = 0, others
    for piece, place in zip(pieces, places, strict=True):
        on_host += piece.host_values(place)
        moved += piece.link_bytes(place)
    host_s, link_s = _side_by_side(on_host / (rates.host * host_factor), max(moved) / rates.link)
    if any(piece.waits for piece in pieces):
        forward_s = 0.0
    shares = [p.near_share for p, place in zip(pieces, places, strict=True) if place == "shared"]
    return Split(tuple(places), host_s, link_s, forward_s, max(shares, default=0.0))


def _spread(
    pieces: Sequence[Piece], indices: Sequence[int], part: float, size: int
) -> Iterator[int]:
    """Those of `indices`, evenly among them, that hold about `part` of all their `size` values."""
    if part <= 0:
        return
    owed = 0.0
    for index in indices:
        values = pieces[index].values
        owed += part / size * values
        if owed >= values / 2:
            yield index
            owed -= values


def link_share(rates: Rates, host_factor: float = 1.0) -> float:
    """Of fp32 values that link and host threads update together, those of the link.

    So that both are done at once: the link reads and writes 8 bytes of its values, and copies 4 of
    the host's each way.
    """
    link = LINK_BESIDE_HOST * rates.link
    host_s = max(1 / (HOST_BESIDE_LINK * rates.host * host_factor) - 4 / link, 0.0)
    return min(max(host_s / (host_s + 8 / link), _LEAST_PART), 1 - _LEAST_PART)


def _side_by_side(host_s: float, link_s: float) -> tuple[float, float]:
    """What both take together that take so long alone: each is slower while the other works."""
    host, link = host_s, link_s
    for _ in range(_ROUNDS):
        longest = max(host, link, 1e-12)
        host, link = (
            host_s / (1 - (1 - HOST_BESIDE_LINK) * link / longest),
            link_s / (1 - (1 - LINK_BESIDE_HOST) * host / longest),
        )
    return host, link


def in_words(
    pieces: Sequence[Piece], found: Split, rates: Rates, why: str, others: Bytes = NOTHING
) -> str:
    """The split as an event tells it."""
    total = sum(piece.values for piece in pieces) or 1

    by_place = dict.fromkeys(("resident", "zero_copy", "host", "shared"), 0.0)
    for piece, place in zip(pieces, found.places, strict=True):
        near = found.near_share * piece.values if place == "shared" else 0.0
        by_place["resident"] += near
        by_place[place] += piece.values - near

    def share(name: str) -> str:
        return f"{by_place[name] / total:.0%}"

    together = f", {share('shared')} by both together" if by_place["shared"] else ""
    beside = ""
    if max(others) >= 1_000_000:
        to_device, to_host = (size / 1e9 for size in others)
        beside = f", beside copies of {to_device:.2f} GB to the device and {to_host:.2f} GB back"
    return (
        f"optimizer split ({why}; host {rates.host / 1e9:.2f} G values/s, link "
        f"{rates.link / 1e9:.1f} GB/s each way): {share('resident')} of the state in device "
        f"memory, {share('zero_copy')} read and written over the link, {share('host')} by host "
        f"threads{together}; expected {found.link_s * 1000:.0f} ms of link, "
        f"{found.host_s * 1000:.0f} ms of host{beside}"
    )
