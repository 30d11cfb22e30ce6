"""`ts-bench machine`: rates of this machine that bound training, and what our waits cost.

Each figure is measured beside its rival where there is one: page-locking against the CUDA
runtime's allocator, host AdamW against torch's fused one, waits against torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from ts_bench import environment, machine_host, machine_link
from ts_bench.machine_rows import MIB, Row
from ts_core import _native
from ts_core.device import Device


@dataclass(frozen=True)
class Sizes:
    """How large everything is.

    Attributes:
        copies: bytes of single copies over the link.
        queued_bytes: bytes of each direction that are queued at once.
        device_bytes: bytes of a copy within device memory.
        arena_bytes: bytes that are page-locked at once.
        parameters: of a host AdamW update.
        rounds: of everything that takes turns.
        beside_bytes: bytes of each direction while an update runs beside.
        wait_s: seconds of a wait.
        imports: processes that import.
    """

    copies: tuple[int, ...]
    queued_bytes: int
    device_bytes: int
    arena_bytes: int
    parameters: int
    rounds: int
    beside_bytes: int
    wait_s: float
    imports: int


def sizes_for(*, tiny: bool) -> Sizes:
    """Sizes of a real run (about half a minute on a GPU), or of one that only has to work."""
    if tiny:
        return Sizes((MIB // 4, MIB), 4 * MIB, 4 * MIB, 4 * MIB, 100_000, 2, 16 * MIB, 0.2, 1)
    cores = _native.usable_cores()
    return Sizes(
        copies=(MIB, 16 * MIB, 256 * MIB),
        queued_bytes=1024 * MIB,
        device_bytes=1024 * MIB,
        arena_bytes=1024 * MIB,
        parameters=max(16, 4 * cores) * 1_000_000,
        rounds=9,
        beside_bytes=24 * 1024 * MIB,
        wait_s=1.0,
        imports=5,
    )


@dataclass
class MachineRun:
    """One run, as it is written to JSON."""

    date: str
    command: str
    machine: dict[str, Any]
    versions: dict[str, str | None]
    device: dict[str, Any]
    rows: list[Row]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {"kind": "machine", **asdict(self)}


def measure(
    device: Device,
    sizes: Sizes,
    *,
    command: str = "",
    on_row: Callable[[Row], None] = lambda row: None,
) -> MachineRun:
    """Measure everything.

    Args:
        device: a GPU, or the host device, whose "link" is a copy by a thread.
        sizes: how large.
        command: recorded in the result.
        on_row: called with each row as soon as it is known.
    """
    rows = []
    for row in _rows(device, sizes):
        rows.append(row)
        on_row(row)
    return MachineRun(
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=command,
        machine=environment.machine(),
        versions=environment.versions(),
        device=environment.device("cuda" if device.kind == "cuda" else "cpu"),
        rows=rows,
    )


def _rows(device: Device, sizes: Sizes) -> Iterator[Row]:
    # Page-locking first: once memory has been used it may come from what the process holds.
    yield machine_link.page_locking(device, sizes.arena_bytes)
    for size in sizes.copies:
        yield machine_link.page_locked(device, size, sizes.queued_bytes)
    yield machine_link.pageable(device, sizes.copies[-1])
    yield machine_link.device_copy(device, sizes.device_bytes)
    yield from machine_host.adamw(device, sizes.parameters, sizes.rounds, sizes.beside_bytes)
    yield from machine_host.waits(device, sizes.wait_s)
    yield machine_host.imports(sizes.imports)
