"""A layer's own forward over the experts it picked, and what autograd keeps of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ts_core.engine.experts_decoded import (
    ADAPTED,
    Decoded,
    Factors,
    OneByOne,
    SavedView,
    fold,
    picked_factors,
    replaced,
    saved_views,
)
from ts_core.engine.experts_layer import ExpertLayer, Stack, picked_table
from ts_core.engine.experts_slots import ExpertSlot, ExpertSlots, Picks, rows_for
from ts_core.engine.turns import in_backward
from ts_core.errors import DataError, StateError
from ts_core.store.plain_mode import plain_mode


class ExpertCall:
    """One forward of one layer's experts: which were picked. The home of its saved tensors.

    A key is None for the slot's bytes, or (stack, row) for decoded values.
    """

    def __init__(self, calls: ExpertCalls, layer: ExpertLayer, picks: Picks) -> None:
        self.calls = calls
        self.layer = layer
        self.picks = picks
        self._adapted: dict[int, Factors] = {}

    def slot(self) -> ExpertSlot:
        """The slot with this call's experts, for the calling thread's compute stream."""
        return self.calls.enter(self)

    def decoded(self, stack: int, row: int | None) -> Tensor:
        """Decoded values of a stack, or of one of its experts."""
        slot = self.slot()
        return self.calls.decoded.get(slot.stacks[stack], stack, row, len(self.picks))

    def adapt(self, stack: int, factors: Factors) -> Tensor:
        """The stack with what adapters add, differentiable in their factors."""
        self._adapted[stack] = [(a.detach(), b.detach(), scale) for a, b, scale in factors]
        return self.calls.decoded.put(stack, fold(self._base(stack), factors))

    def _base(self, stack: int) -> Tensor:
        if self.layer.stacks[stack].stored:
            return self.decoded(stack, None)
        return self.slot().stacks[stack]

    def memory(self, key: tuple[int, int | None] | None) -> Tensor:
        """See `experts_decoded.Home`."""
        if key is not None and key[1] == ADAPTED:
            self.slot()  # what is kept may be of another call
            found = self.calls.decoded.find(key)
            if found is not None:
                return found
            stack = key[0]
            again = fold(self._base(stack), self._adapted[stack]).detach()
            return self.calls.decoded.put(stack, again)
        if key is not None:
            return self.decoded(*key)
        buffer = self.slot().buffer
        assert buffer is not None
        return buffer

    def saved(self, tensor: Tensor) -> SavedView | None:
        """See `experts_decoded.Home`."""
        slot = self.calls.slots.slot_of(tensor)
        if slot is not None:
            if not slot.holds(self.layer, self.picks):
                raise StateError(
                    "a tensor views experts of another call. This is a fault in trainstream: "
                    "please report it with the model's code."
                )
            assert slot.buffer is not None
            return SavedView(self, None, slot.buffer, tensor)
        key = self.calls.decoded.key_of(tensor)
        return None if key is None else SavedView(self, key, self.calls.decoded[key], tensor)


class ExpertCalls:
    """Runs layers' forwards over their picked experts.

    Args:
        slots: where picked experts are on the device.
        layers: in the order of execution.
        hit_h: uint8 on the host, page-locked where the device is a GPU, for the picks.
    """

    def __init__(self, slots: ExpertSlots, layers: list[ExpertLayer], hit_h: Tensor) -> None:
        self.slots = slots
        self.layers = layers
        self._hit_h = hit_h
        self.decoded = Decoded()
        self._decoded_of: ExpertCall | None = None

    @plain_mode
    def new_pass(self) -> None:
        """Before the model's forward: nothing copied before counts (the user may have written)."""
        self.forget()
        self.slots.drop()
        for layer in self.layers:
            layer.last_picks = None
            self._take_writes(layer)

    def forget(self) -> None:
        """Drop decoded weights."""
        self.decoded.clear()
        self._decoded_of = None

    @plain_mode
    def enter(self, call: ExpertCall) -> ExpertSlot:
        """The slot with the call's experts; in backward the layer before is fetched as well."""
        if self._decoded_of is not call:
            self.forget()
            self._decoded_of = call
            if self._take_writes(call.layer):
                self.slots.drop(call.layer)
        slot = self.slots.ready(call.layer, call.picks)
        if in_backward() and call.layer.index > 0:
            before = self.layers[call.layer.index - 1]
            if before.last_picks is not None:
                self.slots.prefetch(before, before.last_picks, keep=slot)
        return slot

    def run(self, layer: ExpertLayer, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """`forward` of the layer's module, over the experts that its arguments pick."""
        spec = layer.spec
        position = spec.index_position
        index = args[position] if len(args) > position else kwargs.get(spec.index_name)
        if not isinstance(index, Tensor) or index.dtype.is_floating_point:
            raise DataError(
                f"{spec.name} was called without the integer indices of its experts "
                f"({spec.index_name!r}), which moe_paging needs."
            )
        hit, place = picked_table(index, layer.count)
        picks = self._picks(hit, layer.count)
        call = ExpertCall(self, layer, picks)
        rows = rows_for(picks)
        place[layer.count] = rows  # the index that stands for no expert
        compact_index = place.to(index.dtype)[index.long()]
        if len(args) > position:
            args = (*args[:position], compact_index, *args[position + 1 :])
        else:
            kwargs = {**kwargs, spec.index_name: compact_index}
        self.forget()
        layer.last_picks = picks
        self.slots.stats.calls += 1
        self.slots.stats.picked += len(picks)
        slot = call.slot()
        adapters = spec.adapters()
        order = _order(hit, layer.count, rows) if layer.small or adapters else None
        values: dict[str, Any] = {}
        for name in layer.small:
            assert order is not None
            values[name] = getattr(spec.module, name).index_select(0, order)
        for number, stack in enumerate(layer.stacks):
            added = adapters.get(stack.name)
            if added:
                values[stack.name] = call.adapt(number, picked_factors(added, order))
            else:
                values[stack.name] = _stand_in(call, slot, number, stack)
        values[spec.count_attribute] = rows
        try:
            with saved_views(call), replaced(spec.module, values):
                return forward(*args, **kwargs)
        finally:
            self.forget()

    def _picks(self, hit: Tensor, count: int) -> Picks:
        copies = self.slots.copies
        host = hit
        if copies.device.separate_memory:
            host = self._hit_h[: count + 1]
            copies.device.host_wait(copies.d2h(host, hit, after=copies.record_compute()))
        return tuple(host[:count].nonzero().flatten().tolist())

    def _take_writes(self, layer: ExpertLayer) -> bool:
        if not layer.image.take_writes():
            return False
        layer.image.bind_host()
        return True


def _stand_in(call: ExpertCall, slot: ExpertSlot, number: int, stack: Stack) -> Any:
    """What the forward reads as the stacked parameter."""
    compact = slot.stacks[number]
    if not stack.stored:
        return compact
    if call.layer.spec.one_by_one():
        return OneByOne(compact, partial(call.decoded, number))
    return call.decoded(number, None)


def _order(hit: Tensor, count: int, rows: int) -> Tensor:
    """int64 [rows]: the picked experts in order, then others to fill up; no wait for the device."""
    order = torch.argsort(hit[:count], descending=True, stable=True)[:rows]
    if order.numel() < rows:  # one expert in all
        order = torch.cat([order, order.new_zeros(rows - order.numel())])
    return order
