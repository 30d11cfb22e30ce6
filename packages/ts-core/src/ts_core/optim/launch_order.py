"""In which order the updates of a step are queued that waited for its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ts_core.optim import read_guard

if TYPE_CHECKING:
    from ts_core.optim.buckets import Bucket

LINK_AHEAD = 32
"""Buckets by which updates over the link come earlier. Queueing an update takes the host 0.1 to
0.3 ms, one over the link of 2 to 14 M values takes 0.5 to 2.5 ms, and a third of all is of that
kind, so the link has enough to do after the first few."""

TOGETHER = 16
"""Buckets in device memory whose updates are queued as one, at most: about two blocks, which the
device updates in less than a millisecond, so the next forward does not wait for what it needs
later."""


def in_order(buckets: Sequence[Bucket]) -> list[Bucket]:
    """As the next forward reads them, the reverse of the order in which gradients came.

    Updates over the link come a little earlier: they bound a step's updates, and are not to wait
    until many of those in device memory, each soon done, have been queued.
    """
    by_forward = sorted(buckets, key=lambda bucket: -bucket.order)
    ahead = [LINK_AHEAD if bucket.place.over_link else 0 for bucket in by_forward]
    order = sorted(range(len(by_forward)), key=lambda index: index - ahead[index])
    return [by_forward[index] for index in order]


def together(buckets: Sequence[Bucket], limit_bytes: int) -> list[list[Bucket]]:
    """What is queued as one: neighbours in device memory, which are soon done, a few at a time.

    Args:
        buckets: in their order, which stays among those that the device updates. Between these,
            those of host threads have an order of their own.
        limit_bytes: of the gradients of several, at most: they are freed together.
    """
    found: list[list[Bucket]] = []
    open_group: list[Bucket] = []
    size_bytes = 0
    for bucket in buckets:
        if not _joins(bucket):
            found.append([bucket])
            if bucket.place.on_device:
                open_group = []
            continue
        size_bytes += bucket.gradient_bytes
        if not open_group or len(open_group) == TOGETHER or size_bytes > limit_bytes:
            open_group, size_bytes = [], bucket.gradient_bytes
            found.append(open_group)
        open_group.append(bucket)
    return found


def _joins(bucket: Bucket) -> bool:
    in_device_memory = bucket.place.name == "resident" and bucket.home is None
    return in_device_memory and read_guard.can_guard(bucket.params)
