"""Which blocks keep their activations on the device, page them to host memory, or recompute them.

Pure functions over plain data; all sizes in bytes. Device memory is counted beyond what a step
needs with every block recomputed, since that is what the probe step measures: its peak holds each
block's inputs, one block's own activations and everything outside the blocks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ts_core.schedule.places import inner, spread
from ts_core.schedule.plan import KEEP, OFFLOAD, RECOMPUTE, human

RAM_SHARE = 0.60
RAM_FREE_SHARE = 0.10
RAM_FREE_BYTES = 4 << 30


@dataclass(frozen=True)
class BlockActivations:
    """What autograd holds for one block's backward.

    Attributes:
        saved: when its activations stay on the device.
        pageable: the part of `saved` that can go to host memory.
        boundary: when the block is recomputed: its inputs.
    """

    saved: int
    pageable: int
    boundary: int


@dataclass(frozen=True)
class ActivationLimits:
    """Room for activations.

    Attributes:
        device_room: device memory beyond a step that recomputes every block; None: unbounded.
        ram_room: host memory for pages.
        prefetch_depth: paged blocks fetched ahead in backward.
        inflight: the most bytes of pages still crossing the link at once.
    """

    device_room: int | None
    ram_room: int
    prefetch_depth: int = 1
    inflight: int = 1 << 30


@dataclass(frozen=True)
class ActivationPolicy:
    """The decision.

    Attributes:
        modes: per block "keep", "offload" or "recompute".
        device_bytes: device memory beyond a step that recomputes every block, at its peak.
        ram_bytes: host memory of the pages.
        shortfall: bytes over the device's room (0 when it fits).
        reasons: in plain words.
    """

    modes: tuple[str, ...]
    device_bytes: int = 0
    ram_bytes: int = 0
    shortfall: int = 0
    reasons: tuple[str, ...] = ()

    def blocks(self, mode: str) -> tuple[int, ...]:
        """Indices of the blocks that have `mode`."""
        return tuple(index for index, other in enumerate(self.modes) if other == mode)


def ram_floor(physical: int) -> int:
    """Available RAM that paging always leaves: a tenth of all, at least 4 GiB."""
    return max(int(RAM_FREE_SHARE * physical), RAM_FREE_BYTES)


def ram_room(available: int, physical: int, arena_growth: int = 0) -> int:
    """Host memory that pages may take.

    Args:
        available: RAM that can be taken now without swapping.
        physical: all RAM of this process's machine or container.
        arena_growth: bytes that other users of the host arena will still take.
    """
    left = available - arena_growth
    return max(0, min(int(RAM_SHARE * left), left - ram_floor(physical)))


def extra_device_bytes(
    blocks: Sequence[BlockActivations], modes: Sequence[str], limits: ActivationLimits
) -> int:
    """Peak device memory of `modes` beyond that of a step that recomputes every block.

    The peak is at the end of forward (what every block holds, and pages still on their way out),
    or when a block runs backward beside what earlier blocks hold and the pages fetched ahead. 0
    where both are less than recomputing every block takes.
    """
    held, paged = _held_and_paged(blocks, modes)
    peak = max(0, sum(held) + min(limits.inflight, sum(paged)))
    for before, ahead in _in_backward(held, paged, limits):
        peak = max(peak, before + ahead)
    return peak


def least_extra_bytes(
    blocks: Sequence[BlockActivations], modes: Sequence[str], limits: ActivationLimits
) -> int:
    """The least that the peak of `modes` is beyond that of a step that recomputes every block.

    Below 0 where pages save more than recomputing does. It is for a peak that was measured under
    `modes`: counting too much here would take for room what that step did not leave free. Both
    peaks may be that of the loss or that of some backward, and no page may be on its way out.
    """
    if not blocks:
        return 0
    held, paged = _held_and_paged(blocks, modes)
    most = max(block.saved - block.boundary for block in blocks)
    later = sum(block.boundary for block in blocks)
    in_backward = []
    for (before, ahead), block in zip(_in_backward(held, paged, limits), blocks, strict=True):
        later -= block.boundary  # that recomputing every block still holds at its own peak
        own = block.saved - block.boundary
        in_backward.append(before + ahead - later + own - most)
    return min(sum(held), max(in_backward))


def _held_and_paged(
    blocks: Sequence[BlockActivations], modes: Sequence[str]
) -> tuple[list[int], list[int]]:
    """Per block, what it holds beyond its inputs when forward has ended, and what it pages."""
    pairs = list(zip(blocks, modes, strict=True))
    held = [_held(block, mode) - block.boundary for block, mode in pairs]
    return held, [block.pageable if mode == OFFLOAD else 0 for block, mode in pairs]


def _in_backward(
    held: Sequence[int], paged: Sequence[int], limits: ActivationLimits
) -> Iterator[tuple[int, int]]:
    """Per block, in its backward: what earlier blocks hold, and the pages fetched ahead."""
    before = 0
    nearest: deque[int] = deque(maxlen=limits.prefetch_depth)  # paged blocks fetched ahead
    for extra, size in zip(held, paged, strict=True):
        yield before, sum(nearest)
        before += extra
        if size:
            nearest.append(size)


def decide(
    blocks: Sequence[BlockActivations],
    limits: ActivationLimits,
    offload: str | bool | float = "auto",
    recompute: str | bool | float | tuple[int, ...] = "auto",
    recompute_share: float = 0.0,
    streams: bool = False,
) -> ActivationPolicy:
    """The policy under `limits`.

    Blocks named by an explicit option get what it says; recompute wins where both name one. Of the
    others as many stay on the device as fit; the rest is paged as far as RAM allows and beyond
    that recomputed. Blocks that change are spread over the stack; those at its ends stay, where
    weights of blocks stream and none is paged (`inner`).

    Args:
        blocks: measured, in the order of the stack.
        limits: room on the device and in RAM.
        offload: wrap()'s activation_offload.
        recompute: wrap()'s recompute; indices as a tuple.
        recompute_share: of the blocks that "auto" would page, the share that is recomputed
            instead.
        streams: whether weights of blocks stream.
    """
    count = len(blocks)
    if count == 0:
        return ActivationPolicy(())
    named = {index: OFFLOAD for index in offload_named(offload, count)}
    named_recompute = recompute_named(recompute, count)
    notes = []
    both = sorted(set(named) & set(named_recompute))
    if both:
        notes.append(
            f"activation_offload and recompute both name {_listed(both)}: recompute is used there"
        )
    named.update((index, RECOMPUTE) for index in named_recompute)
    can_page = offload == "auto"
    can_recompute = recompute == "auto"
    free = [index for index in range(count - 1) if index not in named]
    if not (can_page or can_recompute):
        free = []
    places = [spread(moved, len(free)) for moved in range(len(free) + 1)]
    if streams and can_recompute and (not can_page or recompute_share >= 1.0):
        places = [inner(moved, len(free) + 1) for moved in range(len(free) + 1)]  # the last stays
    steps = [([free[k] for k in chosen], recompute_share) for chosen in places]
    if can_recompute:
        steps.append((free, 1.0))
        if count - 1 not in named:  # it is next in backward: only when nothing else is left
            steps.append(([*free, count - 1], 1.0))
    best: ActivationPolicy | None = None
    for chosen, share in steps:
        modes = [named.get(index, KEEP) for index in range(count)]
        pages = [index for index in chosen if can_page and index != count - 1]
        for index in chosen:
            modes[index] = OFFLOAD if index in pages else RECOMPUTE
        if can_recompute and pages:
            swap = math.ceil(share * len(pages))
            for k in spread(swap, len(pages)):
                modes[pages[k]] = RECOMPUTE
        _within_ram(blocks, modes, limits.ram_room, may_recompute=recompute is not False)
        policy = _evaluate(blocks, tuple(modes), limits)
        if policy.shortfall == 0:
            return _with_reasons(policy, limits, notes)
        if best is None or policy.shortfall < best.shortfall:
            best = policy
    assert best is not None
    return _with_reasons(best, limits, notes)


def offload_named(offload: str | bool | float, count: int) -> tuple[int, ...]:
    """Blocks that an explicit activation_offload pages: never the last, whose backward is next."""
    if isinstance(offload, str) or offload is False:
        return ()
    wanted = count - 1 if offload is True else min(math.ceil(offload * count), count - 1)
    return spread(wanted, count - 1) if wanted > 0 else ()


def recompute_named(recompute: str | bool | float | Sequence[int], count: int) -> tuple[int, ...]:
    """Blocks that an explicit `recompute` recomputes."""
    if isinstance(recompute, str) or recompute is False:
        return ()
    if recompute is True:
        return tuple(range(count))
    if isinstance(recompute, int | float):
        wanted = math.ceil(recompute * count)
        return spread(wanted, count) if wanted > 0 else ()
    return tuple(sorted(set(recompute)))


def halve_pages(policy: ActivationPolicy) -> ActivationPolicy:
    """Every second paged block recomputed (at least one), to give host memory back."""
    paged = policy.blocks(OFFLOAD)
    modes = list(policy.modes)
    for index in paged[::2]:
        modes[index] = RECOMPUTE
    return ActivationPolicy(tuple(modes), policy.device_bytes, policy.ram_bytes)


def _held(block: BlockActivations, mode: str) -> int:
    if mode == KEEP:
        return block.saved
    return block.saved - block.pageable if mode == OFFLOAD else block.boundary


def _within_ram(
    blocks: Sequence[BlockActivations], modes: list[str], room: int, may_recompute: bool
) -> None:
    """Take pages that RAM cannot hold out of `modes`, spread over the paged blocks."""
    paged = [index for index, mode in enumerate(modes) if mode == OFFLOAD]
    total = sum(blocks[index].pageable for index in paged)
    for index in _spread_order(paged):
        if total <= room:
            return
        modes[index] = RECOMPUTE if may_recompute else KEEP
        total -= blocks[index].pageable


def _spread_order(items: Sequence[int]) -> list[int]:
    """`items` so that every prefix is spread over them: the middle, the quarters, and so on."""
    order: list[int] = []
    pieces = [(0, len(items))]
    while pieces:
        low, high = pieces.pop(0)
        if low >= high:
            continue
        middle = (low + high) // 2
        order.append(items[middle])
        pieces += [(low, middle), (middle + 1, high)]
    return order


def _evaluate(
    blocks: Sequence[BlockActivations], modes: tuple[str, ...], limits: ActivationLimits
) -> ActivationPolicy:
    extra = extra_device_bytes(blocks, modes, limits)
    ram = sum(block.pageable for block, mode in zip(blocks, modes, strict=True) if mode == OFFLOAD)
    room = limits.device_room
    shortfall = 0 if room is None else max(0, extra - room)
    return ActivationPolicy(modes, extra, ram, shortfall)


def _with_reasons(
    policy: ActivationPolicy, limits: ActivationLimits, notes: Sequence[str]
) -> ActivationPolicy:
    room = limits.device_room
    where = "of unbounded device memory" if room is None else f"of {human(room)} of device memory"
    if room is not None and room < 0:
        where = "of device memory, of which none is left"
    counts = ", ".join(
        f"{len(policy.blocks(mode))} {word}"
        for mode, word in ((KEEP, "kept"), (OFFLOAD, "paged"), (RECOMPUTE, "recomputed"))
    )
    text = (
        f"activations of {len(policy.modes)} blocks: {counts}; {human(policy.device_bytes)} {where}"
    )
    if policy.ram_bytes:
        text += f" and {human(policy.ram_bytes)} of {human(limits.ram_room)} of RAM"
    if policy.shortfall:
        text += f"; {human(policy.shortfall)} short: use a smaller batch or shorter sequences"
    return ActivationPolicy(
        policy.modes,
        policy.device_bytes,
        policy.ram_bytes,
        policy.shortfall,
        (*notes, text),
    )


def _listed(indices: Sequence[int]) -> str:
    if len(indices) == 1:
        return f"block {indices[0]}"
    return "blocks " + ", ".join(str(index) for index in indices)
