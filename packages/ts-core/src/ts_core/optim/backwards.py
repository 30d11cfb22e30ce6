"""Which backward passes brought gradients, and whether one of them never came to its end."""

from __future__ import annotations

import threading

import torch


class BackwardWatch:
    """Notes each autograd pass at its first gradient and forgets it when it has finished.

    A pass that raises never finishes. Passes inside a pass (reentrant checkpointing) are watched
    like any other.
    """

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._last = -1
        self._lock = threading.Lock()

    def note(self) -> None:
        """A gradient has come."""
        task = int(torch._C._current_graph_task_id())
        if task == -1 or task == self._last:
            return
        with self._lock:
            self._last = task
            if task in self._open:
                return
            self._open.add(task)
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self._finished(task))

    def _finished(self, task: int) -> None:
        with self._lock:
            self._open.discard(task)

    def unfinished(self) -> bool:
        """Whether a pass has not finished (or still runs)."""
        return bool(self._open)

    def clear(self) -> None:
        """Forget all of them."""
        with self._lock:
            self._open.clear()
            self._last = -1
