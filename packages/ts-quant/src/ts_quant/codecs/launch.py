"""Helpers of the Triton back ends; imports torch only."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

MOST_BLOCK = 4096
"""Values per scale up to which a Triton program takes whole blocks; its tensors have a limit."""


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's GPU current, where Triton launches; free when it already is."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)


def is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0
