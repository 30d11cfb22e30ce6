"""Accelerators behind one interface: `cuda` and `host` (a software accelerator)."""

from __future__ import annotations

import torch

from ts_core.device.base import Device, Event, Stream
from ts_core.device.cuda import CudaDevice
from ts_core.device.host import HostDevice
from ts_core.errors import OptionError

__all__ = ["CudaDevice", "Device", "Event", "HostDevice", "Stream", "resolve_device"]


def resolve_device(device: str | torch.device | None) -> Device:
    """The device a run uses.

    Args:
        device: None (CUDA when there is one, else host), "cuda", "cuda:N", "cpu", "host", or a
            torch.device of type cuda or cpu.

    Raises:
        OptionError: another value, or CUDA is asked for and not available.
    """
    if device is None:
        return CudaDevice(None) if torch.cuda.is_available() else HostDevice()
    name = str(device)
    on_cpu = isinstance(device, torch.device) and device.type == "cpu"  # "cpu:0" of a local rank
    if on_cpu or name in ("cpu", "host"):
        return HostDevice()
    if name == "cuda" or name.startswith("cuda:"):
        if not torch.cuda.is_available():
            raise OptionError(
                f"device={name!r} was asked for, but torch sees no CUDA GPU. "
                f"Run `trainstream doctor` to see why, or use device='host'."
            )
        index = torch.device(name).index
        if index is not None and index >= torch.cuda.device_count():
            raise OptionError(
                f"device={name!r} was asked for, but torch sees {torch.cuda.device_count()} "
                f"GPU(s). Use cuda:0 to cuda:{torch.cuda.device_count() - 1}."
            )
        return CudaDevice(index)
    raise OptionError(
        f"device={device!r} is not accepted. Use None, 'cuda', 'cuda:N', 'cpu', 'host' or a "
        f"torch.device of those."
    )
