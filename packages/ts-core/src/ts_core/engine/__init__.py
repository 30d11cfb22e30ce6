"""wrap(): a model and an optimizer become a streaming session."""

from __future__ import annotations

from ts_core.engine.blocks import find_blocks
from ts_core.engine.quantize import quantize_model
from ts_core.engine.report import memory_report
from ts_core.engine.session import TrainStreamSession
from ts_core.engine.wrapping import unwrap, wrap

__all__ = [
    "TrainStreamSession",
    "find_blocks",
    "memory_report",
    "quantize_model",
    "unwrap",
    "wrap",
]
