"""Notice a NaN or infinite loss or gradient norm before anything is saved, without stalling a GPU.

On the CPU the loss is looked at before backward, so the weights stay as they were. On a GPU its
flag is copied to the host behind the forward pass. That flag and the norm of a step, which the
optimizer measures, are read one micro-batch later, or before the next step is logged or saved, so
the queue never drains for them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ts_core.errors import NonFiniteError


class FiniteGuard:
    """Watches the training loss and the gradient norm."""

    def __init__(self) -> None:
        self._pending: deque[Callable[[], None]] = deque()

    def watch(self, loss: Tensor, step: int) -> None:
        """Look at `loss`, the micro-batch's of optimizer step `step` (counted from 1).

        Raises:
            NonFiniteError: it is NaN or infinite, or what was left to look at before it (on a GPU
                the loss before it, after a step that step's norm).
        """
        loss = loss.detach()
        self.settle()
        if not loss.is_cuda:
            if not torch.isfinite(loss).all():
                raise _error(step, loss, updated=False)
            return
        flag = torch.empty((), dtype=torch.bool, pin_memory=True)
        flag.copy_(torch.isfinite(loss).all(), non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(loss.device))
        self._pending.append(partial(_check_loss, step, flag, loss, event))

    def watch_norm(self, norm: Callable[[], float] | None, step: int) -> None:
        """Look at the gradient norm of optimizer step `step` later.

        Args:
            norm: waits for it and gives it (`OffloadAdamW.pending_grad_norm`); None: not measured.
            step: counted from 1.

        Raises:
            NonFiniteError: an earlier loss or norm is NaN or infinite.
        """
        while len(self._pending) > 2:  # where nobody watches losses, nothing else would look
            self._pending.popleft()()
        if norm is not None:
            self._pending.append(partial(_check_norm, step, norm))

    def settle(self) -> None:
        """Read what is still under way, oldest first.

        Raises:
            NonFiniteError: one of those is NaN or infinite.
        """
        while self._pending:
            self._pending.popleft()()


def _check_loss(step: int, flag: Tensor, loss: Tensor, event: torch.cuda.Event) -> None:
    event.synchronize()
    if not bool(flag):
        raise _error(step, loss, updated=True)


def _check_norm(step: int, norm: Callable[[], float]) -> None:
    found = norm()
    if not math.isfinite(found):
        raise NonFiniteError(
            f"the gradient norm is {found} at step {step}, though the loss is finite. The weights "
            f"in memory have been updated with it: go on from the last checkpoint, with a lower "
            f"learning rate or without the batch."
        )


def _error(step: int, loss: Tensor, *, updated: bool) -> NonFiniteError:
    kept = (
        "The weights in memory may have been updated with it: go on from the last checkpoint."
        if updated
        else "The weights have not been updated with it; the last checkpoint is intact."
    )
    return NonFiniteError(
        f"the training loss is {loss.float().mean().item()} at step {step}. {kept} Usual reasons: "
        f"a learning rate that is too high, or a batch that is broken."
    )
