"""Signals that raise (Ctrl-C, say) wait for the end of work that must not stop in the middle."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

# Those whose handlers commonly raise: Ctrl-C, a scheduler's end of time, an alarm.
_SIGNALS = [
    int(getattr(signal, name)) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name)
]
try:  # signal's own functions turn handlers into enums, which takes ten times as long as the rest
    import _signal as fast_signal  # type: ignore[import-not-found]
except ImportError:  # not CPython
    import signal as fast_signal


class HeldBack:
    """While it is entered, the first signal of a kind waits; a second one goes through.

    Python runs handlers of signals in the main thread, between any two of its instructions.
    Elsewhere, and where no Python handler is installed, this does nothing. May be nested.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._handlers: dict[int, Any] = {}
        self._came: list[int] = []

    def __enter__(self) -> None:
        if not _in_main_thread():
            return
        if self._depth == 0:
            self._handlers, self._came = {}, []
            try:
                for number in _SIGNALS:
                    self._hold(number)
            except BaseException:
                self._restore()
                raise
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not _in_main_thread():
            return
        self._depth -= 1
        if self._depth == 0:
            self._restore()

    def _hold(self, number: int) -> None:
        handler = fast_signal.getsignal(number)
        if callable(handler):
            self._handlers[number] = handler
            fast_signal.signal(number, self._note)

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            if fast_signal.getsignal(number) == self._note:  # not replaced meanwhile
                fast_signal.signal(number, handler)
        came, self._came = self._came, []  # only now does no more come
        for number in came:
            self._handlers[number](number, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number not in self._came:
            self._came.append(number)
            return
        handler = self._handlers.get(number)
        if handler is not None:
            handler(number, frame)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


held_back = HeldBack()
