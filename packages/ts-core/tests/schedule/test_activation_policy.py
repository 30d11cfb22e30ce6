"""The activation policy as a table, without a model or a device."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from ts_core.schedule.activation_policy import (
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    ActivationLimits,
    BlockActivations,
    decide,
    extra_device_bytes,
    halve_pages,
    least_extra_bytes,
    offload_named,
    ram_floor,
    ram_room,
    recompute_named,
)

GIB = 1 << 30
BLOCK = BlockActivations(saved=100, pageable=90, boundary=10)
LETTER = {KEEP: "k", OFFLOAD: "o", RECOMPUTE: "r"}


def modes(
    offload: Any,
    recompute: Any,
    room: int | None,
    ram: int = 10**6,
    share: float = 0.0,
    count: int = 6,
    streams: bool = False,
) -> str:
    limits = ActivationLimits(room, ram, prefetch_depth=1, inflight=0)
    policy = decide([BLOCK] * count, limits, offload, recompute, share, streams)
    return "".join(LETTER[mode] for mode in policy.modes)


@pytest.mark.parametrize(
    ("offload", "recompute", "room", "ram", "wanted"),
    [
        # Everything stays when it fits: 6 x (100 - 10) beyond the recomputed step.
        ("auto", "auto", None, 10**6, "kkkkkk"),
        ("auto", "auto", 540, 10**6, "kkkkkk"),
        # One block less: a page holds 10 on the device (its unpageable part), as recompute would.
        ("auto", "auto", 539, 10**6, "kkokkk"),
        ("auto", "auto", 360, 10**6, "kokokk"),
        # All but the last paged; what is fetched ahead in backward needs a block's room.
        ("auto", "auto", 90, 10**6, "oooook"),
        # RAM for two pages only: the others are recomputed.
        ("auto", "auto", 90, 180, "orrork"),
        ("auto", "auto", 90, 0, "rrrrrk"),
        ("auto", "auto", 0, 0, "rrrrrr"),
        # No recomputation: paged as far as RAM goes, the rest stays.
        ("auto", False, 90, 10**6, "oooook"),
        ("auto", False, 0, 180, "kokokk"),
        # No paging.
        (False, "auto", 100, 10**6, "rrrrrk"),
        (False, False, 0, 10**6, "kkkkkk"),
        # Explicit: as asked, whatever the room.
        (True, "auto", None, 10**6, "oooook"),
        (True, False, 0, 10**6, "oooook"),
        (0.5, False, None, 10**6, "okokok"),
        (1.0, False, None, 10**6, "oooook"),
        (0, False, None, 10**6, "kkkkkk"),
        (False, True, None, 10**6, "rrrrrr"),
        (False, 0.5, None, 10**6, "krkrkr"),
        (False, (0, 2), None, 10**6, "rkrkkk"),
        (True, (0, 2), None, 10**6, "rorook"),
        # Explicit pages that RAM cannot hold are recomputed, or stay where that was forbidden.
        (True, "auto", None, 270, "orrook"),
        (True, False, None, 450 - 90, "ookook"),
    ],
)
def test_table(offload: Any, recompute: Any, room: int | None, ram: int, wanted: str) -> None:
    assert modes(offload, recompute, room, ram) == wanted


@pytest.mark.parametrize(
    ("offload", "recompute", "room", "share", "wanted"),
    [
        # The ends are kept: the last, the first, the last but one.
        (False, "auto", 500, 0.0, "kkrkkk"),
        (False, "auto", 400, 0.0, "kkrrkk"),
        (False, "auto", 300, 0.0, "krrrkk"),
        (False, "auto", 200, 0.0, "krrrrk"),
        (False, "auto", 100, 0.0, "rrrrrk"),
        (False, "auto", 0, 0.0, "rrrrrr"),
        (False, "auto", None, 0.0, "kkkkkk"),
        # All that could be paged are recomputed.
        ("auto", "auto", 300, 1.0, "krrrkk"),
        # Where some are paged, or what is recomputed was said, they are where they are otherwise.
        ("auto", "auto", 300, 0.0, "okokok"),
        ("auto", False, 300, 0.0, "okokok"),
        (False, 0.5, None, 0.0, "krkrkr"),
        (False, (0, 5), None, 0.0, "rkkkkr"),
    ],
)
def test_beside_blocks_that_stream_those_at_the_ends_keep_their_activations(
    offload: Any, recompute: Any, room: int | None, share: float, wanted: str
) -> None:
    assert modes(offload, recompute, room, share=share, streams=True) == wanted
    resident = modes(offload, recompute, room, share=share)
    assert [resident.count(letter) for letter in "kor"] == [wanted.count(x) for x in "kor"]
    if offload is False and recompute == "auto" and room == 300:
        assert resident == "rkrkrk"


def test_share_of_recomputed_blocks() -> None:
    found = [modes("auto", "auto", 90, share=share) for share in (0.0, 0.5, 1.0)]
    assert [text.count("r") for text in found] == sorted(text.count("r") for text in found)
    assert found[-1].count("o") == 0
    # A recomputed block needs no room for pages fetched ahead, so one more can stay.
    assert found[-1].count("k") >= found[0].count("k")


def test_both_options_name_a_block() -> None:
    policy = decide([BLOCK] * 4, ActivationLimits(None, 10**6), True, (1,))
    assert policy.modes == (OFFLOAD, RECOMPUTE, OFFLOAD, KEEP)
    assert "both name block 1" in policy.reasons[0]


def test_shortfall_is_said() -> None:
    policy = decide([BLOCK] * 4, ActivationLimits(-50, 10**6), "auto", "auto")
    assert policy.shortfall > 0
    assert "short" in policy.reasons[-1]


def test_no_decision_is_over_its_limits_when_one_within_exists() -> None:
    """Recomputing everything always fits a room of 0, so no auto policy may exceed it."""
    blocks = [BlockActivations(50 + 13 * k % 70, 40, 5 + k) for k in range(9)]
    for room in range(0, 900, 7):
        for ram in (0, 60, 200, 10**6):
            limits = ActivationLimits(room, ram, prefetch_depth=2, inflight=64)
            for share in (0.0, 0.3, 1.0):
                policy = decide(blocks, limits, "auto", "auto", share, streams=room % 2 == 0)
                assert policy.shortfall == 0
                assert extra_device_bytes(blocks, policy.modes, limits) <= room
                assert policy.ram_bytes <= ram


def test_peak_counts_pages_fetched_ahead_and_in_flight() -> None:
    blocks = [BLOCK] * 4
    paged = [OFFLOAD] * 3 + [KEEP]
    assert extra_device_bytes(blocks, paged, ActivationLimits(None, 0, 1, 0)) == 90
    assert extra_device_bytes(blocks, paged, ActivationLimits(None, 0, 2, 0)) == 180
    assert extra_device_bytes(blocks, paged, ActivationLimits(None, 0, 1, 50)) == 140
    assert extra_device_bytes(blocks, [RECOMPUTE] * 4, ActivationLimits(None, 0)) == 0
    assert extra_device_bytes(blocks, [KEEP] * 4, ActivationLimits(None, 0)) == 360


def simulated(
    blocks: list[BlockActivations], how: Sequence[str], limits: ActivationLimits, loss: int
) -> int:
    """Peak of a step, with the temporary memory of the loss: what is held, event by event."""
    end = [
        b.saved if mode == KEEP else b.saved - b.pageable if mode == OFFLOAD else b.boundary
        for b, mode in zip(blocks, how, strict=True)
    ]
    peak = sum(end) + loss
    for k, block in enumerate(blocks):
        ahead = [b.pageable for b, mode in zip(blocks[:k], how, strict=False) if mode == OFFLOAD]
        depth = limits.prefetch_depth
        peak = max(
            peak, sum(end[:k]) + sum(ahead[len(ahead) - min(depth, len(ahead)) :]) + block.saved
        )
    return peak


def test_room_is_not_counted_that_a_measured_step_did_not_leave() -> None:
    """A probe that pages all takes less than recomputing all would: the room is less by that."""
    draw = random.Random(1)
    below = 0
    for _ in range(300):
        blocks = []
        for _ in range(draw.randint(1, 6)):
            saved = draw.randint(20, 99)
            pageable = draw.randint(0, saved)
            blocks.append(BlockActivations(saved, pageable, draw.randint(0, min(saved, 20))))
        limits = ActivationLimits(None, 0, draw.randint(1, 2), 0)
        loss = draw.choice([0, 10, 100])
        how = [draw.choice([KEEP, OFFLOAD, RECOMPUTE]) for _ in blocks]
        least = least_extra_bytes(blocks, how, limits)
        every = simulated(blocks, [RECOMPUTE] * len(blocks), limits, loss)
        assert simulated(blocks, how, limits, loss) - every >= least
        below += least < 0
    assert below > 30
    assert least_extra_bytes([BLOCK] * 4, [RECOMPUTE] * 4, ActivationLimits(None, 0)) == 0
    assert least_extra_bytes([BLOCK] * 4, [KEEP] * 4, ActivationLimits(None, 0)) == 270


@pytest.mark.parametrize(
    ("available", "physical", "growth", "wanted"),
    [
        (100 * GIB, 128 * GIB, 0, 60 * GIB),  # 60 %
        (100 * GIB, 128 * GIB, 50 * GIB, 30 * GIB),
        (20 * GIB, 128 * GIB, 0, int(7.2 * GIB)),  # a tenth of all RAM stays
        (6 * GIB, 16 * GIB, 0, 2 * GIB),  # 4 GiB stay
        (3 * GIB, 16 * GIB, 0, 0),
    ],
)
def test_ram_room(available: int, physical: int, growth: int, wanted: int) -> None:
    assert abs(ram_room(available, physical, growth) - wanted) <= 1
    assert ram_floor(16 * GIB) == 4 * GIB and ram_floor(100 * GIB) == 10 * GIB


def test_names() -> None:
    assert offload_named(True, 4) == (0, 1, 2)
    assert offload_named(0.01, 4) == (1,)
    assert offload_named("auto", 4) == () == offload_named(False, 4) == offload_named(0.0, 4)
    assert offload_named(True, 1) == ()
    assert recompute_named(True, 3) == (0, 1, 2)
    assert recompute_named([2, 0, 2], 3) == (0, 2)
    assert recompute_named(0.34, 3) == (0, 2)


def test_halving_ends() -> None:
    policy = decide([BLOCK] * 9, ActivationLimits(None, 10**6), True, False)
    counts = []
    while policy.blocks(OFFLOAD):
        counts.append(len(policy.blocks(OFFLOAD)))
        policy = halve_pages(policy)
    assert counts == [8, 4, 2, 1]
    assert policy.modes == (RECOMPUTE,) * 8 + (KEEP,)
