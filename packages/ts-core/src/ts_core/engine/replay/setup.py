"""Whether a wrapped model's blocks are replayed, and by what."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

from ts_core.device import Device
from ts_core.engine.blocks import shared_parameters
from ts_core.engine.replay.cuda_recorder import CudaRecorder
from ts_core.engine.replay.policy import BlockReplay
from ts_core.engine.replay.recorder import Recorder

if TYPE_CHECKING:
    from ts_core.engine.session import TrainStreamSession


def recorder_for(device: Device) -> Recorder | None:
    """What records on a device; None where nothing can."""
    return CudaRecorder(device.torch_device) if device.kind == "cuda" else None


def replay_for(session: TrainStreamSession, model: nn.Module) -> BlockReplay | None:
    """The replay that a session's options ask for, if any; says why not."""
    asked, say = session.config.cuda_graphs, session.log
    if asked is False:
        return None
    if not session.blocks:
        say(f"cuda_graphs={asked!r}: off, as no stack of blocks was found")
        return None
    recorder = recorder_for(session.device)
    if recorder is None:
        say(f"cuda_graphs={asked!r}: off, as there is no GPU")
        return None
    here = weakref.ref(session)

    def settled() -> bool:
        now = here()
        return now is not None and not now.adapting

    def room_bytes() -> int | None:
        now = here()
        usable = None if now is None else now.device.usable_bytes()
        if now is None or usable is None:
            return None
        # What backward needs is there at a step's peak, at a fixed place or not; so a little more
        # than the plan's target may be taken, rather than to run a few blocks eagerly.
        target = int(usable * (1 - now.config.vram_headroom / 2))
        # The pool of the recordings is free in torch's count, and nobody else may have it.
        return target - now.device.memory()["allocated"] - recorder.pool_bytes()

    def give_up() -> str | None:
        now = here()
        if now is None or now.activations is None:
            return None
        memory = now.activations.memory
        apart = memory.apart
        why = memory.no_room_for_recordings()
        if why is not None:
            memory.give_up_recordings()
            if now.adapter is not None:
                now.adapter.corrector.is_free(apart)
        return why

    shared = frozenset(shared_parameters(model, session.blocks))
    return BlockReplay(
        session.blocks,
        recorder,
        session.device.torch_device,
        say,
        settled,
        room_bytes,
        shared,
        give_up,
    )
