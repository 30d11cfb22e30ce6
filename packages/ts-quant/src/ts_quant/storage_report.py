"""What was stored how, and why: one row per matrix."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Considered:
    """A form that was measured.

    Attributes:
        form: what it is, in a few words.
        extra_bytes: bytes beyond the plain form.
        error: relative error it leaves, as in `MatrixReport`.
    """

    form: str
    extra_bytes: int
    error: float


@dataclass(frozen=True)
class MatrixReport:
    """How one matrix is stored.

    Attributes:
        name: name of the weight.
        shape: its shape.
        codec: the format it is stored in.
        stored_bytes: bytes of codes and scales.
        plain_bytes: bytes of the weight before.
        error: relative error of the stored weight (Frobenius norm; columns weighted by
            sqrt(E[x^2]) where activation statistics were given). None if it was not measured.
        rank: directions of the error that adapters can start at; 0 for none.
        error_with_start: relative error with that start; None without one.
        reason: why it is stored so, in plain words.
        outliers: input channels kept in bf16; their bytes are among stored_bytes.
        considered: the forms it was chosen from, the plain one first; empty where none was
            measured.
    """

    name: str
    shape: tuple[int, ...]
    codec: str
    stored_bytes: int
    plain_bytes: int
    error: float | None
    rank: int
    error_with_start: float | None
    reason: str
    outliers: int = 0
    considered: tuple[Considered, ...] = ()


@dataclass
class StorageReport:
    """Every matrix of a model, in the order in which it was stored."""

    codec: str
    rows: dict[str, MatrixReport] = field(default_factory=dict)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all stored matrices."""
        return sum(row.stored_bytes for row in self.rows.values())

    @property
    def plain_bytes(self) -> int:
        """Bytes of the same matrices before."""
        return sum(row.plain_bytes for row in self.rows.values())

    @property
    def kept_precise(self) -> list[str]:
        """Names of the matrices stored one step more precise."""
        return [row.name for row in self.rows.values() if row.codec != self.codec]

    @property
    def error(self) -> float | None:
        """Root mean square over the matrices of their relative errors; None if not measured."""
        errors = [row.error for row in self.rows.values() if row.error is not None]
        if not errors:
            return None
        return math.sqrt(sum(value * value for value in errors) / len(errors))

    def rank_pattern(self) -> dict[str, int]:
        """Layer name -> rank, as peft.LoraConfig(rank_pattern=...) takes it."""
        return {
            row.name.removesuffix(".weight"): row.rank for row in self.rows.values() if row.rank
        }

    def table(self, most: int = 20) -> str:
        """The matrices that lose most, as text."""
        rows = sorted(self.rows.values(), key=lambda row: -(row.error or 0.0))
        width = max((len(row.name) for row in rows[:most]), default=4)
        lines = [f"{'name':{width}}  codec  bytes/weight   error  with start  why"]
        for row in rows[:most]:
            count = math.prod(row.shape)
            error = "      -" if row.error is None else f"{row.error:7.3%}"
            with_start = "" if row.error_with_start is None else f"{row.error_with_start:.3%}"
            lines.append(
                f"{row.name:{width}}  {row.codec:5}  {row.stored_bytes / max(count, 1):12.3f} "
                f"{error}  {with_start:>10}  {row.reason}"
            )
        if len(rows) > most:
            lines.append(f"... and {len(rows) - most} more")
        return "\n".join(lines)

    def to_json(self) -> str:
        """The whole report."""
        whole: dict[str, Any] = {
            "codec": self.codec,
            "stored_bytes": self.stored_bytes,
            "plain_bytes": self.plain_bytes,
            "matrices": [asdict(row) for row in self.rows.values()],
        }
        return json.dumps(whole, indent=1)
