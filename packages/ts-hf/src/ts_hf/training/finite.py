"""Notice a NaN or infinite loss before anything is saved, without stalling a GPU.

On the CPU the loss is looked at before backward, so the weights stay as they were. On a GPU the
flag is copied to the host behind the forward pass and read one micro-batch later, or before the
next step is logged or saved, so the queue never drains for it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ts_core.errors import NonFiniteError


class FiniteGuard:
    """Watches the training loss."""

    def __init__(self) -> None:
        self._pending: tuple[int, Tensor, Tensor, torch.cuda.Event] | None = None

    def watch(self, loss: Tensor, step: int) -> None:
        """Look at `loss`, the micro-batch's of optimizer step `step` (counted from 1).

        Raises:
            NonFiniteError: it, or on a GPU the one before it, is NaN or infinite.
        """
        loss = loss.detach()
        if not loss.is_cuda:
            if not torch.isfinite(loss).all():
                raise _error(step, loss, updated=False)
            return
        self.settle()
        flag = torch.empty((), dtype=torch.bool, pin_memory=True)
        flag.copy_(torch.isfinite(loss).all(), non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(loss.device))
        self._pending = (step, flag, loss, event)

    def settle(self) -> None:
        """Read the flag still under way.

        Raises:
            NonFiniteError: that loss is NaN or infinite.
        """
        if self._pending is None:
            return
        step, flag, loss, event = self._pending
        self._pending = None
        event.synchronize()
        if not bool(flag):
            raise _error(step, loss, updated=True)


def check_gradient_norm(norm: float | None, step: int) -> None:
    """Raise NonFiniteError if the gradient norm of optimizer step `step` is NaN or infinite."""
    if norm is not None and not math.isfinite(norm):
        raise NonFiniteError(
            f"the gradient norm is {norm} at step {step}, though the loss is finite. The weights "
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
