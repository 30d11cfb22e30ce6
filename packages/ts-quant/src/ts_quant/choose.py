"""Spend extra bytes where they take away the most error.

Each matrix offers choices, the first being how it is stored anyway; another choice costs extra
bytes and leaves less error. `choose` minimizes the sum of the errors left within a byte budget.

Only choices on the lower convex hull of (bytes, error) of their matrix can be worth taking, and
along the hull each further byte buys less. Taking hull steps in the order of error removed per
byte is therefore the optimum of the relaxed problem (Sinha and Zoltners 1979), short by at most
one step; steps that no longer fit are passed over for smaller ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ts_quant.errors import OptionError


@dataclass(frozen=True)
class Choice:
    """One way to store a matrix.

    Attributes:
        label: what it is, in a word or two.
        extra_bytes: bytes beyond the matrix's first choice (which has 0).
        error: squared error it leaves, in the unit that errors are summed in.
    """

    label: str
    extra_bytes: int
    error: float


C = TypeVar("C", bound=Choice)


def choose(options: Mapping[str, Sequence[C]], budget_bytes: int) -> dict[str, C]:
    """The choice for each matrix that leaves the least error in all, within the budget.

    Args:
        options: by matrix, its choices; the first costs no extra bytes.
        budget_bytes: extra bytes for all matrices together.

    Returns:
        One choice for every matrix. The same input gives the same choice (ties go to the matrix
        listed first).

    Raises:
        OptionError: no choice for a matrix, a first one that costs bytes, or a negative budget.
    """
    if budget_bytes < 0:
        raise OptionError(f"budget_bytes={budget_bytes} is not accepted: it must not be negative")
    hulls = {name: _hull(name, choices) for name, choices in options.items()}
    place = dict.fromkeys(hulls, 0)
    names = list(hulls)
    heap = [
        (-_gain_per_byte(hull[0], hull[1]), index)
        for index, hull in enumerate(hulls.values())
        if len(hull) > 1
    ]
    heapq.heapify(heap)
    left = budget_bytes
    while heap:
        _, index = heapq.heappop(heap)
        name = names[index]
        hull, at = hulls[name], place[name]
        cost = hull[at + 1].extra_bytes - hull[at].extra_bytes
        if cost > left:
            continue  # the next ones along this hull cost more still
        left -= cost
        place[name] = at + 1
        if at + 2 < len(hull):
            heapq.heappush(heap, (-_gain_per_byte(hull[at + 1], hull[at + 2]), index))
    return {name: hulls[name][place[name]] for name in names}


def _hull(name: str, choices: Sequence[C]) -> list[C]:
    """The choices worth taking, by rising bytes and falling gain per byte."""
    if not choices:
        raise OptionError(f"matrix {name!r} has no choice")
    if choices[0].extra_bytes != 0:
        raise OptionError(
            f"matrix {name!r}: the first choice ({choices[0].label}) must cost no extra bytes, "
            f"not {choices[0].extra_bytes}"
        )
    hull: list[C] = []
    for choice in sorted(choices, key=lambda item: (item.extra_bytes, item.error)):
        if hull and choice.error >= hull[-1].error:
            continue
        while len(hull) >= 2 and _gain_per_byte(hull[-2], hull[-1]) <= _gain_per_byte(
            hull[-2], choice
        ):
            hull.pop()
        if hull and hull[-1].extra_bytes == choice.extra_bytes:
            continue
        hull.append(choice)
    return hull


def _gain_per_byte(one: Choice, other: Choice) -> float:
    return (one.error - other.error) / max(other.extra_bytes - one.extra_bytes, 1)
