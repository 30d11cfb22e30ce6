"""Gradients of streamed blocks: packed on the device, copied at once, landed in CPU `.grad`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ts_core.device import Event
from ts_core.engine.streamed_state import BlockState
from ts_core.errors import DataError, OutOfBudgetError
from ts_core.memory.arena import PinnedArena
from ts_core.memory.ram import ram_available_bytes
from ts_core.store.images import ALIGNMENT
from ts_core.transfer import CopyEngine, Slot, SlotRing

SLOTS = 2
RAM_SHARE = 0.9
TAG = "gradients"


@dataclass(frozen=True)
class Place:
    """Where one parameter's gradient lies in its block's gradient buffer."""

    parameter: nn.Parameter
    offset: int

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The gradient inside `buffer` (uint8), with the parameter's shape and strides."""
        p = self.parameter
        size = p.numel() * p.element_size()
        flat = buffer[self.offset : self.offset + size].view(p.dtype)
        return flat.as_strided(p.shape, p.stride())


@dataclass
class _Landing:
    """Gradients of one block on their way to the host."""

    event: Event
    buffer_h: torch.Tensor
    places: tuple[Place, ...]


class GradientLanding:
    """Brings each block's gradients to ordinary CPU `.grad`, while earlier blocks still compute.

    A gradient lands in host memory of its own and becomes `.grad`, or is added to the one there.
    That memory is carved from the arena, which reserved it before the first backward, and goes
    back to it when the user drops the gradient.

    Args:
        copies: carries gradients on its device-to-host stream.
        arena: host memory.
    """

    def __init__(self, copies: CopyEngine, arena: PinnedArena) -> None:
        self.copies = copies
        self.arena = arena
        self.copied_bytes = 0
        self._ring: SlotRing | None = None
        self._sent: dict[int, Event] = {}
        self._turn = 0
        self._layout: dict[int, tuple[Place, ...]] = {}
        self._size: dict[int, int] = {}
        self._signature: list[bool] | None = None
        self._flying: dict[int, deque[_Landing]] = {}
        self._slot: Slot | None = None
        self._filled: dict[int, torch.Tensor] = {}

    def prepare(self, states: Sequence[BlockState]) -> None:
        """Before a training forward: lay the gradients out and reserve their memory."""
        signature = [p.requires_grad for state in states for p in state.block.parameters()]
        if signature == self._signature:
            return
        for state in states:
            places, offset = [], 0
            for parameter in state.trained():
                places.append(Place(parameter, offset))
                size = parameter.numel() * parameter.element_size()
                offset += math.ceil(size / ALIGNMENT) * ALIGNMENT
            self._layout[state.index] = tuple(places)
            self._size[state.index] = offset
        largest = max(self._size.values(), default=0)
        if largest and (self._ring is None or self._ring.slot_bytes < largest):
            self._free_ring()
            self._ring = SlotRing(self.copies.device, largest, SLOTS)
        # All gradients at once, and two blocks more for those that are added to earlier ones.
        self._reserve(sum(self._size.values()) + SLOTS * largest)
        self._signature = signature

    def places(self, index: int) -> tuple[Place, ...]:
        """The trained parameters of block `index`."""
        return self._layout.get(index, ())

    def open(self) -> None:
        """Take the next device buffer for one block's gradients."""
        if self._ring is None:
            return
        self._slot = self._ring.slots[self._turn]
        self._turn = (self._turn + 1) % SLOTS
        self._filled = {}
        event = self._sent.pop(self._slot.index, None)
        if event is not None:
            self.copies.wait_compute(event)

    def add(self, index: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add one microbatch's gradients, in the order of `places(index)`."""
        for place, gradient in zip(self._layout[index], gradients, strict=True):
            if gradient is None:
                continue
            if gradient.layout is not torch.strided:
                raise DataError(
                    f"block {index} has a gradient of layout {gradient.layout}. Only dense "
                    f"gradients stream: make its layers with sparse=False."
                )
            view = self._filled.get(place.offset)
            if view is not None:
                view.add_(gradient)
                continue
            assert self._slot is not None
            view = place.view(self._slot.buffer)
            view.copy_(gradient)
            self._filled[place.offset] = view

    def send(self, index: int, task: int) -> None:
        """Queue the copy of block `index`'s gradients to the host, for backward `task`."""
        slot, filled = self._slot, self._filled
        self._slot, self._filled = None, {}
        if slot is None or not filled:
            return
        size = self._size[index]
        buffer_h = self.arena.empty((size,), torch.uint8, tag=TAG, grow=False)
        event = self.copies.d2h(buffer_h, slot.buffer[:size], after=self.copies.record_compute())
        self._sent[slot.index] = event
        self.copied_bytes += size
        places = tuple(place for place in self._layout[index] if place.offset in filled)
        self._flying.setdefault(task, deque()).append(_Landing(event, buffer_h, places))

    def collect(self, task: int) -> None:
        """Put what has arrived into `.grad`; waits only to bound the memory of sums.

        Called while no block is bound to the device: gradients and parameters are on the CPU then.
        """
        flying = self._flying.get(task, deque())
        while flying and (
            flying[0].event.query() or (len(flying) > SLOTS and _accumulates(flying[0]))
        ):
            self._land(flying.popleft())

    def finish(self, task: int) -> None:
        """At the end of backward `task`: every gradient is in `.grad`."""
        flying = self._flying.pop(task, deque())
        while flying:
            self._land(flying.popleft())

    def discard(self) -> None:
        """Forget gradients of backwards that raised before they ended."""
        self._flying.clear()
        self._slot, self._filled = None, {}

    def close(self) -> None:
        """Free the device buffers."""
        self.discard()
        self._free_ring()
        self._signature = None

    def _land(self, landing: _Landing) -> None:
        self.copies.device.host_wait(landing.event)
        with torch.no_grad():
            for place in landing.places:
                parameter = place.parameter
                value = place.view(landing.buffer_h)
                if parameter.grad is None:
                    parameter.grad = value
                else:
                    parameter.grad.add_(value)
                hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
                for hook in list(hooks.values()) if hooks else ():
                    hook(parameter)

    def _reserve(self, needed: int) -> None:
        free = int(ram_available_bytes() * RAM_SHARE)
        if needed > max(self.arena.stats()["arena_largest_free"], free):
            raise OutOfBudgetError(
                f"gradients of the streamed blocks need {needed} bytes of host memory, and {free} "
                f"may be used: short by {needed - free}. Train fewer parameters "
                f"(requires_grad_(False)), or in a smaller dtype."
            )
        self.arena.reserve(needed)

    def _free_ring(self) -> None:
        if self._ring is not None:
            self.copies.synchronize()
            self._ring.close()
            self._ring = None
        self._sent.clear()


def _accumulates(landing: _Landing) -> bool:
    return any(place.parameter.grad is not None for place in landing.places)
