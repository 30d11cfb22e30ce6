"""Moving what stays on the device there, and measuring what a model asks of memory."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ts_core.config import default_inflight_bytes
from ts_core.device import Device
from ts_core.engine.blocks import shared_parameters
from ts_core.engine.tables import lookup_tables
from ts_core.schedule import ModelProfile
from ts_core.store.images import leaves_bytes, pageable_leaves
from ts_core.store.leaves import Leaf, is_wrapper, stored_bytes, tensor_leaves

FP32_MOMENTS_BYTES = 8.0


def block_leaves(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    apart: Iterable[int] = (),
    optimizer: torch.optim.Optimizer | None = None,
) -> list[list[Leaf]]:
    """Per block, the leaves that can be paged.

    Args:
        model: the model.
        blocks: its stack.
        apart: `id`s of parameters that are kept otherwise.
        optimizer: that trains it; trainable weights that it leaves out stay on the device. None:
            all are trained.
    """
    stay = shared_parameters(model, blocks) | set(apart)
    if optimizer is not None:
        stay |= left_out(model, optimizer)
    return [pageable_leaves(block, stay) for block in blocks]


def left_out(model: nn.Module, optimizer: torch.optim.Optimizer) -> set[int]:
    """`id`s of trainable parameters that the optimizer does not have."""
    trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return {id(p) for p in model.parameters() if p.requires_grad and id(p) not in trained}


def model_profile(
    model: nn.Module,
    leaves: Sequence[Sequence[Leaf]],
    moment_bytes: float = FP32_MOMENTS_BYTES,
    gradients_in_flight: int | None = None,
    host_copies: bool = False,
    max_inflight_bytes: int | None = None,
) -> ModelProfile:
    """What the model asks of memory.

    Args:
        model: the model.
        leaves: per block, what can be paged.
        moment_bytes: both moments of one trained value.
        gradients_in_flight: gradients leave the device as they come, and no more bytes of them
            than this wait beside the largest; None: all are there at once, but for those of paged
            weights.
        host_copies: host threads update trained weights, and keep a copy of each.
        max_inflight_bytes: the link's limit of unfinished copies; None for its default.
    """
    pageable = tuple(leaves_bytes(block) for block in leaves)
    total = sum(stored_bytes(p) for p in model.parameters())
    total += sum(b.numel() * b.element_size() for b in model.buffers())
    paged_exact = sum(
        leaf.get().numel() * leaf.get().element_size() for block in leaves for leaf in block
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    trained_bytes = sum(p.numel() * p.element_size() for p in trained)
    leaving = 2 * (max_inflight_bytes or default_inflight_bytes(None))
    largest = max((p.numel() * p.element_size() for p in trained), default=0)
    low_precision = sum(p.numel() * 4 for p in trained if p.dtype is not torch.float32)
    state = int(sum(p.numel() for p in trained) * moment_bytes)
    return ModelProfile(
        pageable=pageable,
        fixed_device=total - paged_exact,
        trained=(
            trained_bytes
            if gradients_in_flight is None
            else min(trained_bytes, gradients_in_flight + largest)
        ),
        host_state=state + low_precision + trained_bytes,
        in_host=sum(
            leaf.get().numel() * leaf.get().element_size()
            for block in leaves
            for leaf in block
            if leaf.get().device.type == "cpu"
        ),
        trained_values=sum(p.numel() for p in trained),
        trained_pageable=tuple(
            sum(stored_bytes(leaf.owner) for leaf in block if leaf.trained) for block in leaves
        ),
        gradients_wait=gradients_in_flight is None,
        gradients_leaving=min(trained_bytes, leaving + largest),
        leaving=None if max_inflight_bytes is not None else (trained_bytes, largest),
        host_copies=trained_bytes if host_copies else 0,
        to_load=sum(
            tensor.numel() * tensor.element_size()
            for tensor in (*model.parameters(), *model.buffers())
            if tensor.is_meta
        ),
        tables=sum(stored_bytes(table) for table in lookup_tables(model, leaves)),
    )


def taken_by_others(
    device: Device, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> int:
    """Bytes of device memory that are not the model's, nor the state of its optimizer.

    Other tensors of the process (another model, say), and what torch keeps for itself.
    """
    if not device.separate_memory:
        return 0
    mine = _own_bytes(device, model, optimizer)
    if device.memory()["allocated"] > mine:
        gc.collect()  # what only cycles still hold is no longer in use
    return max(0, device.memory()["allocated"] - mine)


def _own_bytes(device: Device, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    states = () if optimizer is None else optimizer.state.values()
    with torch._C.DisableTorchFunctionSubclass():  # no wait for updates in flight
        tensors = [
            *model.parameters(),
            *model.buffers(),
            *(p.grad for p in model.parameters() if p.grad is not None),
            *(v for state in states for v in state.values() if isinstance(v, torch.Tensor)),
        ]
    storages: dict[int, int] = {}
    for tensor in tensors:
        for leaf in tensor_leaves("", tensor):
            inner = leaf.peek()
            if inner.device == device.torch_device:
                storage = inner.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def move_resident(model: nn.Module, device: Device, paged: Iterable[Leaf]) -> None:
    """Move every parameter and buffer to the device, except the paged leaves.

    Parameter objects stay the same (optimizers hold them), except frozen wrapper subclasses,
    which are replaced in every module that uses them.
    """
    if not device.separate_memory:
        return
    target = device.torch_device
    paged_holders = {id(leaf.holder) for leaf in paged}
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or id(parameter) in paged_holders:
                continue
            if is_wrapper(parameter):
                if _holds_paged(parameter, paged_holders):
                    continue
                if id(parameter) not in replaced:
                    replaced[id(parameter)] = nn.Parameter(
                        parameter.data.to(target), requires_grad=parameter.requires_grad
                    )
                module._parameters[name] = replaced[id(parameter)]
            elif parameter.device != target:
                gradient, parameter.grad = parameter.grad, None
                parameter.data = parameter.data.to(target)
                parameter.grad = None if gradient is None else gradient.to(target)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != target:
                module._buffers[name] = buffer.to(target)


def _holds_paged(wrapper: torch.Tensor, holders: set[int]) -> bool:
    attributes, _ = wrapper.__tensor_flatten__()  # type: ignore[attr-defined]
    for attribute in attributes:
        inner = getattr(wrapper, attribute)
        if id(inner) in holders or (is_wrapper(inner) and _holds_paged(inner, holders)):
            return True
    return id(wrapper) in holders
