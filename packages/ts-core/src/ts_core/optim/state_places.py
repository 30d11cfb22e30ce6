"""Where the state of an OffloadAdamW lies, and how much memory of the device it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ts_core.errors import StateError
from ts_core.optim.torch_state import TorchState
from ts_core.store.homes import TrainedHome


class PlacedState(TorchState):
    """State that moves between host and device, and what others of the device ask about it."""

    def place_state(self, places: Sequence[str]) -> None:
        """Move the state of each bucket, in order of `buckets`.

        Places are "host", "zero_copy", "resident" and "shared" (some as in resident, some as in
        zero_copy, the rest as in host; see `share_by`). Values are kept bit for bit. Between steps;
        waits for updates in flight.

        Raises:
            StateError: in the middle of a step.
            OptionError: a place that does not exist, or another number of them.
            OutOfBudgetError: device memory is full, or no more can be page-locked. Some buckets
                have been moved then; all have their state.
        """
        self.build()
        self._updates.refuse_mid_step("place_state()")
        self._updates.settle()
        for bucket in self._updates.buckets:
            self._hide_state(bucket)  # or it would keep the memory that state leaves
        try:
            self._updates.storage.move(self._updates.buckets, places)
        finally:
            for bucket in self._updates.buckets:
                self._show_state(bucket)

    def share_by(self, link_share: float, near_share: float = 0.0) -> None:
        """How a "shared" place divides its values from the next `place_state` on.

        Args:
            near_share: of all, those whose state is in device memory (0 to 1).
            link_share: of the others, those that the device updates over the link.
        """
        self._updates.storage.link_share = link_share
        self._updates.storage.near_share = near_share

    def set_homes(self, homes: Mapping[torch.nn.Parameter, TrainedHome]) -> None:
        """Trained weights have moved into host images of paged blocks, or out of them.

        Between steps; waits for updates in flight. Their state is kept bit for bit.

        Args:
            homes: of all weights that live in images now.

        Raises:
            StateError: in the middle of a step, or when state is on the device.
        """
        if homes and self._resident is not None:
            raise StateError(
                f"{len(homes)} trained weights are to stream, but their optimizer state is on the "
                f"device (make_resident). Make a new optimizer and load its state dict."
            )
        for bucket in self._updates.rehome(homes):
            self._show_state(bucket)

    def state_on_device(self) -> int:
        """Bytes of device memory that moments and master weights take."""
        return sum(bucket.place.device_bytes() for bucket in self._updates.buckets)

    def held_on_device(self) -> int:
        """Bytes of device memory that a step takes for state, and for gradients until its end."""
        if self._resident is not None:
            return int(self._resident.stats()["device_state_bytes"])
        return self._updates.device_bytes()

    def state_away(self) -> tuple[int, float] | None:
        """(bytes of state elsewhere that device memory would serve, seconds that it costs a step).

        None where state is not split between places, or all of it is on the device for good.
        """
        split = self._updates.split
        if split is None or self._resident is not None:
            return None
        return split.away(self._updates.buckets)

    def leave_room_for(self, apart: Callable[[], int]) -> None:
        """State leaves room for what `apart()` gives: bytes that no peak of a step shows yet."""
        self._updates.apart = apart

    def forward_takes(self, seconds: Callable[[], float]) -> None:
        """How long a forward takes at least, beside which host threads may go on with updates."""
        self._updates.forward_s = seconds
