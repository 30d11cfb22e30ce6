"""What an optimizer that owns hooks, threads and streamed gradients cannot do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ts_core.errors import StateError

_NO_COPY = (
    "an OffloadAdamW cannot be copied or pickled, since it owns hooks and threads. Save "
    "optimizer.state_dict(), and load it into a new one."
)
_NO_SCALER = (
    "torch.amp.GradScaler cannot work with OffloadAdamW: gradients leave the device before it "
    "could unscale them. Train in bfloat16 (autocast needs no scaler there)."
)
# For a gradient that no step() was called for, whatever the reason.
IN_TIME = (
    "Pass accumulation_steps=<backward passes per step> to wrap() (to OffloadAdamW without it), or "
    "set it before the first of them, and call step() after the last: that of the optimizer that "
    "wrap() returned, not of the one that it was given. For a transformers Trainer, use "
    "TrainStreamTrainer."
)


class RefusingOptimizer(torch.optim.Optimizer):
    """Refuses GradScaler, copies and pickles.

    Raises:
        StateError: from each of them, with the remedy.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        install_scaler_guard()
        super().__init__(params, defaults)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        raise StateError(_NO_SCALER)  # GradScaler.step() asks for it

    def __deepcopy__(self, memo: Any) -> Any:
        raise StateError(_NO_COPY)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(_NO_COPY)


def install_scaler_guard() -> None:
    """Guard GradScaler.unscale_() once per process: it would find no gradients and say nothing."""
    original: Callable[..., None] = torch.amp.GradScaler.unscale_
    if getattr(original, "_trainstream_guard", False):
        return

    @functools.wraps(original)
    def unscale_(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        if self.is_enabled() and isinstance(optimizer, RefusingOptimizer):
            raise StateError(_NO_SCALER)
        original(self, optimizer)

    unscale_._trainstream_guard = True  # type: ignore[attr-defined]
    torch.amp.GradScaler.unscale_ = unscale_  # type: ignore[method-assign]
