"""Parameters whose values live in the host image of a paged block: updated there, in place."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from ts_core.device.base import Event
from ts_core.optim.layout import FlatLayout
from ts_core.store.homes import TrainedHome


class HomedLayout(FlatLayout):
    """One paged parameter; its flat memory is its part of the image.

    Args:
        home: the place of the weight in its block's image.
    """

    def __init__(self, home: TrainedHome) -> None:
        self.home = home
        self.params = [home.param]
        self.dtype = home.values_h.dtype
        self.numel = home.values_h.numel()
        self.sizes = [self.numel]
        self.offsets = [0]
        self.bases = [0]
        self._mark: object = home.note_values()

    def flat(self) -> torch.Tensor:
        """The values, 1-D, in host memory."""
        return self.home.values_h

    def view(self, flat: torch.Tensor, position: int) -> torch.Tensor:
        """A flat tensor in the parameter's shape."""
        return flat.view(self.home.param.shape)

    def writing(self) -> AbstractContextManager[object]:
        """To be open while an update is queued: no copy of the image starts meanwhile."""
        return self.home.writing()

    def begin_update(self) -> list[Event]:
        """New values are about to be queued; returns events of copies that may read the old."""
        return self.home.begin_update()

    def note_values(self, positions: Sequence[int] | None = None) -> None:
        """The present values are ours."""
        self._mark = self.home.note_values()

    def note_versions(self, positions: Sequence[int]) -> None:
        """The versions are ours: the image has a mark of its own."""
        self.note_values(positions)

    def doubt_values(self, position: int) -> None:
        """The weight's values may not be those that its state is for: as if just written."""
        self._mark = None

    def foreign_writes(self) -> list[int]:
        """[0] if somebody else wrote values since `note_values`, which are in the image now."""
        mark = self.home.take_writes()
        if mark == self._mark:
            return []
        self._mark = mark
        return [0]
