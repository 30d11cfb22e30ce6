"""A ring of device buffers at fixed addresses, through which block images pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ts_core.device.base import Device, Event
from ts_core.transfer.pending import PendingCopy


@dataclass
class Slot:
    """One device buffer and what is in it.

    Attributes:
        index: position in the ring.
        buffer: uint8 [size], its address fixed for the slot's life.
        ready: event of the copy that filled it, on the copy stream; a `PendingCopy` while another
            thread queues it.
        waited: whether the compute stream already waits for `ready`.
        last_use: counter of the last time it was entered or filled (for eviction).
    """

    index: int
    buffer: torch.Tensor
    ready: Event | None = None
    waited: bool = False
    last_use: int = 0

    def stop_filling(self) -> None:
        """Nothing more is queued into the slot by another thread once this returns."""
        if isinstance(self.ready, PendingCopy):
            self.ready.cancel()


class SlotRing:
    """`count` slots of `slot_bytes` each, accounted in the device's pool.

    Raises:
        OutOfBudgetError: the pool's limit cannot hold them.
    """

    def __init__(self, device: Device, slot_bytes: int, count: int) -> None:
        self.slot_bytes = slot_bytes
        self._reservation = device.pool.reserve(slot_bytes * count, "slots")
        try:
            self.slots = [Slot(index, device.allocate(slot_bytes)) for index in range(count)]
        except BaseException:
            self._reservation.release()
            raise
        self._by_address = {slot.buffer.untyped_storage().data_ptr(): slot for slot in self.slots}

    def slot_of(self, tensor: torch.Tensor) -> Slot | None:
        """The slot whose memory `tensor` views, if any."""
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return None  # of a transform (vmap, say), without memory
        return self._by_address.get(tensor.untyped_storage().data_ptr())

    def close(self) -> None:
        """Give the memory back; no view of a slot may be used afterwards."""
        self.slots.clear()
        self._by_address.clear()
        self._reservation.release()
