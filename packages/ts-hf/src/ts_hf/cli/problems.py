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
    """Gathers places and reasons; the first `SHOWN` are told in the order of the data."""

    def __init__(self) -> None:
        self._found: list[tuple[int, str]] = []

    def add(self, place: str, reason: str, number: int | None = None) -> None:
        """Note one.

        Args:
            place: file and line.
            reason: what is wrong.
            number: of the record, in the order in which the data was read; by default this is the
                order of the calls.
        """
        self._found.append((len(self._found) if number is None else number, f"{place}: {reason}"))

    @property
    def count(self) -> int:
        """How many were noted."""
        return len(self._found)

    @property
    def lines(self) -> list[str]:
        """The first ones."""
        return [line for _, line in sorted(self._found)[:SHOWN]]

    def raise_any(self) -> None:
        """Raise what was noted.

        Raises:
            DataError: anything was.
        """
        if not self.count:
            return
        lines = self.lines
        if self.count == 1:
            raise DataError(f"data: {lines[0]}")
        listed = "\n".join(f"  {line}" for line in lines)
        more = self.count - len(lines)
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
