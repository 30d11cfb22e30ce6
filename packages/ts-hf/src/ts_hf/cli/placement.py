"""Where each block of a wrapped model lives, as plain data for the run's history."""

from __future__ import annotations

from typing import Any

from torch import nn

DEVICE, STREAMS, DISK = "device", "streams", "disk"


def placement(model: nn.Module) -> dict[str, Any]:
    """Blocks in order, and what the streamed ones pass through.

    Returns:
        blocks: a list of dicts with bytes (as stored, host or device), place ("device": stays
        there; "streams": lives in host memory and is copied in when it is needed; "disk": the same
        from a memory-mapped file), format (codec name, or dtype; several joined by "+") and
        activations (what happens to them between forward and backward, or None where the session
        does not say); slots and slot_bytes: the device buffers that blocks stream through.
    """
    from ts_core import memory_report
    from ts_core.store.leaves import stored_bytes

    report = memory_report(model)
    params = report["params"]
    session: Any = model._trainstream_session
    paged = set(params["paged_blocks"])
    on_disk = set(params.get("disk_blocks", ()))
    policy = (report.get("activations") or {}).get("policy") or []
    blocks = []
    for index, block in enumerate(session.blocks):
        place = DISK if index in on_disk else STREAMS if index in paged else DEVICE
        blocks.append(
            {
                "bytes": sum(stored_bytes(parameter) for parameter in block.parameters()),
                "place": place,
                "format": _formats(block),
                "activations": policy[index] if index < len(policy) else None,
            }
        )
    return {"blocks": blocks, "slots": params["slots"], "slot_bytes": params["slot_bytes"]}


def _formats(block: nn.Module) -> str:
    """Formats of the block's matrices, those of most values first."""
    values: dict[str, int] = {}
    for parameter in block.parameters():
        if parameter.dim() < 2 or parameter.requires_grad:
            continue
        name = str(getattr(parameter, "codec", None) or parameter.dtype).removeprefix("torch.")
        values[name] = values.get(name, 0) + parameter.numel()
    if not values:
        trained = next((p for p in block.parameters() if p.dim() >= 2), None)
        return "" if trained is None else str(trained.dtype).removeprefix("torch.")
    return "+".join(sorted(values, key=lambda name: -values[name]))
