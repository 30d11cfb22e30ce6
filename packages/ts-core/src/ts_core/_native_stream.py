"""A plain pass through host memory, to compare updates of the same bytes with."""

from __future__ import annotations

from collections.abc import Sequence

from ts_core._native import load
from ts_core._native_args import address, integer


def stream_memory(
    regions: Sequence[tuple[int, int, bool]],
    *,
    parts: int,
    parts_per_turn: int = 1,
    threads: int = 0,
    flip: int = 0,
) -> None:
    """Goes once through all regions on several threads, with the SIMD level in use.

    Args:
        regions: (address, bytes, written) of each. Written ones are read and written back, the
            others only read.
        parts: equal parts that each region is cut into; parts of about 1 KiB are fastest.
        parts_per_turn: consecutive parts that a thread takes at once: the first of each region,
            one region after the other, then the second of each.
        threads: 0 for all usable cores; never more than those.
        flip: 0 writes every byte back as it was; another number, 1 to 255, exclusive-ors it in.

    Raises:
        ValueError: a null pointer with bytes > 0, a negative size, no part.
    """
    load().stream_memory(
        [
            (address("address", at), integer("bytes", size), written)
            for at, size, written in regions
        ],
        integer("parts", parts),
        integer("parts_per_turn", parts_per_turn),
        integer("threads", threads),
        flip,
    )
