"""What a caller asks of the activations of a stack of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ts_core.config import WrapOptions
from ts_core.engine.blocks import needs_stack
from ts_core.errors import OptionError


@dataclass(frozen=True)
class ActivationOptions:
    """See wrap() for the first five and ActivationOffloader for the others.

    `max_slowdown` of None: memory alone decides. `replayed`: blocks are replayed, which those with
    paged activations cannot be, so "auto" pages only what cannot be recomputed instead.
    """

    offload: Any = "auto"
    recompute: Any = "auto"
    min_bytes: int = 1 << 20
    prefetch_depth: int = 1
    headroom: float = 0.10
    max_slowdown: float | None = None
    calibrate_steps: int = 3
    tune_window: int = 3
    trials: bool = True
    replayed: bool = False

    @property
    def recompute_asked(self) -> Any:
        """`recompute` with a list as a tuple."""
        return tuple(self.recompute) if isinstance(self.recompute, list) else self.recompute

    @property
    def searches(self) -> bool:
        """Whether anything is left to decide."""
        return "auto" in (self.offload, self.recompute)

    def autos_in_words(self) -> str:
        """The options left to "auto", as they were written."""
        named = (("activation_offload", self.offload), ("recompute", self.recompute))
        return ", ".join(f"{name}='auto'" for name, value in named if value == "auto")


def activation_options(config: WrapOptions, replayed: bool = False) -> ActivationOptions:
    """Those of wrap(), with blocks replayed or not."""
    return ActivationOptions(
        config.activation_offload,
        config.recompute,
        config.min_offload_bytes,
        config.prefetch_depth,
        config.vram_headroom,
        replayed=replayed,
    )


def check_activation_options(offload: Any, recompute: Any, count: int) -> None:
    """Refuse what a stack of `count` blocks cannot do.

    Raises:
        OptionError: a block that does not exist, or no blocks at all.
    """
    for name, value in (("activation_offload", offload), ("recompute", recompute)):
        if count == 0 and value != "auto" and value:
            raise needs_stack(f"{name}={value!r}")
    named = recompute if isinstance(recompute, list | tuple) else ()
    beyond = [index for index in named if index >= count]
    if beyond:
        raise OptionError(
            f"recompute names blocks {beyond}, but the model has {count}. Use indices from 0 to "
            f"{count - 1}."
        )
