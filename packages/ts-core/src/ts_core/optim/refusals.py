"""What an optimizer that owns hooks, threads and streamed gradients cannot do."""

from __future__ import annotations

from typing import Any

import torch

from ts_core.errors import StateError

_NO_COPY = (
    "an OffloadAdamW cannot be copied or pickled, since it owns hooks and threads. Save "
    "optimizer.state_dict(), and load it into a new one."
)


class RefusingOptimizer(torch.optim.Optimizer):
    """Refuses GradScaler, copies and pickles.

    Raises:
        StateError: from each of them, with the remedy.
    """

    @property
    def _step_supports_amp_scaling(self) -> bool:
        raise StateError(
            "torch.amp.GradScaler cannot work with OffloadAdamW: gradients leave the device before "
            "it could unscale them. Train in bfloat16 (autocast needs no scaler there)."
        )

    def __deepcopy__(self, memo: Any) -> Any:
        raise StateError(_NO_COPY)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(_NO_COPY)
