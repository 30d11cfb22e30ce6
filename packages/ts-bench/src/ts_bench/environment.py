"""The machine and the versions a figure was measured with."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "peft",
    "bitsandbytes",
    "liger-kernel",
    "ts-core",
    "ts-quant",
    "ts-kernels",
    "ts-hf",
    "ts-bench",
)


def versions() -> dict[str, str | None]:
    """Installed versions by distribution name; None where one is not installed."""
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, RAM, operating system, Python."""
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": _cpu_name(),
        "cores": cores,
        "ram_bytes": psutil.virtual_memory().total,
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def device(kind: str) -> dict[str, Any]:
    """The device's name and memory. For "cuda", initializes CUDA."""
    if kind != "cuda":
        return {"type": kind, "name": _cpu_name()}
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "type": "cuda",
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
