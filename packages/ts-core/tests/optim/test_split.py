"""The split between device memory, link and host threads, as a pure function."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ts_core.optim.pieces import Bytes, Piece
from ts_core.optim.rates import Rates
from ts_core.optim.split import _side_by_side, split

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


def pieces(*millions: float, low: bool = False) -> list[Piece]:
    return [Piece(int(m * MILLION), int(m * MILLION) * (2 if low else 4), low) for m in millions]


@pytest.mark.parametrize(
    ("millions", "room_mb", "expected"),
    [
        ((100, 50), 1200, {"resident": 2}),
        ((100, 50), 900, {"resident": 1, "zero_copy": 1}),  # 8.9 ms of link; host: 12.5
        ((100,) * 15, 3300, {"resident": 4, "host": 4, "zero_copy": 7}),
        ((100,) * 15, 0, {"host": 6, "zero_copy": 9}),
    ],
)
def test_split(millions: tuple[float, ...], room_mb: int, expected: dict[str, int]) -> None:
    found = split(pieces(*millions), RATES, room_mb * MILLION)
    assert {place: found.places.count(place) for place in set(found.places)} == expected


def test_sides_finish_together_and_sooner_than_either_alone() -> None:
    found = split(pieces(*[10] * 150), RATES, 0)
    assert abs(found.host_s - found.link_s) < 0.1 * found.host_s
    values = 150 * 10 * MILLION
    assert found.seconds < 0.95 * min(values / RATES.host, values * 8 / RATES.link)
    places = "".join(place[0] for place in found.places)
    assert "hhhh" not in places  # spread through the stack


def test_host_threads_may_go_on_beside_the_next_forward() -> None:
    many = pieces(*[10] * 150)
    equal, found = split(many, RATES, 0), split(many, RATES, 0, forward_s=0.08)
    assert found.link_s < equal.link_s and equal.host_s < found.host_s
    assert found.host_s - found.link_s == pytest.approx(0.08, abs=0.012)  # one piece: 4 ms
    assert found.seconds < equal.seconds
    # Where gradients wait for the end of backward, all updates are beside the forward or before it.
    waiting = [replace(piece, waits=True) for piece in many]
    room = sum(piece.device_bytes("zero_copy") for piece in waiting)
    without = split(waiting, RATES, room)
    assert split(waiting, RATES, room, forward_s=0.08) == without


def test_small_state_is_resident_and_the_rest_lies_throughout_the_stack() -> None:
    """Each bucket that is elsewhere takes Python as long, whatever its size."""
    stack = [piece for _ in range(20) for piece in pieces(2, 2, 14)]
    embedding = pieces(200)
    room = sum(p.state_bytes for p in [*stack, *embedding]) * 3 // 4
    found = split([*embedding, *stack], RATES, room)
    assert found.places[0] == "resident"
    by_size = {
        size: [place for p, place in zip(stack, found.places[1:], strict=True) if p == piece]
        for size, piece in ((2, pieces(2)[0]), (14, pieces(14)[0]))
    }
    assert set(by_size[2]) == {"resident"}
    large = "".join(place[0] for place in by_size[14])
    assert 5 < large.count("r") < 15 and "rrr" not in large
    assert max(len(run) for run in large.split("r")) <= 3


def test_host_threads_have_nothing_to_do_where_the_rest_is_hidden() -> None:
    many = pieces(*[10] * 150)
    room = sum(p.state_bytes for p in many) * 9 // 10
    waited_for, hidden = split(many, RATES, room), split(many, RATES, room, forward_s=0.1)
    assert {"host", "zero_copy"} <= set(waited_for.places)
    assert "host" not in hidden.places and hidden.seconds < 0.1
    assert hidden.places.count("resident") == waited_for.places.count("resident")


def test_a_slow_link_leaves_all_to_the_host_and_a_slow_host_all_to_the_link() -> None:
    many = pieces(*[10] * 20)
    assert set(split(many, Rates(4e9, 1e9), 0).places) == {"host"}
    assert set(split(many, Rates(1e7, 45e9), 0).places) == {"zero_copy"}


def test_other_copies_leave_less_of_the_link_to_updates() -> None:
    """1.5 G values; without others 45 GB/s beside the host take 60 % of them."""
    many = pieces(*[10] * 150)
    alone = split(many, RATES, 0)
    beside = split(many, RATES, 0, others=Bytes(4_000 * MILLION, 2_000 * MILLION))
    assert 0 < beside.places.count("zero_copy") < alone.places.count("zero_copy")
    assert alone.seconds < beside.seconds
    assert abs(beside.host_s - beside.link_s) < 0.1 * beside.host_s
    busy = split(many, RATES, 0, others=Bytes(100_000 * MILLION, 0))
    assert set(busy.places) == {"host"}
    # The busier direction decides: host threads need both, at 4 bytes a value each.
    back = Bytes(0, 4_000 * MILLION)
    assert split(many, RATES, 0, others=back) == split(many, RATES, 0, others=Bytes(*back[::-1]))


def test_weights_that_stream_are_the_last_that_the_device_updates() -> None:
    """Full 1.5B within 8 GB: a third of the weights stays, the rest streams (8 GB of loads)."""
    stays = pieces(233, *[47] * 6)
    streams = [replace(piece, paged=True) for piece in pieces(*[47] * 22)]
    mixed = [*stays[:4], *streams[:11], *stays[4:], *streams[11:]]
    rates = Rates(host=4.8e9, link=43e9)
    found = split(mixed, rates, 0, others=Bytes(7_900 * MILLION, 0))
    by_device = [p for p, at in zip(mixed, found.places, strict=True) if at == "zero_copy"]
    assert by_device and not any(piece.paged for piece in by_device)
    assert found.seconds < 0.35
    everywhere = split(mixed, Rates(host=1e7, link=43e9), 0)
    assert set(everywhere.places) == {"zero_copy"}
    room = split(mixed, rates, 8 * 47 * MILLION)  # the largest does not fit
    assert [mixed[k].paged for k, at in enumerate(room.places) if at == "resident"] == [False]


def test_what_only_the_host_can_reach_counts_as_its_share() -> None:
    half = pieces(*[10] * 100)
    bound = [
        replace(p, paged=True, host_only=True) if k % 4 == 0 else p for k, p in enumerate(half)
    ]
    free, found = split(half, RATES, 0), split(bound, RATES, 0)
    assert all(found.places[k] == "host" for k in range(0, 100, 4))
    assert abs(found.places.count("host") - free.places.count("host")) <= 4


@pytest.mark.parametrize(
    ("paged", "place", "copied", "moved"),
    [
        (False, "host", (4, 4), (4, 4)),
        (False, "zero_copy", (0, 0), (8, 8)),
        (False, "resident", (0, 0), (0, 0)),
        (True, "host", (0, 4), (0, 4)),  # new values are for the loads of the block
        (True, "zero_copy", (0, 4), (16, 16)),  # gradient out and in, weight and state in and out
        (True, "resident", (0, 4), (8, 8)),
    ],
)
def test_bytes_over_the_link(
    paged: bool, place: str, copied: tuple[int, int], moved: tuple[int, int]
) -> None:
    piece = Piece(1, 4, False, paged=paged)
    assert piece.copied_bytes(place) == copied
    assert piece.link_bytes(place) == moved


@pytest.mark.parametrize(
    ("alone", "together"),
    [
        ((1.0, 0.0), (1.0, 0.0)),
        ((0.0, 1.0), (0.0, 1.0)),
        ((0.0, 0.0), (0.0, 0.0)),
        ((0.65, 0.85), (1.0, 1.0)),  # both all the time
        # Host threads of an H200 machine: 285 ms alone, 366 ms beside 10 GB of copies.
        ((0.285, 0.2), (0.366, 0.235)),
    ],
)
def test_each_side_is_slower_while_the_other_works(
    alone: tuple[float, float], together: tuple[float, float]
) -> None:
    assert _side_by_side(*alone) == pytest.approx(together, abs=0.002)


def test_room_counts_master_copies() -> None:
    one = pieces(100, low=True)
    for room, resident in ((1200 * MILLION, True), (1200 * MILLION - 1, False)):
        assert (split(one, RATES, room).places == ("resident",)) == resident


def test_gradients_that_wait_take_room_beside_their_state() -> None:
    """100 M values: 800 MB of state, 400 MB of gradients where an update by the device waits."""
    waiting = [replace(piece, waits=True) for piece in pieces(*[100] * 4)]
    slow_host = Rates(host=1e6, link=45e9)

    def places(room_mb: int) -> str:
        return "".join(p[0] for p in sorted(split(waiting, slow_host, room_mb * MILLION).places))

    assert [places(room) for room in (0, 399, 400, 799, 800, 1199, 1200)] == [
        "hhhh",
        "hhhh",
        "hhhz",
        "hhhz",
        "hhzz",
        "hhzz",
        "hzzz",
    ]
    assert [places(room) for room in (2 * 1200, 3 * 1200)] == ["rzzz", "rrzz"]
    assert places(4 * 1200) == "rrrr"
    for room in range(0, 5000, 37):
        found = split(waiting, slow_host, room * MILLION)
        taken = sum(p.device_bytes(at) for p, at in zip(waiting, found.places, strict=True))
        assert taken <= room * MILLION


def test_room_is_left_to_gradients_where_updates_over_the_link_save_time() -> None:
    """1.5 G values, room for 1.1 G with gradients: beside 0.4 G on the host the link idles."""
    waiting = [replace(piece, waits=True) for piece in pieces(*[10] * 150)]
    rates = Rates(host=2.4e9, link=45e9)
    room = 1100 * 12 * MILLION
    found = split(waiting, rates, room)
    assert min(found.places.count("resident"), found.places.count("zero_copy")) > 10
    all_to_the_host = 400 * MILLION / rates.host
    assert found.seconds < 0.75 * all_to_the_host
    taken = sum(p.device_bytes(at) for p, at in zip(waiting, found.places, strict=True))
    assert taken <= room
    # Where none wait, state alone is worth the room.
    eager = split(pieces(*[10] * 150), rates, 1100 * 8 * MILLION)
    assert eager.places.count("resident") == 110
