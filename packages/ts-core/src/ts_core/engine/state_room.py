"""Device memory that optimizer state makes better use of than activations do.

A split optimizer ("hybrid", "auto") keeps as much state on the device as there is room for; the
rest costs time at every step, over the link and on host threads. Activations that are not kept cost
a second forward of their block. Where that is cheaper for the same bytes, and updates are what a
step waits for, activations leave the room to the state.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ts_core.engine.planning import work_of
from ts_core.schedule.activation_policy import BlockActivations
from ts_core.schedule.plan import Work, human
from ts_core.schedule.rates import TYPICAL_GPU, HardwareProfile

if TYPE_CHECKING:
    from ts_core.engine.session import TrainStreamSession


def worth(
    state_bytes: int,
    seconds: float,
    measured: Sequence[BlockActivations],
    work: Work,
    matmul: float,
) -> int:
    """Bytes of room that state should have before activations (a pure function).

    Args:
        state_bytes: of state that is not in device memory.
        seconds: that a step's updates take with it elsewhere.
        measured: per block, what activations take.
        work: of a step.
        matmul: floating-point operations per second.

    Returns:
        `state_bytes`, or 0.
    """
    forward = sum(work.block_flops) / matmul
    kept = sum(max(0, block.saved - block.boundary) for block in measured)
    if not (state_bytes and kept and forward):
        return 0
    hidden = seconds <= (1 + work.backward) * forward  # behind the products of a step
    return 0 if hidden or seconds / state_bytes <= forward / kept else state_bytes


class StateRoom:
    """The room that a session's state is still to take.

    Args:
        session: whose.
        rates: of the machine, where they are known.

    Attributes:
        forward_s: seconds of the products of a forward; 0 until activations have been measured.
    """

    def __init__(self, session: TrainStreamSession, rates: HardwareProfile | None) -> None:
        self._session = weakref.ref(session)
        self._matmul = (rates or TYPICAL_GPU).matmul_bf16
        self._pledged = 0
        self._had = 0
        self.forward_s = 0.0

    def __call__(self) -> int:
        """Bytes now: what was pledged, less what state has taken of it since."""
        session = self._session()
        if session is None or session.optimizer is None or not self._pledged:
            return 0
        return max(0, self._pledged - (session.optimizer.state_on_device() - self._had))

    def pledge(self, measured: Sequence[BlockActivations], room: int) -> int:
        """Activations are known now.

        Args:
            measured: per block.
            room: bytes of device memory beyond a step that recomputes every block.

        Returns:
            How many of them are for the state.
        """
        session = self._session()
        self._pledged = 0
        if session is None or session.optimizer is None:
            return 0
        work = work_of(session.blocks, measured, session.device.torch_device)
        if work is None:
            return 0
        self.forward_s = sum(work.block_flops) / self._matmul
        away = session.optimizer.state_away() if room > 0 else None
        if away is None:
            return 0
        size, seconds = away
        self._pledged = min(room, worth(size, seconds, measured, work, self._matmul))
        self._had = session.optimizer.state_on_device()
        if self._pledged:
            session.log(
                f"activations: {human(self._pledged)} of {human(room)} of room are for optimizer "
                f"state, whose updates take {seconds * 1000:.0f} ms a step elsewhere"
            )
        return self._pledged
