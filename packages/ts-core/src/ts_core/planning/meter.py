"""Bytes that a model's operations allocate, counted without allocating any.

Works on fake tensors (`torch._subclasses.fake_tensor`), which have shapes, dtypes and storages but
no memory: each storage that an operation makes counts from then until it is freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Meter(TorchDispatchMode):
    """Counts live bytes of storages that operations under it made.

    Attributes:
        now: live bytes.
        peak: the most since `mark()`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def mark(self) -> int:
        """Start the peak again; the live bytes."""
        self.peak = self.now
        return self.now

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        inputs = {
            tensor.untyped_storage()._cdata
            for tensor in tree_leaves((args, kwargs))
            if isinstance(tensor, Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in inputs and storage._cdata not in self._known:
                    self._add(storage)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._remove, key, size)

    def _remove(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


@dataclass(frozen=True)
class Footprint:
    """Bytes of one training step beside weights and gradients.

    Attributes:
        activations: per block, what autograd keeps of it.
        inputs: per block, its input.
        transient: the most that one block's backward needs beyond that, and what is kept from
            before the first block.
        head: the same of what comes after the last block.
    """

    activations: tuple[int, ...]
    inputs: tuple[int, ...]
    transient: int
    head: int


def measure_step(
    model: nn.Module, blocks: Sequence[nn.Module], loss: Callable[[], Tensor]
) -> Footprint:
    """Run forward and backward of fake tensors and count.

    Args:
        model: with fake parameters, under an active FakeTensorMode; left as it was.
        blocks: its stack, called in order.
        loss: computes the loss.

    Raises:
        Exception: what the model raises on fake tensors (code that branches on values does).
    """
    meter = Meter()
    probe = _Probe(meter, len(blocks))
    handles: list[Any] = []
    for index, block in enumerate(blocks):
        handles.append(
            block.register_forward_pre_hook(probe.before(index), with_kwargs=True, prepend=True)
        )
        handles.append(block.register_forward_hook(probe.after(index)))
    for parameter in model.parameters():
        if parameter.requires_grad:
            handles.append(parameter.register_post_accumulate_grad_hook(_drop_gradient))
    try:
        with meter:
            result = loss()
            result.backward()
    finally:
        for handle in handles:
            handle.remove()
    return probe.footprint()


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None  # it leaves the device; the plan counts those under way


class _Probe:
    """Readings of the meter at the blocks' boundaries."""

    def __init__(self, meter: Meter, count: int) -> None:
        self.meter = meter
        self.start = [0] * count
        self.kept = [0] * count
        self.inputs = [0] * count
        self.transient = 0
        self.head = 0
        self.first = 0
        self._at = 0
        self._in_backward = False

    def before(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.start[index] = self.meter.now
            if index == 0:
                self.first = self.meter.now
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            hidden = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
            self.inputs[index] = 0 if hidden is None else hidden.numel() * hidden.element_size()

        return hook

    def after(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.kept[index] = self.meter.now - self.start[index]
            self._at = self.meter.mark()
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._enter_backward)
                    break

        return hook

    def _enter_backward(self, gradient: Tensor) -> None:
        """The gradient of a block's output is known: the part behind it is over."""
        used = self.meter.peak - self._at
        if self._in_backward:
            self.transient = max(self.transient, used)
        else:
            self.head = used
            self._in_backward = True
        self._at = self.meter.mark()

    def footprint(self) -> Footprint:
        self.transient = max(self.transient, self.meter.peak - self._at)
        return Footprint(
            tuple(self.kept),
            tuple(self.inputs),
            self.transient + self.first,
            self.head + self.first,
        )
