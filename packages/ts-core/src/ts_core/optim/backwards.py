"""Whether a backward pass that brought gradients raised before its end."""

from __future__ import annotations

import weakref

import torch


class BackwardWatch:
    """Notes each autograd pass at its first gradient.

    The pass is given a callback for its end. A pass that raises drops the callback without calling
    it, which is how it is known to have failed; one that still runs, on whatever thread, has not.
    Passes inside a pass (reentrant checkpointing) are watched like any other.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._failed = False

    def note(self) -> None:
        """A gradient has come."""
        task = int(torch._C._current_graph_task_id())
        if task == -1 or task in self._seen:
            return
        self._seen.add(task)
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(_End(weakref.ref(self), task))

    def failed(self) -> bool:
        """Whether a pass has raised since `clear`."""
        return self._failed

    def clear(self) -> None:
        """Forget failures."""
        self._failed = False

    def ended(self, task: int, finished: bool) -> None:
        """Called by the end of a pass."""
        self._seen.discard(task)
        if not finished:
            self._failed = True


class _End:
    """Called at the end of a pass; collected without a call when the pass raised."""

    _called = True  # until it is made: an interrupt may come before

    def __init__(self, watch: weakref.ref[BackwardWatch], task: int) -> None:
        self._watch = watch
        self._task = task
        self._called = False

    def __call__(self) -> None:
        self._called = True
        self._tell(True)

    def __del__(self) -> None:
        if not self._called:
            self._tell(False)

    def _tell(self, finished: bool) -> None:
        watch = self._watch()
        if watch is not None:
            watch.ended(self._task, finished)
