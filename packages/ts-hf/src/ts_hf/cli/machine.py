"""What to compute on and in, and which layers stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from ts_core.errors import OptionError, OutOfBudgetError
from ts_core.schedule import MachineProfile, ModelProfile, Plan, PlanOptions, make_plan
from ts_core.schedule.plan import in_slots
from ts_hf.families import find_decoder_layers
from ts_hf.sizes import format_bytes

_ROUNDS = 24
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def pick_device(asked: str) -> str:
    """ "cuda" or "cpu" for a `device` setting.

    Raises:
        OptionError: cuda was asked for and there is none.
    """
    if asked == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if asked == "cuda":
        raise OptionError(
            "device='cuda': torch finds no CUDA GPU here (trainstream doctor says why). "
            "Use device=auto or cpu."
        )
    return "cpu"


def pick_dtype(asked: str, device: str) -> str:
    """The name of the dtype for a `dtype` setting: on a CPU, whichever multiplies faster."""
    if asked != "auto":
        return asked
    if device == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    seconds = _matmul_seconds(torch.bfloat16, torch.float32)
    return "bfloat16" if seconds[0] * 1.2 < seconds[1] else "float32"


def _matmul_seconds(*dtypes: torch.dtype) -> list[float]:
    """The best of many, taken in turn: other work on the machine must not decide between them."""
    best = [float("inf")] * len(dtypes)
    pairs = [
        (torch.ones(256, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)) for dtype in dtypes
    ]
    for _ in range(_ROUNDS):
        for k, (a, b) in enumerate(pairs):
            started = time.perf_counter()
            torch.nn.functional.linear(a, b)
            best[k] = min(best[k], time.perf_counter() - started)
    return best


def streaming_options(model: Any, limit_bytes: int | None, device: str) -> dict[str, Any]:
    """Options of wrap() that keep decoder-layer weights under `limit_bytes` of device memory.

    As many layers stay on the device as fit beside the slots that the others stream through. On
    the host device the pool is bounded as well, so going over the limit is an error there.

    Raises:
        OptionError: there is nothing that could stream.
        OutOfBudgetError: not even the slots fit; says what would.
    """
    if limit_bytes is None:
        return {}
    from ts_core.engine.placement import block_leaves, model_profile

    blocks = find_decoder_layers(model)
    sizes = model_profile(model, block_leaves(model, blocks)).pageable
    plan = plan_blocks(sizes, limit_bytes)
    options: dict[str, Any] = {"param_offload": list(plan.paged)}
    if device == "cpu":
        options |= {"vram_limit": limit_bytes, "vram_headroom": 0.0}
    return options


def plan_blocks(sizes: Sequence[int], limit_bytes: int) -> Plan:
    """Which decoder layers stream when their weights may take `limit_bytes` of device memory.

    Args:
        sizes: bytes of the weights of each layer that can stream, as stored.
        limit_bytes: for the layers that stay and the slots.

    Raises:
        OptionError, OutOfBudgetError: as `streaming_options`.
    """
    if not any(sizes):
        raise OptionError(
            "block_limit: the decoder layers hold no weights that could stream. Leave it out."
        )
    plan = make_plan(
        ModelProfile(pageable=tuple(sizes), fixed_device=0, trained=0, host_state=0),
        MachineProfile(device_bytes=limit_bytes, host_available=None, counts_fixed=False),
        PlanOptions(headroom=0.0),
    )
    if not plan.fits:
        least = plan.slot_count * plan.slot_bytes
        raise OutOfBudgetError(
            f"block_limit={format_bytes(limit_bytes)} is too small: layers stream through "
            f"{in_slots(plan.slot_count)} of the largest layer, {format_bytes(plan.slot_bytes)} "
            f"each. Raise it to at least {format_bytes(least)} (the {len(sizes)} layers together "
            f"are {format_bytes(sum(sizes))})."
        )
    return plan
