"""What `trainstream doctor` finds out about the machine and its GPUs, as plain data."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ts_core import _native
from ts_core.errors import TrainStreamError

PIN_TRIAL_BYTES = 64 << 20
UNLIMITED = -1


@dataclass(frozen=True)
class GpuReport:
    """What the driver and torch say about GPUs.

    Attributes:
        devices: (name, bytes of memory) of each GPU the driver lists.
        driver: CUDA version the driver supports, as 13000 for 13.0; 0 without a driver.
        reason: why the driver cannot be used; empty when it can.
        torch_cuda: the CUDA version torch was built for; empty for a CPU build.
        torch_sees: whether torch can use a GPU.
        pin_refusal: the driver's reason to refuse page-locked memory; empty when it gave some.
        segments: what `wrap()` makes of the segments of torch's allocator, in words.
    """

    devices: tuple[tuple[str, int], ...] = ()
    driver: int = 0
    reason: str = ""
    torch_cuda: str = ""
    torch_sees: bool = False
    pin_refusal: str = ""
    segments: str = ""


@dataclass(frozen=True)
class Machine:
    """The machine around the process.

    Attributes:
        cores_usable, cores_present: cores the process may keep busy, and all there are.
        ram_bytes, ram_available_bytes: RAM, cut by the cgroup's limit.
        memlock_bytes: the page-lock limit (`ulimit -l`); -1 for none, None where there is no such.
        wsl: runs under the Windows Subsystem for Linux.
        container: runs in a container.
    """

    cores_usable: int
    cores_present: int
    ram_bytes: int
    ram_available_bytes: int
    memlock_bytes: int | None
    wsl: bool = False
    container: bool = False


def inspect_gpu(native: bool) -> GpuReport:
    """Asks the driver and torch. Page-locks a little memory as a trial, which creates a context."""
    import torch

    built_for = torch.version.cuda or ""
    if not native:  # the driver is asked through the native core
        count = torch.cuda.device_count()
        names = tuple((f"GPU {index}", 0) for index in range(count))
        return GpuReport(names, torch_cuda=built_for, torch_sees=count > 0)
    try:
        info = _native.driver_info()
    except TrainStreamError as error:
        return GpuReport(reason=str(error), torch_cuda=built_for)
    if info.reason or not info.devices:
        return GpuReport((), info.version, info.reason, built_for, False)
    return GpuReport(
        devices=tuple(info.devices),
        driver=info.version,
        torch_cuda=built_for,
        torch_sees=torch.cuda.is_available(),
        pin_refusal=_try_page_lock(),
        segments=_segments() if torch.cuda.is_available() else "",
    )


def _segments() -> str:
    import torch

    from ts_core.device import segments

    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        return f"those of the allocator {backend!r}"
    against = segments.chosen_against() or segments.unsupported()
    if against is not None:
        return f"stay as they are, since {against}"
    return "grow" if segments.chosen() else "grow after wrap()"


def _try_page_lock() -> str:
    host = _native.load()
    return str(host.Arena().add_slab(PIN_TRIAL_BYTES, True, 0, 0, False))


def inspect_machine(native: bool) -> Machine:
    """Cores, RAM and limits of this machine."""
    from ts_core.memory.ram import (
        in_container,
        in_wsl,
        page_lock_limit_bytes,
        ram_available_bytes,
        ram_limit_bytes,
    )

    present = os.cpu_count() or 1
    return Machine(
        cores_usable=_native.usable_cores() if native else present,
        cores_present=present,
        ram_bytes=ram_limit_bytes(),
        ram_available_bytes=ram_available_bytes(),
        memlock_bytes=page_lock_limit_bytes(),
        wsl=in_wsl(),
        container=in_container(),
    )
