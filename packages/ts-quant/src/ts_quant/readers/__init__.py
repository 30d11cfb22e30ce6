"""Read quantized checkpoints as they are stored, without decoding them.

`plan_reading` finds the quantized weights among a checkpoint's tensors; each module beside it
knows one format.
"""

from __future__ import annotations

from ts_quant.readers.plan import ReadPlan, StoredWeight, plan_reading

__all__ = ["ReadPlan", "StoredWeight", "plan_reading"]
