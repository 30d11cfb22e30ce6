"""What the split of optimizer state knows of each bucket: sizes, and what a place costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple


class Bytes(NamedTuple):
    """Bytes over the link, in each direction."""

    to_device: int
    to_host: int

    def __add__(self, other: tuple[int, ...]) -> Bytes:  # type: ignore[override]
        return Bytes(self[0] + other[0], self[1] + other[1])


NOTHING = Bytes(0, 0)


@dataclass(frozen=True)
class Piece:
    """One bucket, for the split.

    Attributes:
        values: parameter values.
        param_bytes: of the parameter.
        has_master: whether there is an fp32 copy of it.
        paged: the parameter is in host memory: updates by the device read and write it there.
        host_only: the device cannot reach it there.
        waits: an update by the device finds its gradient in device memory at the end of backward,
            where it would have left for the host otherwise.
        passes: copies of its gradient in a step, where it leaves: one for each backward pass, but
            for parameters whose gradients leave together.
        link_share: whether the place "shared" is for it: for a large one whose gradient comes last,
            beside which nothing is left to do. Of its values there that are not in device memory,
            those that the device updates over the link. None: it is not shared.
        near_share: of its values in the place "shared", those whose state is in device memory.
    """

    values: int
    param_bytes: int
    has_master: bool
    paged: bool = False
    host_only: bool = False
    waits: bool = False
    passes: int = 1
    link_share: float | None = None
    near_share: float = 0.0

    @property
    def state_bytes(self) -> int:
        """fp32 state of the bucket, in bytes."""
        return self.values * (12 if self.has_master else 8)

    def device_bytes(self, place: str) -> int:
        """Device memory that this place takes for the whole of a step: of state, of gradients."""
        if place == "host":
            return 0
        waiting = self.param_bytes if self.waits and not self.paged else 0
        if place == "shared":
            return waiting + int(self.near_share * self.state_bytes)
        return waiting + (self.state_bytes if place == "resident" else 0)

    def copied_bytes(self, place: str) -> Bytes:
        """What is copied for an update in this place: new values, and gradients."""
        if place == "shared":
            return self._both(Piece.copied_bytes)
        to_device = self.param_bytes if place == "host" and not self.paged else 0
        leaves = place == "host" or self.paged
        return Bytes(to_device, self.passes * self.param_bytes if leaves else 0)

    def link_bytes(self, place: str) -> Bytes:
        """What is copied for an update in this place, or read and written by the device."""
        if place == "shared":
            return self._both(Piece.link_bytes)
        copied = self.copied_bytes(place)
        if place == "host":
            return copied
        state = 0 if place == "resident" else self.state_bytes
        # Paged: the weight is in host memory, and its gradient, which has left the device before.
        weight = self.param_bytes if self.paged else 0
        return Bytes(state + 2 * weight + copied.to_device, state + weight + copied.to_host)

    def host_values(self, place: str) -> int:
        """Values that host threads update."""
        if place == "shared":
            return int((1 - self.near_share) * (1 - self._share) * self.values)
        return self.values if place == "host" else 0

    @property
    def _share(self) -> float:
        return 0.5 if self.link_share is None else self.link_share

    def _both(self, count: Callable[[Piece, str], Bytes]) -> Bytes:
        alone = replace(self, passes=1)  # its gradients leave when all are there
        link, host = count(alone, "zero_copy"), count(alone, "host")
        share, far = self._share, 1 - self.near_share
        return Bytes(
            *(int(far * (share * a + (1 - share) * b)) for a, b in zip(link, host, strict=True))
        )
