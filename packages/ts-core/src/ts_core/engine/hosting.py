"""Host memory of a wrapped model: what is reserved up front, and where paged weights are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ts_core.config import parse_bytes
from ts_core.device import Device
from ts_core.engine.session import TrainStreamSession
from ts_core.memory.arena import PinnedArena, default_arena
from ts_core.memory.budget import page_lock_budget
from ts_core.memory.ram import ram_available_bytes
from ts_core.schedule.plan import human
from ts_core.store import BlockImage, ImageStore, Leaf

# RAM available for each byte that "auto" reserves.
_AUTO_SHARE = 8


def build_images(
    session: TrainStreamSession, leaves: Mapping[int, Sequence[Leaf]]
) -> list[BlockImage]:
    """Reserve host memory as `host_arena` says and build the images of the paged blocks.

    Args:
        session: gets the store, which `session.close()` closes.
        leaves: by index of the paged blocks.
    """
    arena = default_arena()
    reserved = reserve_arena(session.config.host_arena, arena, session.device, bool(leaves))
    if reserved:
        session.log(f"host_arena: {human(reserved)} reserved up front")
        if arena.refusal:
            session.log(f"host_arena: {arena.refusal}")
    session.store = ImageStore(
        session.copies,
        arena,
        page_lock_budget(),
        session.config.disk_offload,
        session.log,
        memory_bytes=session.plan.host.get("weights"),
    )
    return session.store.build(leaves)


def reserve_arena(asked: Any, arena: PinnedArena, device: Device, streams: bool) -> int:
    """Reserve host memory up front; the bytes newly mapped.

    Args:
        asked: the option: False or None for nothing, bytes, or "auto": one slab when blocks stream
            to a device with memory of its own and RAM is plentiful.
        arena: where.
        device: that copies from it.
        streams: whether blocks stream.
    """
    if asked is None or asked is False:
        return 0
    if asked != "auto":
        size_bytes = parse_bytes("host_arena", asked)
        assert size_bytes is not None
        return arena.reserve(size_bytes)
    if not (streams and device.separate_memory):
        return 0
    if arena.slab * _AUTO_SHARE > ram_available_bytes() or arena.held_bytes > 0:
        return 0
    return arena.reserve(arena.slab)
