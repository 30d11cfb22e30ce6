"""A row of `ts-bench machine`, and how it is printed."""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """Figures of one kind.

    Attributes:
        what: what was measured.
        unit: of the figures.
        values: figure by name.
        note: what a reader should know.
    """

    what: str
    unit: str
    values: dict[str, float] = field(default_factory=dict)
    note: str = ""


def text_of(row: Row) -> str:
    """One line."""
    figures = ", ".join(f"{name} {_number(value)}" for name, value in row.values.items())
    note = f" ({row.note})" if row.note else ""
    return f"{row.what + ', ' + row.unit:42}{figures}{note}"


def size_of(size_bytes: int) -> str:
    """A size in words."""
    return f"{size_bytes / MIB:g} MiB" if size_bytes < 1024 * MIB else f"{size_bytes / 2**30:g} GiB"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"
