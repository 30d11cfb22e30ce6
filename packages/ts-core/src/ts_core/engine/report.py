"""memory_report(): where the bytes are, and what was decided, as plain data."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from ts_core.engine.served import stored_codecs
from ts_core.engine.session import ATTRIBUTE, TrainStreamSession
from ts_core.errors import StateError
from ts_core.memory.arena import pinned_stats
from ts_core.optim.read_guard import can_guard
from ts_core.store.leaves import stored_bytes


def memory_report(model: nn.Module | None = None) -> dict[str, Any]:
    """Memory by tier and decisions by topic.

    Args:
        model: a wrapped model; None for what concerns the process alone.

    Returns:
        gpu (allocated, reserved, peak_allocated; on the host device of the streaming pool),
        pinned (bytes), pinned_by_tag; with a model also events, transfers (bytes and copies by
        direction), optimizer, resident (bytes of blocks and slots on the device), params
        (paged_blocks, block_bytes, load_bytes, loads, demand_loads, quantized_blocks,
        quantize, the codecs in which weights of the blocks are stored, whoever stored them, joined
        by "+", or None; table_bytes, of input embeddings in host memory;
        outliers, the share of input channels that stored weights were given;
        bounce_bytes, copied through the staging ring; staged_blocks, staged_bytes, disk_blocks,
        disk_bytes, kept there, and disk_read_bytes),
        activations (policy per block, offloaded_blocks, recompute_blocks, decision, block_bytes;
        None for a model without blocks), attention,
        experts (with moe_paging, else None: layers, experts, host_bytes, slot_bytes, calls, picked,
        loads, load_bytes, whole_bytes),
        replay (with cuda_graphs on a GPU, else None: on, recorded, dropped, replayed_forwards,
        replayed_backwards; eager, calls by reason; saved_bytes, scratch_bytes, pool_bytes,
        seconds_recording)
        and plan (target_vram, settled, history of the steps that were looked at, budget, predicted
        and predicted_host in bytes by use, seconds, measured, reasons; expected, the peak of a step
        in bytes by what the first one showed, None before that; recordings, where there
        is a replay, else None: predicted and measured bytes beside the activations they keep).

    Raises:
        StateError: the model is not wrapped.
    """
    pinned = pinned_stats()
    report: dict[str, Any] = {
        "gpu": _process_gpu(),
        "pinned": pinned["arena_used"],
        "pinned_by_tag": {
            tag: size for tag, size in pinned.items() if not tag.startswith(("arena_", "host_"))
        },
    }
    if model is None:
        return report
    session: TrainStreamSession | None = getattr(model, ATTRIBUTE, None)
    if session is None:
        raise StateError("the model is not wrapped: memory_report() takes what wrap() returned.")
    report["gpu"] = session.device.memory()
    report["events"] = list(session.events)
    report["transfers"] = {name: asdict(stats) for name, stats in session.copies.stats().items()}
    report["optimizer"] = {} if session.optimizer is None else session.optimizer.stats()
    report["resident"] = session.device.pool.by_tag()
    report["params"] = _params(session)
    parts: dict[str, Any] = {
        "activations": session.activations,
        "attention": session.attention,
        "experts": session.experts,
        "replay": session.replay,
    }
    for name, part in parts.items():
        report[name] = None if part is None else part.report()
    report["plan"] = _plan(session)
    return report


def _plan(session: TrainStreamSession) -> dict[str, Any]:
    plan, adapter = session.plan, session.adapter
    corrector = None if adapter is None else adapter.corrector
    return {
        "target_vram": plan.predicted.get("budget"),
        "settled": not session.adapting,
        "history": [] if corrector is None else [asdict(entry) for entry in corrector.history],
        "budget": session.device.usable_bytes(),
        "predicted": dict(plan.predicted),
        "predicted_host": dict(plan.host),
        "expected": None if adapter is None else adapter.expected_peak,
        "seconds": dict(plan.seconds),
        "measured": {
            "peak_allocated": session.device.memory()["peak_allocated"],
            "beside_blocks_and_slots": 0 if corrector is None else corrector.needed,
        },
        "reasons": list(plan.reasons),
        "recordings": _recordings(session),
    }


def _recordings(session: TrainStreamSession) -> dict[str, int] | None:
    """Device memory that recordings of blocks take beside the activations that they keep."""
    if session.replay is None:
        return None
    activations = session.activations
    predicted = 0 if activations is None else activations.memory.for_recordings
    return {"predicted": predicted, "measured": session.replay.beside_bytes()}


def _params(session: TrainStreamSession) -> dict[str, Any]:
    pager = session.pager
    stats = None if pager is None else pager.stats
    return {
        "paged_blocks": list(session.plan.paged),
        "quantize": "+".join(stored_codecs(session.blocks)) or None,
        "quantized_blocks": sum(
            not can_guard(list(block.parameters())) for block in session.blocks
        ),
        "outliers": session.quantized.get("outliers", 0.0),
        "block_bytes": sum(stored_bytes(p) for block in session.blocks for p in block.parameters()),
        "slots": 0 if pager is None else len(pager.ring.slots),
        "slot_bytes": 0 if pager is None else pager.ring.slot_bytes,
        "table_bytes": 0 if session.tables is None else session.tables.size_bytes,
        "loads": 0 if stats is None else stats.loads,
        "demand_loads": 0 if stats is None else stats.demand_loads,
        "load_bytes": 0 if stats is None else stats.load_bytes,
        **_stored(session),
    }


def _stored(session: TrainStreamSession) -> dict[str, Any]:
    assert session.store is not None  # wrap() makes one, empty when nothing streams
    stored = session.store.stored()
    return {
        "bounce_bytes": stored.staged_read,
        "staged_blocks": session.store.blocks_in("staged"),
        "staged_bytes": stored.staged,
        "disk_blocks": session.store.blocks_in("disk"),
        "disk_bytes": stored.disk,
        "disk_read_bytes": stored.disk_read,
    }


def _process_gpu() -> dict[str, int]:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {"allocated": 0, "reserved": 0, "peak_allocated": 0}
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "peak_allocated": torch.cuda.max_memory_allocated(),
    }
