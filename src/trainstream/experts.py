"""Stacked experts: finding them, and what `wrap(moe_paging=True)` does with them."""

from __future__ import annotations

from trainstream._lazy import forward

__getattr__, __dir__ = forward(__name__, "ts_hf.experts")
