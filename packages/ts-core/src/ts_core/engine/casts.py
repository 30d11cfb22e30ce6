"""Autocast's copies of the weights of blocks that are computed again in backward.

Autocast keeps a low-precision copy of each trained weight that it converts, so that the next use of
the weight finds it, until its context is left. Under the usual context around a whole forward that
is a second copy of the model, beside blocks whose activations are not even kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ts_core.engine.blocks import shared_parameters


class Casts:
    """Lets go of the copies when a block has been computed.

    Where several blocks, a block and the rest of the model, or several calls of a block use a
    weight, its copy stays: the gradients of its uses are then summed in low precision, as without
    this, and not one by one in high. Other weights that are used before a block and after it, in
    one context (two forwards of the model for one loss), have a copy for each use.

    Args:
        blocks: the stack.
        model: that it is part of.
    """

    def __init__(self, blocks: Sequence[nn.Module], model: nn.Module | None = None) -> None:
        whole = nn.Module() if model is None else model
        shared = shared_parameters(whole, blocks)
        trained = (p for block in blocks for p in block.parameters() if p.requires_grad)
        self._once = not any(id(parameter) in shared for parameter in trained)
        self._called: set[int] = set()

    def new_pass(self) -> None:
        """A forward of the model begins."""
        self._called.clear()

    def computed(self, index: int, device_type: str) -> None:
        """A block that will be computed again has been, here under the caller's autocast."""
        if index in self._called:
            self._once = False
        self._called.add(index)
        if not self._once or not torch.is_autocast_enabled(device_type):
            return
        if torch.is_autocast_cache_enabled():
            torch.clear_autocast_cache()


@contextlib.contextmanager
def casts_anew() -> Iterator[None]:
    """Autocast's copies of weights are made inside, and do not stay for others.

    Also where autocast is off at this point: a context inside is nested in one that is off, say,
    and does not let go of its copies at its end.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
