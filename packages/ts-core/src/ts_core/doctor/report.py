"""Puts what was found into words, with one line for each thing to fix."""

from __future__ import annotations

import platform
import re
import sys
from dataclasses import dataclass, field
from importlib import metadata
from importlib.util import find_spec

from ts_core import _build, _native
from ts_core.doctor.facts import (
    PIN_TRIAL_BYTES,
    UNLIMITED,
    GpuReport,
    Machine,
    inspect_gpu,
    inspect_machine,
)
from ts_core.errors import TrainStreamError
from ts_core.registry import GROUPS, Registry

FAMILY = ("trainstream", "ts-core", "ts-quant", "ts-kernels", "ts-hf", "ts-bench")


@dataclass
class Diagnosis:
    """The report: sections of lines, and one line for each thing to fix."""

    sections: list[tuple[str, list[str]]] = field(default_factory=list)
    to_fix: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The whole report as plain text."""
        parts = []
        for title, lines in [*self.sections, ("to fix", self.to_fix or ["nothing"])]:
            parts.append("\n".join([title, *(f"  {line}" for line in lines)]))
        return "\n\n".join(parts)


def diagnose(
    gpu: GpuReport | None = None, machine: Machine | None = None, *, measure: bool = False
) -> Diagnosis:
    """Looks at everything; `gpu` and `machine` replace what this machine would say."""
    found = Diagnosis()
    _packages(found)
    native = _native_core(found)
    machine = machine or inspect_machine(native)
    gpu = gpu or inspect_gpu(native)
    _machine(found, machine)
    _gpu(found, gpu, machine)
    _triton(found, bool(gpu.devices))
    _plugins(found)
    rates = _rates(measure) if native else []
    if rates:
        found.sections.append(("measured", rates))
    return found


def _rates(measure: bool) -> list[str]:
    """Rates of this machine: measured now, or what an earlier measurement left."""
    from ts_core.schedule.hardware import profile_hardware, stored_profiles

    profiles = [profile_hardware(force=True)] if measure else stored_profiles()[:1]
    return [
        line
        for profile in profiles
        for line in [
            *profile.summary().splitlines(),
            profile.note,
            "if other work ran then, these are too low: trainstream doctor --measure measures anew",
        ]
    ]


def _packages(found: Diagnosis) -> None:
    lines = []
    versions = {name: _version(name) for name in FAMILY}
    for name, version in versions.items():
        lines.append(f"{name:12} {version or 'not installed'}")
    core = versions["ts-core"]
    for name, version in versions.items():
        if version and core and version.split(".")[:2] != core.split(".")[:2]:
            series = ".".join(core.split(".")[:2])
            found.to_fix.append(
                f"{name} {version} and ts-core {core} are of different series: "
                f"python -m pip install '{name}=={series}.*'"
            )
    lines.append(f"{'Python':12} {platform.python_version()} ({sys.executable})")
    torch_version = _version("torch")
    lines.append(f"{'torch':12} {torch_version or 'not installed'}")
    if torch_version is None:
        found.to_fix.append("torch is not installed: python -m pip install 'torch>=2.9'")
    elif _major_minor(torch_version) < (2, 9):
        found.to_fix.append(
            f"torch {torch_version} is older than 2.9: python -m pip install -U 'torch>=2.9'"
        )
    found.sections.append(("packages", lines))


def _native_core(found: Diagnosis) -> bool:
    path = _native.extension_path()
    try:
        level, levels = _native.simd_level(), _native.available_simd_levels()
    except TrainStreamError as error:
        found.sections.append(("native core", [f"BROKEN: {path}", *str(error).splitlines()]))
        found.to_fix.append(f"native core: {_one_line(error)}")
        return False
    if _native.is_source_checkout():
        same = _native.csrc_hash() == _build.source_hash()
        origin = "a source checkout, " + ("up to date" if same else "NOT what was loaded")
    else:
        origin = "an installed wheel"
    lines = [
        f"works: {path}",
        f"built from {_native.csrc_hash()} ({origin})",
        f"SIMD level {level} (this machine can run {', '.join(levels)})",
    ]
    if level != levels[0]:
        lines[-1] += f"; {levels[0]} is faster, TRAINSTREAM_SIMD chose {level}"
    found.sections.append(("native core", lines))
    return True


def _machine(found: Diagnosis, machine: Machine) -> None:
    lines = [f"cores: {machine.cores_usable} usable of {machine.cores_present}"]
    if machine.cores_usable < machine.cores_present:
        lines[-1] += " (affinity mask or cgroup CPU quota)"
    lines.append(f"RAM: {_gib(machine.ram_bytes)}, {_gib(machine.ram_available_bytes)} available")
    limit = machine.memlock_bytes
    if limit is not None:
        words = "unlimited" if limit == UNLIMITED else _size(limit)
        lines.append(f"page-lock limit (ulimit -l): {words}")
    places = [
        name for name, here in [("WSL", machine.wsl), ("a container", machine.container)] if here
    ]
    if places:
        lines.append(f"runs under {' and '.join(places)}")
    found.sections.append(("machine", lines))


def _gpu(found: Diagnosis, gpu: GpuReport, machine: Machine) -> None:
    if not gpu.devices:
        lines = ["no GPU: the host device is used"]
        if gpu.reason:
            lines.append(gpu.reason)
        found.sections.append(("GPU", lines))
        return
    lines = [f"{name}, {_gib(size)}" if size else name for name, size in gpu.devices]
    if gpu.driver:
        lines.append(f"driver: CUDA {gpu.driver // 1000}.{gpu.driver % 1000 // 10}")
    built = f"built for CUDA {gpu.torch_cuda}" if gpu.torch_cuda else "a build without CUDA"
    lines.append(f"torch: {built}, {'sees it' if gpu.torch_sees else 'does NOT see it'}")
    if not gpu.torch_sees:
        found.to_fix.append(_torch_line(gpu))
    if gpu.segments:
        lines.append(f"segments of torch's memory: {gpu.segments}")
    trial = _size(PIN_TRIAL_BYTES)
    if gpu.pin_refusal:
        lines.append(f"page-locking {trial} was REFUSED: {gpu.pin_refusal}")
        lines.append("plain memory is used instead; copies are several times slower")
        found.to_fix.append(_pin_line(machine))
    elif gpu.driver:
        lines.append(f"page-locking {trial}: works")
    found.sections.append(("GPU", lines))


def _torch_line(gpu: GpuReport) -> str:
    if not gpu.torch_cuda:
        return (
            "there is a GPU, but this torch is a build without CUDA: "
            "python -m pip install --force-reinstall torch "
            "--index-url https://download.pytorch.org/whl/cu130"
        )
    driver = f"{gpu.driver // 1000}.{gpu.driver % 1000 // 10}"
    return (
        f"torch, built for CUDA {gpu.torch_cuda}, cannot use the GPU with this driver (CUDA "
        f"{driver}): update the driver, or install a torch built for CUDA {driver} or older"
    )


def _pin_line(machine: Machine) -> str:
    limit = machine.memlock_bytes
    if limit is None or limit == UNLIMITED:
        cause = "page-locked memory is refused though ulimit -l sets no limit"
    else:
        cause = f"page-locked memory is refused (ulimit -l is {_size(limit)})"
    if machine.wsl:
        return f"{cause}: raise memory= in %UserProfile%\\.wslconfig, then run `wsl --shutdown`"
    if machine.container:
        return f"{cause}: start the container with --ulimit memlock=-1:-1"
    return (
        f"{cause}: run `ulimit -l unlimited` first, or put `* - memlock unlimited` in "
        f"/etc/security/limits.d/memlock.conf and log in again"
    )


def _triton(found: Diagnosis, has_gpu: bool) -> None:
    version = _version("triton") or _version("pytorch-triton")
    if version or find_spec("triton") is not None:
        lines = [f"Triton {version or '(version unknown)'}"]
    else:
        lines = ["Triton is not installed: device kernels use their plain PyTorch versions"]
        if has_gpu:
            found.to_fix.append("Triton is missing (slow kernels): python -m pip install triton")
    found.sections.append(("kernels", lines))


def _plugins(found: Diagnosis) -> None:
    lines = []
    for group in GROUPS:
        entries = metadata.entry_points(group=group)
        owners: dict[str, set[str]] = {}
        for entry in entries:
            owner = entry.dist.name if entry.dist is not None else "an unknown package"
            owners.setdefault(entry.name, set()).add(owner)
        names = Registry(group).names()
        lines.append(f"{group.removeprefix('trainstream.')}: {', '.join(names) or 'none'}")
        for name, packages in owners.items():
            if len(packages) > 1:
                found.to_fix.append(
                    f"{GROUPS[group].noun} {name!r} is offered by {', '.join(sorted(packages))}: "
                    f"python -m pip uninstall one of them"
                )
    found.sections.append(("plug-ins", lines))


def _major_minor(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _one_line(error: Exception) -> str:
    """The first line of an error, which holds the remedy; compiler output stays in the section."""
    return str(error).splitlines()[0]


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _size(size: int) -> str:
    for unit, power in [("GiB", 30), ("MiB", 20), ("KiB", 10)]:
        if size >= 1 << power:
            return f"{size / (1 << power):.4g} {unit}"
    return f"{size} bytes"
