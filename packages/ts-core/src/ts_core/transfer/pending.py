"""A copy that another thread has yet to queue."""

from __future__ import annotations

import threading

from ts_core.device.base import Event


class PendingCopy:
    """Stands for the event of a copy whose last part has not been queued yet. Thread-safe.

    The thread that queues it calls `begin` and, unless that says no, ends it once: with `finish`,
    `fail` or `abandon`. Others may wait for that (`queued`), or have it stopped (`cancel`).
    """

    def __init__(self) -> None:
        self._settled = threading.Event()
        self._lock = threading.Lock()
        self._begun = False
        self._cancelled = False
        self._event: Event | None = None
        self._error: BaseException | None = None

    @property
    def cancelled(self) -> bool:
        """Whether the queueing thread should stop and `abandon` it."""
        return self._cancelled

    def begin(self) -> bool:
        """Whether to queue it: False when it was cancelled before (and is settled then)."""
        with self._lock:
            self._begun = not self._cancelled
            return self._begun

    def finish(self, event: Event) -> None:
        """Everything has been queued; `event` follows the last part."""
        self._event = event
        self._settled.set()

    def fail(self, error: BaseException) -> None:
        """It cannot be queued; whoever waits for it gets `error`."""
        self._error = error
        self._settled.set()

    def abandon(self) -> None:
        """Nothing more will be queued, as was asked with `cancel`."""
        self._settled.set()

    def queued(self) -> Event:
        """Block the calling host thread until all parts are queued; the event of the last one.

        Raises:
            BaseException: what the queueing thread failed with.
        """
        self._settled.wait()
        if self._error is not None:
            raise self._error
        if self._event is None:
            raise RuntimeError("a copy that was cancelled was waited for")
        return self._event

    def started(self) -> Event | None:
        """The same, but None when it failed or was cancelled: nothing is read any more then."""
        self._settled.wait()
        event = self._event
        return event.started() if isinstance(event, PendingCopy) else event

    def cancel(self) -> None:
        """Have it stopped and wait until nothing more is queued; parts in flight go on."""
        with self._lock:
            self._cancelled = True
            if not self._begun:
                self._settled.set()
        self._settled.wait()

    def query(self) -> bool:
        """Whether the copy has finished."""
        return self._settled.is_set() and self._event is not None and self._event.query()

    def synchronize(self) -> None:
        """Block the calling host thread until the copy has finished."""
        self.queued().synchronize()
