"""profile_hardware(): rates of this machine, measured once and kept in the cache folder."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ts_core import _native
from ts_core.device import Device, resolve_device
from ts_core.errors import DataError, OptionError
from ts_core.memory.arena import PinnedArena
from ts_core.schedule.rates import HardwareProfile
from ts_core.transfer import CopyEngine

_FORMAT = 1
_TRIES = 4
# A product takes an H200 a fifth of a millisecond, so that four may all fall into a moment in which
# its clock is low or the host is slow: they gave 537 to 796 TFLOP/s on machines of one kind, whose
# kernels took as long in training.
_PRODUCTS = 100
_MIB = 1 << 20
# Products this much faster than the kept rate say that something else used the GPU when that was
# measured. The look takes some 20 ms, and no more than twice as many.
_DISTURBED = 1.25
_LOOK_S = 0.05
_known: dict[str, HardwareProfile] = {}


def profile_hardware(
    device: str | torch.device | Device | None = None,
    quick: bool = True,
    force: bool = False,
    threads: int | None = None,
) -> HardwareProfile:
    """Measure link, host memory, host AdamW and matrix products, or take what was measured before.

    A result is kept in `$TRAINSTREAM_CACHE_DIR` (`~/.cache/trainstream`) in one file per machine,
    GPU, thread count and version of torch and ts-core, which is written whole or not at all. A
    process looks at a GPU's products first: where they are faster than what was kept, something
    else had used the GPU, and everything is measured again (the better of both counts).

    Args:
        device: as `wrap()`'s `device`, or a Device.
        quick: a second or two and a quarter of a GiB of host memory; False takes four times as
            much of both, for steadier figures.
        force: measure again.
        threads: host threads of the copy and the update; None for all usable cores.

    Returns:
        The rates. `note` says where they are kept, or why they could not be.

    Raises:
        OptionError: a value that is not accepted.
    """
    for name, value in (("quick", quick), ("force", force)):
        if not isinstance(value, bool):
            raise OptionError(f"{name}={value!r} is not accepted. Use True or False.")
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool)):
        raise OptionError(f"threads={threads!r} is not accepted. Use None or an integer above 0.")
    if threads is not None and threads < 1:
        raise OptionError(f"threads={threads} is not accepted. Use None or an integer above 0.")
    target = device if isinstance(device, Device) else resolve_device(device)
    identity = _identity(target, quick, threads)
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_folder() / f"hardware-{key}.json"
    before: HardwareProfile | None = None
    if not force:
        found = _known.get(str(path))
        if found is not None:
            return found
        found = _read(path)
        if found is not None and not _disturbed(target, found):
            _known[str(path)] = found
            return found
        before = found
    rates = _measure(target, quick, threads)
    if before is not None:  # what else goes on only ever makes rates lower
        kept = before.to_dict()
        rates = {
            name: max(rate, kept[name]) if isinstance(rate, float) else rate
            for name, rate in rates.items()
        }
    note = _write(path, identity, rates)
    profile = HardwareProfile(**rates, note=note)
    _known[str(path)] = profile
    return profile


def stored_profiles() -> list[HardwareProfile]:
    """What was measured on this machine and kept, the newest first; measures nothing."""
    found = []
    files = sorted(cache_folder().glob("hardware-*.json"), key=os.path.getmtime, reverse=True)
    for path in files:
        stored = _load(path)
        if stored is not None and stored[0].get("machine") == platform.node():
            found.append(stored[1])
    return found


def cache_folder() -> Path:
    """`$TRAINSTREAM_CACHE_DIR`, or ~/.cache/trainstream."""
    return Path(os.environ.get("TRAINSTREAM_CACHE_DIR") or "~/.cache/trainstream").expanduser()


def _identity(device: Device, quick: bool, threads: int | None) -> dict[str, Any]:
    gpu: list[Any] = []
    if device.kind == "cuda":
        properties = torch.cuda.get_device_properties(device.torch_device)
        gpu = [properties.name, properties.total_memory]
    return {
        "format": _FORMAT,
        "machine": platform.node(),
        "processor": platform.processor() or platform.machine(),
        "cores": _native.usable_cores(),
        "simd": _native.simd_level(),
        "device": [device.kind, *gpu],
        "threads": threads,
        "quick": quick,
        "torch": torch.__version__,
        "ts_core": metadata.version("ts-core"),
    }


def _disturbed(device: Device, kept: HardwareProfile) -> bool:
    """Whether a GPU multiplies faster than it did when `kept` was measured."""
    if not device.separate_memory:
        return False
    try:
        now = _matmul(device, torch.bfloat16, _LOOK_S)
    except torch.OutOfMemoryError:
        return False  # no room to look
    return now > _DISTURBED * kept.matmul_bf16


def _read(path: Path) -> HardwareProfile | None:
    stored = _load(path)
    return None if stored is None else stored[1]


def _load(path: Path) -> tuple[dict[str, Any], HardwareProfile] | None:
    """Identity and rates in a file, or None: no file, or a damaged one (it is measured anew)."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return dict(stored["identity"]), HardwareProfile.from_dict(stored["profile"])
    except (OSError, ValueError, KeyError, TypeError, DataError):
        return None


