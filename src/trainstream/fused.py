"""Everything of `ts_kernels`: the fused kernels, the losses and their references."""

from __future__ import annotations

from trainstream._lazy import forward

__getattr__, __dir__ = forward(__name__, "ts_kernels")
