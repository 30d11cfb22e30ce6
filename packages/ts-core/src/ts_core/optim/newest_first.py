"""Host work in the order in which the next forward asks for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

Result = TypeVar("Result")


class SubmitNewest(Protocol[Result]):
    """As `NewestFirst.submit`."""

    def __call__(
        self, run: Callable[[], Result], ready: Callable[[], bool], /
    ) -> Future[Result]: ...


@dataclass(frozen=True)
class _Work(Generic[Result]):
    future: Future[Result]
    run: Callable[[], Result]
    ready: Callable[[], bool]


class NewestFirst(Generic[Result]):
    """Runs what was submitted last first, among what need not wait; one at a time.

    Backward brings the gradients of the first blocks last, and the next forward reads the weights
    of these blocks first. Where updates take longer than the backward, it so begins while the rest
    is still to be updated.

    Args:
        worker: runs one thing at a time, in order. What work waits for may have been submitted to
            it before that work.
    """

    def __init__(self, worker: Executor) -> None:
        self._worker = worker
        self._waiting: list[_Work[Result]] = []
        self._lock = threading.Lock()

    def submit(self, run: Callable[[], Result], ready: Callable[[], bool]) -> Future[Result]:
        """Queue `run`; `ready()` says, without waiting, whether it would run at once.

        What `ready` raises is for `run` to find: it runs then.
        """
        work = _Work[Result](Future(), run, ready)
        with self._lock:
            self._worker.submit(self._run_one)  # may raise; there is as much work as calls
            self._waiting.append(work)
        return work.future

    def _run_one(self) -> None:
        # As many calls of this were queued as there is work, each behind what its work waits for.
        # So the oldest work that is left has nothing to wait for that is queued behind this call.
        with self._lock:
            newest = range(len(self._waiting) - 1, 0, -1)
            index = next((k for k in newest if _ready(self._waiting[k])), 0)
            work = self._waiting.pop(index)
        future, run = work.future, work.run
        del work
        try:
            result = run()
        except BaseException as error:
            future.set_exception(error)
            del future, run  # the error knows this frame, and must not keep what it worked on
        else:
            future.set_result(result)


def _ready(work: _Work[Result]) -> bool:
    try:
        return work.ready()
    except Exception:  # a device that has failed: whoever waits for the work is to hear of it
        return True