def _write(path: Path, identity: dict[str, Any], rates: dict[str, Any]) -> str:
    note = f"measured {datetime.now():%Y-%m-%d %H:%M}, kept in {path}"
    profile = HardwareProfile(**rates, note=note).to_dict()
    text = json.dumps({"identity": identity, "profile": profile}, indent=2)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=".hardware-", delete=False
        ) as file:
            file.write(text)
        try:
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise
    except OSError as error:
        return f"not kept: {error}"
    return note


def _measure(device: Device, quick: bool, threads: int | None) -> dict[str, Any]:
    scale = 1 if quick else 4
    budget_s = 0.25 * scale
    workers = threads or 0
    h2d, d2h, duplex, page_locked = _link(device, 64 * _MIB * scale, budget_s)
    return {
        "device": _name(device),
        "h2d": h2d,
        "d2h": d2h,
        "duplex": duplex,
        "host_copy": _host_copy(64 * _MIB * scale, workers, budget_s),
        "host_adamw": _host_adamw(4 * _MIB * scale, workers, budget_s),
        "matmul_bf16": _matmul(device, torch.bfloat16, budget_s),
        "matmul_fp32": _matmul(device, torch.float32, budget_s),
        "threads": threads or _native.usable_cores(),
        "page_locked": page_locked,
        "measured": True,
    }


def _name(device: Device) -> str:
    if device.kind == "cuda":
        return str(torch.cuda.get_device_name(device.torch_device))
    return f"host device, {platform.processor() or platform.machine()}"


def _link(device: Device, size_bytes: int, budget_s: float) -> tuple[float, float, float, bool]:
    copies = CopyEngine(device, 4 * size_bytes)
    arena = PinnedArena(slab=2 * size_bytes)  # of its own, so that the memory goes back
    host_h = [arena.empty(size_bytes, tag="measuring").zero_() for _ in range(2)]
    device_d = [device.allocate(size_bytes) for _ in range(2)]

    def up() -> None:
        copies.h2d(device_d[0], host_h[0])
        copies.synchronize()

    def down() -> None:
        copies.d2h(host_h[1], device_d[1])
        copies.synchronize()

    def both() -> None:
        copies.h2d(device_d[0], host_h[0])
        copies.d2h(host_h[1], device_d[1])
        copies.synchronize()

    return (
        size_bytes / _best_seconds(up, budget_s),
        size_bytes / _best_seconds(down, budget_s),
        2 * size_bytes / _best_seconds(both, budget_s),
        bool(host_h[0].is_pinned()) if device.kind == "cuda" else False,
    )


def _host_copy(size_bytes: int, threads: int, budget_s: float) -> float:
    source = torch.ones(size_bytes, dtype=torch.uint8)
    target = torch.zeros(size_bytes, dtype=torch.uint8)

    def copy() -> None:
        _native.copy_bytes(target.data_ptr(), source.data_ptr(), size_bytes, threads)

    return size_bytes / _best_seconds(copy, budget_s)


def _host_adamw(values: int, threads: int, budget_s: float) -> float:
    param, grad, exp_avg, exp_avg_sq = (torch.ones(values) for _ in range(4))

    def update() -> None:
        _native.adamw_step(
            param.data_ptr(),
            "float32",
            grad.data_ptr(),
            "float32",
            exp_avg.data_ptr(),
            exp_avg_sq.data_ptr(),
            0,
            values,
            lr=1e-3,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=1e-2,
            step=1,
            threads=threads,
        )

    return values / _best_seconds(update, budget_s)


def _matmul(device: Device, dtype: torch.dtype, budget_s: float) -> float:
    side = 4096 if device.kind == "cuda" else 256
    left, right = (
        torch.full((side, side), 0.5, dtype=dtype, device=device.torch_device) for _ in range(2)
    )
    out = torch.empty_like(left)

    def multiply() -> None:
        torch.mm(left, right, out=out)
        device.compute_stream().synchronize()

    return 2 * side**3 / _best_seconds(multiply, budget_s, _PRODUCTS)


def _best_seconds(action: Callable[[], None], budget_s: float, tries: int = _TRIES) -> float:
    """The least time of a few calls after a first one; fewer when they take long."""
    end = time.perf_counter() + budget_s
    action()
    best = float("inf")
    for _ in range(tries):
        start = time.perf_counter()
        action()
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            break
    return max(best, 1e-9)
