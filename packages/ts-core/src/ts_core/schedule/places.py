"""Where in the stack: the blocks that stream, and those that are treated differently from the rest.

Pure functions over indices.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

# A stretch of resident blocks costs as the square of its width: the link runs ahead by as many
# blocks as there are slots, and stands still in what is wider. At the ends it cannot run ahead.
# Beyond the last paged block, and before the first, there is nothing to load at all; and a pass
# that begins or ends finds no more than the slots hold. And stretches that are a little wide add up
# where several follow each other, which shows in how far a place is from that of an even row. The
# weights are those with which simulated steps of 28 to 64 blocks took least (`test_paged_places`).
_OUTSIDE = 6.0
_NEAR_AN_END = 1.25
_OUT_OF_ROW = 0.3


def spread(count: int, total: int) -> tuple[int, ...]:
    """`count` of `total` indices (all when `count` is more), one in the middle of each stretch."""
    count = min(count, total)
    return tuple((2 * k + 1) * total // (2 * count) for k in range(count))


def inner(count: int, total: int) -> tuple[int, ...]:
    """`count` of `total` indices in the middle; of those at the ends one more at the last, if any.

    For blocks that are recomputed while others stream: what takes longer is done where the link
    has something to load meanwhile, which at both ends of a stack it has not.
    """
    first = (total - count) // 2
    return tuple(range(first, first + count))


def repage(current: Sequence[int], candidates: Sequence[int], count: int) -> tuple[int, ...]:
    """`count` of `candidates` to page, spread evenly, with as few changes from `current` as can be.

    Blocks only come, or only go. Stretches of resident blocks are narrower at both ends, where the
    link would stand still while they are computed: those outside the first and the last paged
    block most of all, and the two next to them.
    """
    rank = {index: place for place, index in enumerate(candidates)}
    paged = sorted(rank[index] for index in set(current) & set(candidates))
    total = len(candidates)
    count = min(count, total)
    if count <= len(paged):
        places = _cheapest(paged, (), count, total)
    else:
        places = _cheapest(range(total), paged, count, total)
    return tuple(candidates[place] for place in places)


def _cheapest(
    allowed: Sequence[int], needed: Sequence[int], count: int, total: int
) -> tuple[int, ...]:
    """`count` of the `allowed` places of `total`, all `needed` ones among them, that cost least."""
    if count == 0:
        return ()
    passed = [0, *itertools.accumulate(place in set(needed) for place in range(total))]
    # Per allowed place: the least that the places so far can cost, of which it is the last.
    costs = [math.inf if passed[place] else _outside(place) for place in allowed]
    apart = (total - 1) / max(1, count - 1)
    choices: list[list[int]] = []
    for number in range(1, count):
        near = number <= 2 or number >= count - 2
        costs, chosen = _next_costs(allowed, passed, costs, _NEAR_AN_END if near else 1.0)
        for k, place in enumerate(allowed):
            costs[k] += _OUT_OF_ROW * (place - number * apart) ** 2
        choices.append(chosen)
    for k, place in enumerate(allowed):
        costs[k] += math.inf if passed[total] > passed[place + 1] else _outside(total - 1 - place)
    k = costs.index(min(costs))
    found = [allowed[k]]
    for chosen in reversed(choices):
        k = chosen[k]
        found.append(allowed[k])
    return tuple(reversed(found))


def _outside(blocks: int) -> float:
    return _OUTSIDE * (blocks + 0.5) ** 2


def _next_costs(
    allowed: Sequence[int], passed: Sequence[int], costs: Sequence[float], weight: float
) -> tuple[list[float], list[int]]:
    """With one place more: what it costs to end at each, and the place before it."""
    found, chosen = [math.inf] * len(allowed), [0] * len(allowed)
    for after, place in enumerate(allowed):
        for before in range(after - 1, -1, -1):
            stretch = weight * (place - allowed[before]) ** 2
            if stretch >= found[after] or passed[place] > passed[allowed[before] + 1]:
                break  # it costs too much, or leaves out one that is needed
            if costs[before] + stretch < found[after]:
                found[after], chosen[after] = costs[before] + stretch, before
    return found, chosen
