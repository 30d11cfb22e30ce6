"""In which order the updates of a step are queued that waited for its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ts_core.optim.buckets import Bucket

LINK_AHEAD = 32
"""Buckets by which updates over the link come earlier. Queueing an update takes the host 0.1 to
0.3 ms, one over the link of 2 to 14 M values takes 0.5 to 2.5 ms, and a third of all is of that
kind, so the link has enough to do after the first few."""


def in_order(buckets: Sequence[Bucket]) -> list[Bucket]:
    """As the next forward reads them, the reverse of the order in which gradients came.

    Updates over the link come a little earlier: they bound a step's updates, and are not to wait
    until many of those in device memory, each soon done, have been queued.
    """
    by_forward = sorted(buckets, key=lambda bucket: -bucket.order)
    ahead = [LINK_AHEAD if bucket.place.over_link else 0 for bucket in by_forward]
    order = sorted(range(len(by_forward)), key=lambda index: index - ahead[index])
    return [by_forward[index] for index in order]
