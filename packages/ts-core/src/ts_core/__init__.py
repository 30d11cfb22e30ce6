"""ts_core: stream weights, gradients and optimizer state between host memory and accelerator.

The names below are the public interface; everything else may change. Importing this package
loads neither the native core nor CUDA.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ts_core.engine import (
        TrainStreamSession,
        find_blocks,
        memory_report,
        quantize_model,
        unwrap,
        wrap,
    )
    from ts_core.engine.activation_offloader import ActivationOffloader
    from ts_core.engine.kv_cache import PagedKVCache
    from ts_core.engine.served import init_lora_from_error
    from ts_core.engine.streamed import StreamedModel
    from ts_core.errors import TrainStreamError
    from ts_core.memory.arena import pinned_stats, reserve_pinned
    from ts_core.optim import OffloadAdamW
    from ts_core.optim.offloader import GradientOffloader
    from ts_core.optim.ready import ParamReadyHooks
    from ts_core.schedule import HardwareProfile, profile_hardware
    from ts_core.store import ParamPager
    from ts_core.transfer import transfer_stats

__version__ = "0.8.0"

_WHERE = {
    "ActivationOffloader": "ts_core.engine.activation_offloader",
    "GradientOffloader": "ts_core.optim.offloader",
    "HardwareProfile": "ts_core.schedule",
    "OffloadAdamW": "ts_core.optim",
    "PagedKVCache": "ts_core.engine.kv_cache",
    "ParamPager": "ts_core.store",
    "ParamReadyHooks": "ts_core.optim.ready",
    "StreamedModel": "ts_core.engine.streamed",
    "TrainStreamError": "ts_core.errors",
    "TrainStreamSession": "ts_core.engine",
    "find_blocks": "ts_core.engine",
    "init_lora_from_error": "ts_core.engine.served",
    "memory_report": "ts_core.engine",
    "pinned_stats": "ts_core.memory.arena",
    "profile_hardware": "ts_core.schedule",
    "quantize_model": "ts_core.engine",
    "reserve_pinned": "ts_core.memory.arena",
    "transfer_stats": "ts_core.transfer",
    "unwrap": "ts_core.engine",
    "wrap": "ts_core.engine",
}

__all__ = [
    "ActivationOffloader",
    "GradientOffloader",
    "HardwareProfile",
    "OffloadAdamW",
    "PagedKVCache",
    "ParamPager",
    "ParamReadyHooks",
    "StreamedModel",
    "TrainStreamError",
    "TrainStreamSession",
    "find_blocks",
    "init_lora_from_error",
    "memory_report",
    "pinned_stats",
    "profile_hardware",
    "quantize_model",
    "reserve_pinned",
    "transfer_stats",
    "unwrap",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(importlib.import_module(_WHERE[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'ts_core' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
