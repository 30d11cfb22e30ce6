"""Room for activations: on the device under its target, and in host memory for pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ts_core.engine.activation_options import ActivationOptions
from ts_core.engine.host_buffers import HostBuffers
from ts_core.memory.arena import PinnedArena, default_arena
from ts_core.memory.ram import ram_available_bytes, ram_limit_bytes
from ts_core.memory.ram_floor import RamFloor
from ts_core.schedule.activation_policy import (
    ActivationLimits,
    BlockActivations,
    least_extra_bytes,
    ram_floor,
    ram_room,
)
from ts_core.schedule.plan import RECORDED_BLOCKS, human
from ts_core.transfer import CopyEngine

# Streams beside the caller's on which recordings multiply: to warm up, and to capture.
_RECORDING_STREAMS = 2


class ActivationMemory:
    """Reads the room there is, and holds the host buffers of pages.

    Args:
        copies: the engine whose streams carry pages.
        options: what was asked for.
        arena: host memory; the process's own by default.
        read_ram: gives available RAM in bytes; that of the system by default.

    Attributes:
        buffers: of pages.
        floor: the watch on available RAM.
        low: available RAM as it was found under the floor; None while it is not.
        for_recordings: device memory that recordings are expected to take, but for what backward
            needs; 0 until blocks have been measured, and where they are not replayed.
        for_state: gives the device memory that optimizer state is still to take.
        recorded: gives the device memory that recordings hold by now, but for what backward needs.
        hidden: gives the part of it that torch counts as free, though nobody else may have it.
        all_recorded: whether no more are made, so that they take no more than they hold.
    """

    def __init__(
        self,
        copies: CopyEngine,
        options: ActivationOptions,
        arena: PinnedArena | None = None,
        read_ram: Callable[[], int] | None = None,
    ) -> None:
        self._copies = copies
        self._device = copies.device
        self._options = options
        self._arena = arena or default_arena()
        self._read_ram = read_ram or ram_available_bytes
        self.buffers = HostBuffers(self._arena)
        self.floor = RamFloor(ram_floor(ram_limit_bytes()), self._is_low, read=self._read_ram)
        self.low: int | None = None
        self.recorded: Callable[[], int] = lambda: 0
        self.hidden: Callable[[], int] = lambda: 0
        self.all_recorded: Callable[[], bool] = lambda: False
        self.for_state: Callable[[], int] = lambda: 0
        self.for_recordings = 0
        self._replayed = options.replayed

    @property
    def apart(self) -> int:
        """Device memory that no peak so far shows: what recordings will still take.

        It is for their temporary tensors, and for torch's workspaces on their streams. Known once
        blocks have been measured.
        """
        if not self.for_recordings or self.all_recorded():
            return 0
        held = self.recorded()
        if held:  # then those of the stream that warms up are there; others are part of `held`
            held += self._device.workspace_bytes()
        return max(0, self.for_recordings - held)

    def set_apart(self, measured: Sequence[BlockActivations], gradients: int) -> None:
        """Leave room for recordings, where blocks are replayed.

        Args:
            measured: per block.
            gradients: the most bytes of weight gradients of a block.
        """
        if self._replayed:
            most = max((block.saved for block in measured), default=0)
            workspaces = _RECORDING_STREAMS * self._device.workspace_bytes()
            self.for_recordings = RECORDED_BLOCKS * (most + gradients) + workspaces

    def no_room_for_recordings(self) -> str | None:
        """Whether steps leave too little of the device's memory for recordings.

        To be asked before the first is made. What they take may be half of the headroom.

        Returns:
            Why, in words; None if there is enough.
        """
        usable = self._device.usable_bytes()
        if usable is None or not self._device.separate_memory:
            return None
        peak, wanted = self._device.memory()["peak_allocated"], self.apart
        if peak + wanted <= usable * (1 - self._options.headroom / 2):
            return None
        return (
            f"recordings would take {human(wanted)}, and a step takes {human(peak)} of "
            f"{human(usable)}"
        )

    def give_up_recordings(self) -> None:
        """Expect none from now on."""
        self._replayed = False
        self.for_recordings = 0

    def limits(self, device_room: int | None) -> ActivationLimits:
        """For `decide`, with this much room on the device."""
        return ActivationLimits(
            device_room,
            self.ram_room(),
            self._options.prefetch_depth,
            self._copies.max_leaving_bytes,
        )

    def ram_room(self) -> int:
        """Host memory that pages may take, with what they have."""
        arena = self._arena.stats()
        locked_and_free = max(0, arena["arena_pinned"] - arena["arena_used"])
        mine = self.buffers.held_bytes + locked_and_free
        return ram_room(self._read_ram() + mine, ram_limit_bytes())

    def device_left(self) -> int | None:
        """The device's target less the peak of the steps so far and what is set apart.

        None where there is no target.
        """
        usable = self._device.usable_bytes()
        if not self._device.separate_memory or usable is None:
            return None
        target = int(usable * (1 - self._options.headroom))
        peak = self._device.memory()["peak_allocated"]
        return target - peak - self.apart - self.for_state()

    def device_room(self, measured: Sequence[BlockActivations], modes: Sequence[str]) -> int | None:
        """Device memory beyond a step that recomputes all, after a step under `modes`."""
        left = self.device_left()
        if left is None:
            return None
        options = self._options
        here = ActivationLimits(None, 0, options.prefetch_depth, self._copies.max_leaving_bytes)
        return left + least_extra_bytes(measured, modes, here)

    def carve(self, sizes: Sequence[int] | None, give_back: bool) -> None:
        """Have host buffers of these sizes and no others, page-locked now, watched if any.

        Args:
            sizes: in bytes; None when nothing is paged.
            give_back: memory that is needed no more goes back to the system.
        """
        held = self.buffers.held_bytes
        if held:
            self._copies.synchronize()  # so that no copy keeps a buffer
            self.buffers.trim()
        if give_back:
            self._arena.trim()
        if sizes is None:
            self.floor.stop()
            return
        # What was held already may be held again, however little RAM is left.
        self.buffers.limit_bytes = max(self.ram_room(), min(held, sum(sizes)))
        self.buffers.provide(sizes)
        self.floor.start()

    def _is_low(self, available: int) -> None:
        self.low = available  # the next forward acts on it
