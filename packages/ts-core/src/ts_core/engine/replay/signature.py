"""What a call of a block looks like: its arguments taken apart, and the settings around it.

Two calls with the same signature run the same kernels on tensors of the same shapes and strides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ts_core.engine.saved_tensors import PLAIN_TYPES

ALIGNMENT = 16  # kernels are chosen by it

_VALUES = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_SEQUENCES = (tuple, list)

Spec = tuple[Any, ...]


class NotReplayable(Exception):
    """A call cannot be replayed; the text says why, in plain words."""


def take_apart(value: Any, tensors: list[torch.Tensor]) -> Spec:
    """A hashable description of nested arguments; tensors are appended to `tensors` in order.

    Raises:
        NotReplayable: an object that is neither data nor a plain tensor (a key/value cache, say).
    """
    kind = type(value)
    if kind is torch.Tensor:
        tensors.append(value)
        return ("tensor",)
    if kind in _VALUES:
        return ("value", kind, value)
    if kind is float:
        return ("value", kind, value.hex())
    if kind in _SEQUENCES:
        return (kind, *[take_apart(item, tensors) for item in value])
    if kind is dict:
        names = tuple(value)
        if not all(isinstance(name, str) for name in names):
            raise NotReplayable("a dict argument has keys that are not text")
        return (kind, names, *[take_apart(item, tensors) for item in value.values()])
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return (kind, *[take_apart(item, tensors) for item in value])
    if isinstance(value, torch.nn.Parameter):
        raise NotReplayable("a parameter is passed as an argument")
    if isinstance(value, torch.Tensor):
        raise NotReplayable(f"a tensor of type {kind.__name__} is passed as an argument")
    raise NotReplayable(f"an argument or result is a {kind.__name__}, which is not plain data")


def put_together(spec: Spec, tensors: Iterator[Any]) -> Any:
    """The inverse of `take_apart`, with other tensors in place of those that were there."""
    kind = spec[0]
    if kind == "tensor":
        return next(tensors)
    if kind == "value":
        return float.fromhex(spec[2]) if spec[1] is float else spec[2]
    if kind is dict:
        items = [put_together(item, tensors) for item in spec[2:]]
        return dict(zip(spec[1], items, strict=True))
    items = [put_together(item, tensors) for item in spec[1:]]
    if kind in _SEQUENCES:
        return kind(items)
    return kind(*items)


Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, bool]


def layout_of(tensor: torch.Tensor) -> Layout:
    """Shape, strides, dtype and whether a gradient is asked for."""
    return (tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)


def layouts(tensors: Sequence[torch.Tensor], device: torch.device) -> tuple[Layout, ...]:
    """Of arguments.

    Raises:
        NotReplayable: one is elsewhere, is no ordinary dense tensor, or begins at an odd address.
    """
    found = []
    for tensor in tensors:
        if tensor.device != device:
            raise NotReplayable(f"an argument is on {tensor.device}, not on {device}")
        if tensor.layout is not torch.strided or tensor.is_inference() or tensor.is_conj():
            raise NotReplayable("an argument is no ordinary strided tensor")
        if tensor.data_ptr() % ALIGNMENT:
            raise NotReplayable(
                f"an argument begins at an address that {ALIGNMENT} does not divide"
            )
        found.append(layout_of(tensor))
    return tuple(found)


def own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor without its repeated dimensions (stride 0): what a copy must write."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last that a tensor covers."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def overlaps(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether two elements of a tensor share memory, other than by repeated dimensions."""
    reach = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size <= 1 or step == 0:
            continue
        if step < reach:
            return True
        reach = step * (size - 1) + reach
    return False


def blocked_by_context(device: torch.device) -> str | None:
    """Why nothing can be replayed where the caller is now, if so."""
    if torch.is_inference_mode_enabled():
        return "the model runs in inference mode (use torch.no_grad())"
    if torch.compiler.is_compiling():
        return "the model is being compiled"
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "the model runs inside a torch.func transform"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "saved-tensor hooks are active (torch's activation checkpointing, say)"
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return "a torch dispatch or function mode is active"
    if torch.is_anomaly_enabled():
        return "anomaly detection is on"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation is active"
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return "the caller captures a CUDA graph of its own"
    return None


def settings() -> tuple[Any, ...]:
    """Process-wide settings that decide which kernels run, in forward and in backward."""
    cuda = torch.backends.cuda
    cudnn = torch.backends.cudnn
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cuda.matmul.fp32_precision,
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cudnn.enabled,
        cudnn.benchmark,
    )


def forward_settings(device: torch.device) -> tuple[Any, ...]:
    """Those that concern a forward alone."""
    return (
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(device.type),
        torch.get_autocast_dtype(device.type),
        torch.is_autocast_cache_enabled(),
        torch.get_default_dtype(),
        tuple(torch._C._get_sdp_priority_order()),
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """A tensor or parameter of no subclass."""
    return type(tensor) in PLAIN_TYPES
