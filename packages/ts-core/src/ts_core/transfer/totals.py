"""transfer_stats(): what this process has sent over the link, by device and direction."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from ts_core.errors import OptionError


@dataclass
class DirectionStats:
    """What went one way over the link."""

    bytes: int = 0
    copies: int = 0
    limit_waits: int = 0

    def add(self, other: DirectionStats) -> None:
        """Count what another one counted, too."""
        self.bytes += other.bytes
        self.copies += other.copies
        self.limit_waits += other.limit_waits


DIRECTIONS = ("h2d", "d2h")
_totals: dict[tuple[torch.device, str], DirectionStats] = {}
_lock = threading.Lock()


def count(device: torch.device, direction: str, size_bytes: int, copies: int, waits: int) -> None:
    """Add copies that were queued, and host waits for the limit on bytes in flight."""
    with _lock:
        total = _totals.setdefault((device, direction), DirectionStats())
        total.bytes += size_bytes
        total.copies += copies
        total.limit_waits += waits


def transfer_stats(device: str | torch.device | None = None) -> dict[str, dict[str, int]]:
    """Bytes and copies that were queued since the process began, by every wrapped model in it.

    Args:
        device: "cuda", "cuda:N", "cpu" or "host", or a torch.device of those; None: all together.

    Returns:
        For "h2d" (to the device) and "d2h": bytes, copies, and limit_waits (how often the host
        waited because too many bytes were in flight).

    Raises:
        OptionError: another device.
    """
    wanted = None if device is None else _named(device)
    found = {name: DirectionStats() for name in DIRECTIONS}
    with _lock:
        for (where, direction), stats in _totals.items():
            if wanted is None or where == wanted or (wanted.index is None and _same(where, wanted)):
                found[direction].add(stats)
    return {name: dict(vars(stats)) for name, stats in found.items()}


def _same(where: torch.device, wanted: torch.device) -> bool:
    """Whether "cuda" without a number means `where`: torch's current GPU."""
    if where.type != wanted.type:
        return False
    return where.type != "cuda" or where.index == torch.cuda.current_device()


def _named(device: str | torch.device) -> torch.device:
    try:
        found = torch.device("cpu" if device == "host" else device)
    except (RuntimeError, TypeError) as error:
        raise _refusal(device) from error
    if found.type not in ("cpu", "cuda"):
        raise _refusal(device)
    return torch.device("cpu") if found.type == "cpu" else found


def _refusal(device: object) -> OptionError:
    return OptionError(
        f"device={device!r} is not accepted. Use None, 'cuda', 'cuda:N', 'cpu', 'host' or a "
        f"torch.device of those."
    )
