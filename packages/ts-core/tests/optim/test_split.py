"""Every split keeps to the room and is no slower than host threads alone."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ts_core.optim.rates import Rates
from ts_core.optim.split import Bytes, Piece, _side_by_side, split

MILLION = 1_000_000
RATES = Rates(host=4.0e9, link=45e9)
PIECES = st.builds(
    lambda values, low, paged, host_only, passes: Piece(
        values, values * (2 if low else 4), low, paged, paged and host_only, passes=passes
    ),
    st.one_of(st.just(0), st.integers(1, 1000), st.integers(MILLION, 1000 * MILLION)),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(1, 8),
)
SIZES = st.one_of(st.just(0), st.integers(0, 10**12))


def seconds(
    pieces: list[Piece], places: tuple[str, ...], rates: Rates, factor: float, others: Bytes
) -> float:
    on_host = sum(p.values for p, place in zip(pieces, places, strict=True) if place == "host")
    moved = others
    for piece, place in zip(pieces, places, strict=True):
        moved += piece.link_bytes(place)
    return max(_side_by_side(on_host / (rates.host * factor), max(moved) / rates.link))


def taken(pieces: list[Piece], places: tuple[str, ...]) -> int:
    return sum(p.device_bytes(place) for p, place in zip(pieces, places, strict=True))


@settings(max_examples=250, deadline=None)
@given(
    pieces=st.lists(PIECES, max_size=4),
    waits=st.booleans(),
    host=st.floats(1e3, 1e12),
    link=st.floats(1e3, 1e13),
    room=SIZES,
    factor=st.floats(1e-3, 1e3),
    others=st.tuples(SIZES, SIZES),
)
def test_any_split_keeps_to_the_room_and_is_nearly_the_best(
    pieces: list[Piece],
    waits: bool,
    host: float,
    link: float,
    room: int,
    factor: float,
    others: tuple[int, int],
) -> None:
    pieces = [replace(piece, waits=waits) for piece in pieces]
    rates, beside = Rates(host, link), Bytes(*others)

    def allowed(places: tuple[str, ...]) -> bool:
        bound = zip(pieces, places, strict=True)
        at_home = all(place == "host" for piece, place in bound if piece.host_only)
        return at_home and taken(pieces, places) <= room

    found = split(pieces, rates, room, factor, beside)
    assert allowed(found.places)
    assert found.seconds == pytest.approx(seconds(pieces, found.places, rates, factor, beside))
    alone = seconds(pieces, ("host",) * len(pieces), rates, factor, beside)
    assert found.seconds <= alone * (1 + 1e-9)
    every = itertools.product(("host", "zero_copy", "resident"), repeat=len(pieces))
    best = min(seconds(pieces, p, rates, factor, beside) for p in every if allowed(p))
    assert found.seconds <= 2.0 * best + 1e-12


def test_weights_that_stream_need_no_room_for_their_gradients() -> None:
    """With clipping, gradients of the others wait on the device, where no room is left."""
    stays = [Piece(10 * MILLION, 40 * MILLION, False, waits=True)] * 50
    streams = [replace(stays[0], paged=True)] * 50
    found = split([*stays, *streams], RATES, 0)
    assert set(found.places[:50]) == {"host"}
    assert found.places[50:].count("zero_copy") > 10
    some = split([*stays, *streams], RATES, 400 * MILLION)
    assert 0 < 50 - some.places[:50].count("host") <= 10
    assert some.seconds < found.seconds < split([*stays, *stays], RATES, 0).seconds


def test_state_of_weights_that_stream_stays_on_the_host_of_a_slow_link() -> None:
    """Its update reads weight and gradient over the link, and writes both: 8 bytes a value."""
    streams = [Piece(10 * MILLION, 40 * MILLION, False, paged=True)] * 20
    room = 20 * 80 * MILLION
    assert set(split(streams, Rates(4e9, 45e9), room).places) == {"resident"}
    assert set(split(streams, Rates(4e9, 4e9), room).places) == {"host"}
    stays = [replace(piece, paged=False) for piece in streams]
    assert set(split(stays, Rates(4e9, 4e9), room).places) == {"resident"}


@pytest.mark.parametrize(
    ("paged", "place", "copied"),
    [
        (False, "host", (4, 32)),
        (False, "zero_copy", (0, 0)),
        (False, "resident", (0, 0)),
        (True, "host", (0, 32)),
        (True, "zero_copy", (0, 32)),
    ],
)
def test_gradients_of_every_pass_cross_the_link(
    paged: bool, place: str, copied: tuple[int, int]
) -> None:
    assert Piece(1, 4, False, paged=paged, passes=8).copied_bytes(place) == copied


def test_many_passes_are_a_reason_to_update_on_the_device() -> None:
    """Where a gradient stays, its passes are summed; 16 take the link for longer than state."""
    once = [Piece(10 * MILLION, 20 * MILLION, True, waits=True)] * 100
    often = [replace(piece, passes=16) for piece in once]
    room = 7_000 * MILLION
    counts = [split(each, RATES, room).places.count("host") for each in (once, often)]
    assert counts[1] < counts[0]
