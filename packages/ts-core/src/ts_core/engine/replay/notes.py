"""What replay has done and what stayed eager, counted and said once."""

from __future__ import annotations

from collections.abc import Callable

from ts_core.engine.replay.known import SIGNATURES, KnownBlock


class Notes:
    """Counters of one model's replay.

    Args:
        say: takes decisions in plain words.

    Attributes:
        forwards, backwards: replayed.
        recorded, dropped: recordings.
        seconds: spent on recording.
        reasons: why calls were eager, and how many.
        say: as given.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.say = say
        self.forwards = 0
        self.backwards = 0
        self.recorded = 0
        self.dropped = 0
        self.seconds = 0.0
        self.reasons: dict[str, int] = {}
        self._shapes_told = False

    def eager(self, why: str) -> None:
        """A call ran eagerly."""
        if why not in self.reasons:
            self.say(f"cuda_graphs: blocks run eagerly where {why}")
        self.reasons[why] = self.reasons.get(why, 0) + 1

    def backward(self, why: str | None) -> None:
        """A backward was replayed, or was eager for a reason."""
        if why is None:
            self.backwards += 1
        else:
            self.eager(why)

    def shapes(self, block: KnownBlock) -> None:
        """Say once when so many shapes come that few can be kept, and what helps."""
        if self._shapes_told:
            return
        count = block.too_many_shapes()
        if not count:
            return
        self._shapes_told = True
        self.say(
            f"cuda_graphs: batches of {count} shapes have come, and a block keeps recordings "
            f"of {SIGNATURES}: the others run eagerly, or are recorded anew in place of one of "
            f"those. Let few lengths come: pad batches to a multiple (pad_to_multiple_of= of "
            f"TrainStreamTrainer), or pack rows of one length (packing=)"
        )
