"""Which recordings are made and kept: within numbers, and within the device memory that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ts_core.engine.replay.known import Entry, KnownBlock
from ts_core.engine.replay.memory import Scratch
from ts_core.engine.replay.notes import Notes
from ts_core.engine.replay.recorder import Recorder
from ts_core.engine.replay.recording import Recording
from ts_core.engine.replay.signature import NotReplayable
from ts_core.schedule.plan import human
from ts_core.store.pager import ParamPager

# Places of its weights (slots) for which one signature keeps recordings.
PLACES = 4
# Recordings that one block may ask for in all: shapes that never repeat are not worth more.
RECORDINGS = 24


class Keeper:
    """Makes the recordings of one model.

    Args:
        recorder: of the device.
        device: the blocks compute on.
        notes: counts, and says what is decided.
        room_bytes: device memory that is left for recordings; None for any.
        give_up: asked before the first recording; says why there is to be none, or None.

    Attributes:
        off: why nothing is recorded or replayed any more, if so.
    """

    def __init__(
        self,
        recorder: Recorder,
        device: torch.device,
        notes: Notes,
        room_bytes: Callable[[], int | None],
        give_up: Callable[[], str | None],
    ) -> None:
        self.off: str | None = None
        self._recorder = recorder
        self._scratch = Scratch(device)
        self._notes = notes
        self._room_bytes = room_bytes
        self._give_up = give_up
        self._place: Any = None

    def check_place(self) -> None:
        """Refuse another stream or thread than that of the first recording.

        Raises:
            NotReplayable: it is another one.
        """
        place = self._recorder.place()
        if self._place is not None and place != self._place:
            raise NotReplayable("a block runs on another stream or thread than the first recording")

    def find(self, here: KnownBlock, entry: Entry) -> Recording | None:
        """The recording of the weights where they are now, if there is one.

        Raises:
            NotReplayable: its memory is still that of a call whose backward is to come.
        """
        assert here.weights is not None
        addresses = here.weights.addresses()
        found = entry.recordings.get(addresses)
        if found is None:
            return None
        entry.recordings.move_to_end(addresses)
        if found.saved.size_bytes and _in_use(found):
            raise NotReplayable("a block runs again before the backward of its last call")
        return found

    def make(
        self,
        here: KnownBlock,
        block: nn.Module,
        entry: Entry,
        forward: Callable[..., Any],
        tensors: Sequence[torch.Tensor],
        mode: str,
        guard: ParamPager | None,
    ) -> Recording | None:
        """Record a call; None where nothing is to be recorded (`off` says why).

        Raises:
            NotReplayable: why this call cannot be.
        """
        assert here.weights is not None and entry.observed is not None
        addresses = here.weights.addresses()
        if not self.beside_bytes():
            self.off = self._give_up()
            if self.off is not None:
                self._notes.say(f"cuda_graphs: off, since {self.off}")
                return None
        if here.recordings >= RECORDINGS:
            raise NotReplayable(
                f"a block was recorded {RECORDINGS} times already, since shapes or places of its "
                f"weights keep changing"
            )
        while len(entry.recordings) >= PLACES:
            entry.recordings.popitem(last=False)
            self._notes.dropped += 1
        here.recordings += 1
        begin = time.perf_counter()
        try:
            made = Recording(
                self._recorder,
                self._scratch,
                block,
                here.weights,
                forward,
                tensors,
                entry.observed,
                mode,
                guard,
                lambda needed: self._check_room(here, entry, needed),
            )
        except Exception as error:
            entry.refused = True
            if self._recorder.broken:
                self.off = "a recording failed"
            if isinstance(error, NotReplayable):
                raise
            text = str(error).strip().split("\n")[0]
            raise NotReplayable(f"recording failed: {type(error).__name__}: {text}") from error
        finally:
            self._notes.seconds += time.perf_counter() - begin
        if not self._notes.recorded:
            self._place = self._recorder.place()
            self._notes.say("cuda_graphs: blocks are recorded from here on, and replayed")
        self._notes.recorded += 1
        entry.recordings[addresses] = made
        return made

    def _check_room(self, here: KnownBlock, entry: Entry, needed: int) -> None:
        room = self._room_bytes()
        if room is None or needed <= room:
            return
        others = [other for other in reversed(here.entries) if other is not entry]
        for other in others:  # the least recently used first
            room += sum(recording.size_bytes for recording in other.recordings.values())
            self._notes.dropped += other.drop()
            if needed <= room:
                return
        raise NotReplayable(
            f"the device has no room for what backward needs of a block at a fixed place "
            f"({human(needed)}, {human(max(room, 0))} are free)"
        )

    def scratch_bytes(self) -> int:
        """Device memory that all recordings share."""
        return self._scratch.size_bytes()

    def pool_bytes(self) -> int:
        """Device memory of the recordings' pool, which torch counts as free between replays."""
        return self._recorder.pool_bytes()

    def beside_bytes(self) -> int:
        """Device memory that recordings hold but for what backward needs."""
        return self.scratch_bytes() + self.pool_bytes()


def _in_use(recording: Recording) -> bool:
    call = None if recording.live is None else recording.live()
    return call is not None and not call.done
