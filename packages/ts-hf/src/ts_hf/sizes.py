"""Byte counts in words."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """'1.5 GiB' for 1610612736."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
