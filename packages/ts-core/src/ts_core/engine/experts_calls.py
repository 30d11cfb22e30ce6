"""A layer's own forward over the experts it picked, and what autograd keeps of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ts_core.engine.experts_layer import ExpertLayer, Stack, picked_table
from ts_core.engine.experts_slots import ExpertSlot, ExpertSlots, Picks, rows_for
from ts_core.engine.runner import in_backward
from ts_core.errors import DataError, StateError


@dataclass(frozen=True)
class SavedRows:
    """Kept by autograd in place of a tensor that views picked experts: how to have it again.

    `stack` is the number of the stack whose decoded values are meant, None for the slot's bytes;
    `row` the single expert that was decoded, None for all. `offset` counts elements.
    """

    call: ExpertCall
    stack: int | None
    row: int | None
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        """The same values, wherever the experts are now (they are copied again if nowhere)."""
        home = self.call.memory(self.stack, self.row)
        start = home.storage_offset() * home.element_size() // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=home.device)
        view = empty.set_(home.untyped_storage(), start + self.offset, self.shape, self.stride)
        return view.clone() if torch.is_grad_enabled() else view


class ExpertCall:
    """One forward of one layer's experts: which were picked."""

    def __init__(self, calls: ExpertCalls, layer: ExpertLayer, picks: Picks) -> None:
        self.calls = calls
        self.layer = layer
        self.picks = picks

    def slot(self) -> ExpertSlot:
        """The slot with this call's experts, for the calling thread's compute stream."""
        return self.calls.enter(self)

    def memory(self, stack: int | None, row: int | None) -> Tensor:
        """What a `SavedRows` views: the slot's bytes, or a decoded stack or expert."""
        slot = self.slot()
        if stack is None:
            assert slot.buffer is not None
            return slot.buffer
        return self.calls.decoded(self, slot, stack, row)

    def saved(self, tensor: Tensor) -> SavedRows | None:
        """What to keep in place of `tensor`; None when it does not view this call's experts."""
        found = self.calls.home_of(self, tensor)
        if found is None:
            return None
        home, stack, row = found
        start = home.storage_offset() * home.element_size() // tensor.element_size()
        return SavedRows(
            self,
            stack,
            row,
            tensor.dtype,
            int(tensor.storage_offset()) - start,
            tensor.shape,
            tuple(int(step) for step in tensor.stride()),
        )


