"""Which implementation runs for a tensor: the Triton kernel or plain PyTorch."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

ORDINARY = (Tensor, torch.nn.Parameter)
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@lru_cache(maxsize=1)
def triton_available() -> bool:
    """Whether Triton is installed; does not import it."""
    return importlib.util.find_spec("triton") is not None


@lru_cache(maxsize=1)
def interpreting() -> bool:
    """Whether Triton runs kernels on the CPU (`TRITON_INTERPRET=1`, read once)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


@lru_cache(maxsize=32)
def _device_runs_kernels(index: int) -> bool:
    """Triton's bf16 needs compute capability 8.0; older GPUs take the PyTorch path."""
    if torch.version.hip is not None:
        return True
    return torch.cuda.get_device_capability(index) >= (8, 0)


def use_triton(*tensors: Tensor) -> bool:
    """Whether the Triton kernels can run on all of these tensors.

    True for float32, bfloat16 and float16 tensors on one CUDA device that Triton supports, and
    for CPU tensors under the Triton interpreter. Otherwise the PyTorch version runs.
    """
    if not triton_available():
        return False
    device = tensors[0].device
    for tensor in tensors:
        if tensor.dtype not in KERNEL_DTYPES or tensor.device != device:
            return False
    if device.type == "cuda":
        return _device_runs_kernels(
            torch.cuda.current_device() if device.index is None else device.index
        )
    return device.type == "cpu" and interpreting()


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's GPU current, so that a kernel launches on its current stream."""
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


def runs_eagerly(*tensors: Tensor) -> bool:
    """Whether nothing would see an operator called on these: no tracing, mode or subclass.

    Then the operator's implementation may be called directly, without torch's dispatcher, which
    costs a small kernel more host time than its launch.

    A dispatch mode that only watches, and must not change what runs, has a method
    `sees_inputs(tensors)`: it is told these tensors, and counts as none.
    """
    for tensor in tensors:
        if type(tensor) not in ORDINARY:
            return False
    if torch._C._are_functorch_transforms_active():
        return False
    return torch._C._len_torch_dispatch_stack() == 0 or _only_watched(tensors)


def _only_watched(tensors: Sequence[Tensor]) -> bool:
    watchers = [getattr(mode, "sees_inputs", None) for mode in _get_current_dispatch_mode_stack()]
    if None in watchers:
        return False
    for sees in watchers:
        sees(tensors)  # type: ignore[misc]
    return True
