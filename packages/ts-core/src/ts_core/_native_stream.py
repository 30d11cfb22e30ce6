"""A plain pass through host memory, to compare updates of the same bytes with."""

from __future__ import annotations

from collections.abc import Sequence

from ts_core._native import load
from ts_core._native_args import address, integer


def stream_memory(
    regions: Sequence[tuple[int, int, bool]], *, chunks: int, threads: int = 0, flip: int = 0
) -> None:
    """Goes once through all regions on several threads, with the SIMD level in use.

    Args:
        regions: (address, bytes, written) of each. Written ones are read and written back, the
            others only read.
        chunks: equal parts that each region is cut into. A thread takes a part of each region, one
            region after the other, then the next free part.
        threads: 0 for all usable cores; never more than those.
        flip: 0 writes every byte back as it was; another number, 1 to 255, exclusive-ors it in.

    Raises:
        ValueError: a null pointer with bytes > 0, a negative size, no chunk.
    """
    load().stream_memory(
        [
            (address("address", at), integer("bytes", size), written)
            for at, size, written in regions
        ],
        integer("chunks", chunks),
        integer("threads", threads),
        flip,
    )
