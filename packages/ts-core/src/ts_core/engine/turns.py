"""One thread at a time computes with weights that stream.

All threads share one ring of slots and one binding of each weight, so a forward in a second thread
(inference beside training, say) may not begin before the pass in the first is over. A pass is a
forward of the model, a forward of one block called by itself, a backward from its first block to
its end, or an optimizer's step. Threads take turns in the order in which they asked.

A backward's turn belongs to autograd's graph task, not to a thread: on a GPU its hooks run in a
thread of autograd's own. It ends with the task, also when the backward raises: autograd drops the
callback that it was given, and that gives the turn back.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ts_core.device.base import Device, Stream
from ts_core.errors import StateError

PATIENCE_S = 600.0  # without any sign of life from the thread whose turn it is
_LOOK_S = 1.0
_NO_TASK = -1


class _Holder:
    """Whose turn it is."""

    def __init__(self, task: int) -> None:
        self.thread = threading.current_thread()
        self.ident = threading.get_ident()
        self.task = task
        self.depth = 0
        self.signs = 0

    def is_me(self, task: int) -> bool:
        return self.ident == threading.get_ident() or (task != _NO_TASK and self.task == task)

    def is_over(self) -> bool:
        """Whether it can no longer give the turn back."""
        if self.task != _NO_TASK:  # autograd gives it back, whatever happens
            return self.ident == threading.get_ident() and graph_task() == _NO_TASK
        return not self.thread.is_alive()

    def waits_for_backward(self) -> bool:
        """Whether its thread is inside a call of autograd's engine."""
        frame = sys._current_frames().get(self.ident)
        return frame is not None and frame.f_code.co_name == "_engine_run_backward"

    def in_words(self) -> str:
        what = "a forward or step()" if self.task == _NO_TASK else "a backward"
        return f"{what} in thread {self.thread.name!r}"


class Turns:
    """Who may use the blocks now.

    Args:
        device: whose compute streams a change of turns puts in order.
        patience_s: seconds without a sign of life after which a waiting thread raises.

    Attributes:
        before_forward: called when a forward has got the turn.
    """

    def __init__(self, device: Device, patience_s: float = PATIENCE_S) -> None:
        self._device = device
        self._patience_s = patience_s
        # Entered by itself: an interrupt inside the condition's own `with` would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._holder: _Holder | None = None
        self._queue: deque[object] = deque()
        self._last: tuple[int, Stream] | None = None
        self._ends: set[int] = set()  # backwards whose end will be told
        self.before_forward: Callable[[], None] = _nothing
        self._process = os.getpid()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A piece of work during which no other thread's pass runs."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self) -> None:
        """Take the turn, or go in once more; `leave` must follow."""
        if in_backward():
            self.backward(_nothing)
        elif os.getpid() == self._process:  # a forked child is refused by the pager
            self._take(_NO_TASK).depth += 1

    def enter_block(self) -> None:
        """`enter`, before a block's forward."""
        self.enter()
        holder = self._holder
        if holder is not None and holder.task == _NO_TASK and holder.depth == 1:
            self.before_forward()

    def leave(self) -> None:
        """The counterpart of `enter` and `enter_block`."""
        holder = self._holder
        if in_backward() or holder is None or not holder.is_me(_NO_TASK):
            return  # a backward's turn ends with it
        holder.depth -= 1
        if holder.depth <= 0:
            self._give_back(holder)

    def begin_pass(self) -> None:
        """Before the model's forward. What an interrupt left of this thread's last pass ends."""
        if in_backward():
            return
        holder = self._holder
        if holder is not None and holder.is_me(_NO_TASK):
            self._give_back(holder)
        self.enter_block()

    def end_pass(self) -> None:
        """After the model's forward, whether or not it raised."""
        holder = self._holder
        if not in_backward() and holder is not None and holder.is_me(_NO_TASK):
            self._give_back(holder)

    def backward(self, at_end: Callable[[], None]) -> None:
        """Inside a backward: from now to its end the turn is its own.

        One inside a forward, or inside another backward, goes on in the turn there is.

        Args:
            at_end: called when the backward has ended without an error, before the turn is over.
        """
        if os.getpid() != self._process:
            return
        task = graph_task()
        if task not in self._ends:  # asked for first, so that an interrupt leaves no turn behind
            torch.autograd.Variable._execution_engine.queue_callback(_AtEnd(self, task, at_end))
            self._ends.add(task)
        self._take(task)

    def _take(self, task: int) -> _Holder:
        with self._lock:
            holder = self._holder
            if holder is not None and not holder.is_over() and holder.is_me(task):
                holder.signs += 1
                return holder
            if holder is None and not self._queue:
                return self._hold(task)
            ticket = object()
            self._queue.append(ticket)
            try:
                return self._wait(ticket, task)
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()

    def _wait(self, ticket: object, task: int) -> _Holder:
        seen, waited = -1, 0.0
        while True:
            holder = self._holder
            if holder is None or holder.is_over():
                self._holder = None
                if self._queue[0] is ticket:
                    return self._hold(task)
            elif task != _NO_TASK and holder.task == _NO_TASK and holder.waits_for_backward():
                return holder  # a backward inside a forward: the forward's thread waits for us
            elif holder.signs != seen:
                seen, waited = holder.signs, 0.0
            elif waited >= self._patience_s:
                raise StateError(
                    f"{holder.in_words()} has had this model for {waited:.0f} s without getting to "
                    f"its next block, and this thread waits for it: weights that stream are used "
                    f"by one thread at a time. Look for two threads that wait for each other, or "
                    f"let one thread do both."
                )
            if not self._changed.wait(min(_LOOK_S, self._patience_s)):
                waited += min(_LOOK_S, self._patience_s)

    def _hold(self, task: int) -> _Holder:
        holder = self._holder = _Holder(task)
        stream = self._device.compute_stream()
        if self._last is not None and self._last[0] != holder.ident and self._last[1] != stream:
            stream.wait_event(self._last[1].record())
        return holder

    def _give_back(self, holder: _Holder) -> None:
        with self._lock:
            if self._holder is holder:
                self._last = threading.get_ident(), self._device.compute_stream()
                self._holder = None
                self._changed.notify_all()

    def _ended(self, task: int) -> None:
        self._ends.discard(task)
        holder = self._holder
        if holder is not None and holder.task == task:
            self._give_back(holder)


class _AtEnd:
    """Autograd calls it at the end of a graph task, or drops it when the task has failed."""

    _over_already = True  # until it is made: an interrupt may come before

    def __init__(self, turns: Turns, task: int, at_end: Callable[[], None]) -> None:
        self._turns = turns
        self._task = task
        self._at_end = at_end
        self._over_already = False

    def __call__(self) -> None:
        try:
            self._at_end()
        finally:
            self._over()

    def __del__(self) -> None:
        self._over()

    def _over(self) -> None:
        if not self._over_already:
            self._over_already = True
            self._turns._ended(self._task)


def _nothing() -> None:
    pass


def graph_task() -> int:
    """The id of the autograd backward that the calling thread is inside of; -1 for none."""
    return int(torch._C._current_graph_task_id())


def in_backward() -> bool:
    """Whether the calling thread is inside an autograd backward (a recomputation, say)."""
    return graph_task() != _NO_TASK
