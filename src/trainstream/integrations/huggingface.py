"""Everything of `ts_hf`: load_model, wrap_hf, TrainStreamTrainer and their helpers."""

from __future__ import annotations

from trainstream._lazy import forward

__getattr__, __dir__ = forward(__name__, "ts_hf")
