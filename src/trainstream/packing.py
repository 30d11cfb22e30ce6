"""`ts_hf.packing`: pack_sequences, PackedCollator, best_fit."""

from __future__ import annotations

from trainstream._lazy import forward

__getattr__, __dir__ = forward(__name__, "ts_hf.packing")
