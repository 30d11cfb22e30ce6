"""Bytes by tag for one pool of device memory, with an optional limit."""

from __future__ import annotations

import threading
from types import TracebackType

from ts_core.errors import OutOfBudgetError


class Reservation:
    """Bytes held in a `Ledger` until `release()`, or the end of a `with` block.

    Attributes:
        nbytes: bytes held; 0 once released.
        tag: what they are for.
    """

    def __init__(self, ledger: Ledger, nbytes: int, tag: str) -> None:
        self._ledger = ledger
        self.nbytes = nbytes
        self.tag = tag

    def release(self) -> None:
        """Gives the bytes back; does nothing the second time."""
        self._ledger._release(self)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"Reservation({self.nbytes} bytes, tag={self.tag!r})"


class Ledger:
    """Accounts for the bytes of a pool; allocates nothing itself. Thread-safe.

    Args:
        limit: the most bytes that may be reserved at once; None for no limit.
        name: what the pool is called in errors.
    """

    def __init__(self, limit: int | None = None, *, name: str = "device memory") -> None:
        self.limit = limit
        self.name = name
        self._lock = threading.Lock()
        self._by_tag: dict[str, int] = {}
        self._used = 0
        self._peak = 0

    def reserve(self, nbytes: int, tag: str) -> Reservation:
        """Takes `nbytes` out of the pool.

        Returns:
            What holds them: call `release()` on it, or use it in a `with` statement.

        Raises:
            OutOfBudgetError: they do not fit under the limit.
            ValueError: `nbytes` is negative.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes={nbytes}: expected a number >= 0")
        with self._lock:
            limit = self._limit
            if limit is not None and self._used + nbytes > limit:
                raise OutOfBudgetError(self._refusal(limit, nbytes, tag))
            self._used += nbytes
            self._peak = max(self._peak, self._used)
            self._by_tag[tag] = self._by_tag.get(tag, 0) + nbytes
        return Reservation(self, nbytes, tag)

    @property
    def limit(self) -> int | None:
        """The most bytes that may be reserved at once; lowering it below `used` frees nothing."""
        return self._limit

    @limit.setter
    def limit(self, limit: int | None) -> None:
        if limit is not None and limit < 0:
            raise ValueError(f"limit={limit}: expected None or a number of bytes >= 0")
        self._limit = limit

    @property
    def used(self) -> int:
        """Bytes reserved now."""
        return self._used

    @property
    def peak(self) -> int:
        """The most bytes reserved at once since the start or `reset_peak()`."""
        return self._peak

    @property
    def free(self) -> int | None:
        """Bytes that may still be reserved; None without a limit."""
        with self._lock:
            return None if self._limit is None else max(self._limit - self._used, 0)

    def by_tag(self) -> dict[str, int]:
        """Bytes reserved now by tag, without the tags that hold none."""
        with self._lock:
            return {tag: held for tag, held in sorted(self._by_tag.items()) if held}

    def reset_peak(self) -> None:
        """Starts the peak again from what is reserved now."""
        with self._lock:
            self._peak = self._used

    def _release(self, reservation: Reservation) -> None:
        with self._lock:
            self._used -= reservation.nbytes
            self._by_tag[reservation.tag] -= reservation.nbytes
            reservation.nbytes = 0

    def _refusal(self, limit: int, nbytes: int, tag: str) -> str:
        held = ", ".join(f"{name} {size}" for name, size in sorted(self._by_tag.items()) if size)
        return (
            f"{nbytes} bytes for {tag!r} do not fit in the {self.name}: limit {limit}, used "
            f"{self._used} ({held or 'nothing'}), short by {self._used + nbytes - limit} bytes. "
            f"Raise the limit or keep less there."
        )
