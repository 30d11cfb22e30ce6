"""What is wrong with the data, gathered so that it is told at once."""

from __future__ import annotations

import json
from typing import Any

from ts_core.errors import DataError

SHOWN = 20
_LONGEST_VALUE = 60


class RecordError(Exception):
    """A record cannot be used; the text says why, without its place."""


class Problems:
    """Gathers places and reasons; only the first `SHOWN` are kept, all are counted."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.count = 0

    def add(self, place: str, reason: str) -> None:
        """Note one."""
        self.count += 1
        if len(self.lines) < SHOWN:
            self.lines.append(f"{place}: {reason}")

    def raise_any(self) -> None:
        """Raise what was noted.

        Raises:
            DataError: anything was.
        """
        if not self.count:
            return
        if self.count == 1:
            raise DataError(f"data: {self.lines[0]}")
        listed = "\n".join(f"  {line}" for line in self.lines)
        more = self.count - len(self.lines)
        rest = f"\n  and {more} more" if more else ""
        raise DataError(
            f"data: {self.count} records cannot be used. Correct or remove them:\n{listed}{rest}"
        )


def shown(value: Any) -> str:
    """A value as it stands in the data, cut short."""
    return shown_line(json.dumps(value, ensure_ascii=False))


def shown_line(text: str) -> str:
    """A line of the data, cut short; what is no character is escaped."""
    short = text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
    return short.encode(errors="backslashreplace").decode()