class _OneByOne:
    """Stands for a stack of stored weights in a forward that reads one expert at a time."""

    def __init__(self, call: ExpertCall, stack: int, like: Tensor) -> None:
        self._call = call
        self._stack = stack
        self.shape = like.shape
        self.dtype = like.dtype
        self.device = like.device

    def __getitem__(self, index: Any) -> Tensor:
        slot = self._call.slot()
        if isinstance(index, int) or (isinstance(index, Tensor) and index.dim() == 0):
            return self._call.calls.decoded(self._call, slot, self._stack, int(index))
        return self._call.calls.decoded(self._call, slot, self._stack, None)[index]


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
        self._decoded: dict[tuple[int, int | None], Tensor] = {}
        self._decoded_of: ExpertCall | None = None

    def new_pass(self) -> None:
        """Before the model's forward: nothing copied before counts (the user may have written)."""
        self.forget()
        self.slots.drop()
        for layer in self.layers:
            layer.last_picks = None
            self._take_writes(layer)

    def forget(self) -> None:
        """Drop decoded weights."""
        self._decoded.clear()
        self._decoded_of = None

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
                self.slots.load(before, before.last_picks, keep=slot)
        return slot

    def decoded(self, call: ExpertCall, slot: ExpertSlot, stack: int, row: int | None) -> Tensor:
        """Full-precision values of a stored stack, or of one expert; kept until the next is asked
        for (a single expert) or the next call (a stack).
        """
        found = self._decoded.get((stack, row))
        if found is not None:
            return found
        for other in [key for key in self._decoded if key[0] == stack]:
            del self._decoded[other]
        with torch.no_grad():
            stored: Any = slot.stacks[stack]
            if row is None:
                values: Tensor = stored.stack_part(0, len(call.picks)).dequantize()
                values = _padded(values, rows_for(call.picks))
            else:
                values = stored[row]
        self._decoded[(stack, row)] = values
        return values

    def home_of(
        self, call: ExpertCall, tensor: Tensor
    ) -> tuple[Tensor, int | None, int | None] | None:
        """The memory of the call's experts that `tensor` views: (memory, stack, row)."""
        address = tensor.untyped_storage().data_ptr()
        for slot in self.slots.slots:
            if slot.buffer is not None and slot.buffer.untyped_storage().data_ptr() == address:
                if not slot.holds(call.layer, call.picks):
                    raise StateError(
                        "a tensor views experts of another call. This is a fault in trainstream: "
                        "please report it with the model's code."
                    )
                return slot.buffer, None, None
        for (stack, row), values in self._decoded.items():
            if values.untyped_storage().data_ptr() == address:
                return values, stack, row
        return None

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
        small = _small_parameters(layer, hit, rows)
        stacks = [
            self._stand_in(call, slot, number, stack) for number, stack in enumerate(layer.stacks)
        ]
        values = dict(zip((stack.name for stack in layer.stacks), stacks, strict=True)) | small
        try:
            with _saved_rows(call), _replaced(spec.module, values, spec.count_attribute, rows):
                return forward(*args, **kwargs)
        finally:
            self.forget()

    def _stand_in(self, call: ExpertCall, slot: ExpertSlot, number: int, stack: Stack) -> Any:
        compact = slot.stacks[number]
        if not stack.stored:
            return compact
        if call.layer.spec.one_by_one():
            return _OneByOne(call, number, compact)
        return self.decoded(call, slot, number, None)

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


def _padded(values: Tensor, rows: int) -> Tensor:
    if values.shape[0] == rows:
        return values
    padded = values.new_zeros(rows, *values.shape[1:])
    padded[: values.shape[0]] = values
    return padded


def _small_parameters(layer: ExpertLayer, hit: Tensor, rows: int) -> dict[str, Tensor]:
    """The stacked parameters that stay on the device (biases, trained ones), picked alike."""
    if not layer.small:
        return {}
    order = torch.argsort(hit[: layer.count], descending=True, stable=True)[:rows]
    if order.numel() < rows:
        order = torch.cat([order, order.new_zeros(rows - order.numel())])
    module = layer.spec.module
    return {name: getattr(module, name).index_select(0, order) for name in layer.small}


@contextmanager
def _replaced(
    module: nn.Module, values: dict[str, Any], count_attribute: str, rows: int
) -> Iterator[None]:
    """Let reads of these attributes see `values`; the parameters themselves stay as they are."""
    count = module.__dict__[count_attribute]
    module.__dict__.update(values)
    module.__dict__[count_attribute] = rows
    try:
        yield
    finally:
        for name in values:
            del module.__dict__[name]
        module.__dict__[count_attribute] = count


@contextmanager
def _saved_rows(call: ExpertCall) -> Iterator[None]:
    """Saved-tensor hooks that keep a handle instead of any tensor that views picked experts.

    Hooks that are already active keep seeing every other tensor.
    """
    if not torch.is_grad_enabled():
        yield
        return
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    outer_pack, outer_unpack = outer if outer is not None else (_same, _same)

    def pack(tensor: Tensor) -> Any:
        if type(tensor) is Tensor:
            saved = call.saved(tensor)
            if saved is not None:
                return saved
        return outer_pack(tensor)

    def unpack(packed: Any) -> Any:
        return packed.tensor() if isinstance(packed, SavedRows) else outer_unpack(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _same(value: Any) -> Any:
    return value
