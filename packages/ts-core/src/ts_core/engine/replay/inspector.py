"""Watching one eager call of a block for anything that a graph could not repeat.

The call is the caller's own and its results are used; nothing is computed twice for this.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ts_core.engine.activation_meter import tensors_in
from ts_core.engine.own_buffers import LARGEST_COPY_BYTES
from ts_core.engine.replay.watch import Weights
from ts_core.store.leaves import is_wrapper

_READS_BACK = "it reads a value of the device on the host, or makes a tensor of such a size"


class Inspector(TorchDispatchMode):
    """Sees the operators that are called while it is active.

    Args:
        args: tensors that the block was given.
        weights: of the block.

    Attributes:
        reason: why the call cannot be captured, once something was found.
        outside: tensors that are neither arguments, weights nor made in the call, by storage.
    """

    def __init__(self, args: Sequence[torch.Tensor], weights: Weights) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reason: str | None = None
        self.outside: dict[int, torch.Tensor] = {}
        self._made: dict[int, StorageWeakRef] = {}
        self._device = args[0].device if args else torch.device("cpu")
        self._args = [tensor.untyped_storage() for tensor in args]
        self._weights = list(weights.storages())
        self._known = {storage._cdata for storage in (*self._args, *self._weights)}
        self._given = {storage._cdata for storage in self._args}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._look(func, args, kwargs)
        result = func(*args, **kwargs)
        for tensor in _plain_in(result):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._known and key not in self.outside and key not in self._made:
                self._made[key] = StorageWeakRef(storage)
        return result

    def sees_inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """Told by kernels that are launched without an operator (ts_kernels): what they read."""
        for tensor in _plain_in(tensors):
            self._look_at_input(tensor)

    def alive(self) -> bool:
        """Whether something made in the call is still held by somebody."""
        return any(not reference.expired() for reference in self._made.values())

    def _look(self, func: Any, args: Any, kwargs: Any) -> None:
        tags = func.tags
        if torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags:
            self._found(f"{_READS_BACK} ({func})")
        devices = set()
        for tensor in _plain_in((args, kwargs)):
            devices.add(tensor.device.type)
            self._look_at_input(tensor)
        target = kwargs.get("device")
        if target is not None and args:
            devices.add(torch.device(target).type)
        moves = func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_)
        if moves and len(devices) > 1:
            self._found("it copies between the host and the device")
        if func._schema.is_mutable:
            self._look_at_writes(func, args, kwargs)

    def _look_at_input(self, tensor: torch.Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        if key not in self._known and key not in self._made:
            self.outside.setdefault(key, tensor)

    def _look_at_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[number] if number < len(args) else kwargs.get(argument.name)
            for tensor in _plain_in(value):
                key = tensor.untyped_storage()._cdata
                if key in self._given:
                    self._found(f"it writes into an argument ({func})")
                elif key in self._known:
                    self._found(f"it writes into a buffer or parameter ({func})")
                elif key in self.outside:
                    self._found(f"it writes into a tensor from outside ({func})")

    def _found(self, reason: str) -> None:
        self.reason = self.reason or reason


class Before:
    """What an ordinary call must leave alone, as it was before: buffers, host random numbers.

    Args:
        block: the block.
        device: it computes on.
    """

    def __init__(self, block: nn.Module, device: torch.device) -> None:
        self._buffers: list[tuple[torch.Tensor, int, torch.Tensor | None]] = []
        for buffer in block.buffers():
            small = buffer.numel() * buffer.element_size() <= LARGEST_COPY_BYTES
            copied = None if is_wrapper(buffer) or not small else buffer.detach().clone()
            self._buffers.append((buffer, buffer._version, copied))
        self._python = random.getstate()
        self._host = torch.get_rng_state() if device.type != "cpu" else None

    def broken(self) -> str | None:
        """What was not left alone. Waits for the device."""
        for buffer, version, copied in self._buffers:
            if buffer._version != version or (copied is not None and not _same(buffer, copied)):
                return "it writes a buffer in forward"
        if random.getstate() != self._python:
            return "it draws Python's random numbers"
        if self._host is not None and not torch.equal(self._host, torch.get_rng_state()):
            return "it draws random numbers on the host"
        return None


def foreign_leaves(
    outputs: Iterable[torch.Tensor], args: Sequence[torch.Tensor], params: Iterable[torch.Tensor]
) -> bool:
    """Whether the graph of `outputs` has leaves that are neither parameters nor behind `args`."""
    stop = {arg.grad_fn for arg in args if arg.grad_fn is not None}
    known = {id(tensor) for tensor in (*args, *params)}
    todo: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        if node in stop:
            continue
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            return True
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return False


def _same(buffer: torch.Tensor, before: torch.Tensor) -> bool:
    return torch.equal(
        buffer.nan_to_num() if buffer.is_floating_point() else buffer,
        before.nan_to_num() if before.is_floating_point() else before,
    )


def _plain_in(value: Any) -> Iterator[torch.Tensor]:
    for tensor in tensors_in(value):
        if not is_wrapper(tensor) and tensor.layout is torch.strided and not tensor.is_meta:
            yield tensor
