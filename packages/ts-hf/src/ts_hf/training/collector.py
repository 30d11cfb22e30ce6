"""Python's cyclic garbage collector during training."""

from __future__ import annotations

import gc
from typing import Any

from transformers import TrainerCallback

STEPS_BEFORE = 10


class HeapSetAside(TrainerCallback):  # type: ignore[misc]
    """Leaves what exists after some steps out of collections, until `release`.

    A full collection looks at every object of the process: about 0.3 s with torch and transformers
    loaded, every 15 to 40 steps, in which the device runs dry. What lives by then outlives training
    for the most part; what later steps make is collected as ever. Does nothing where somebody else
    has set objects aside (`gc.freeze`) or has turned the collector off.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._mine = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the steps of this training."""
        self._steps += 1
        if self._steps == STEPS_BEFORE and gc.isenabled() and not gc.get_freeze_count():
            gc.collect()
            gc.freeze()
            self._mine = True

    def release(self) -> None:
        """Training has ended, in whatever way: the collector looks at everything again."""
        self._steps = 0
        if self._mine:
            self._mine = False
            gc.unfreeze()
