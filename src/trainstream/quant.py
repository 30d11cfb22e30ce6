"""Everything of `ts_quant`: the codecs, QuantTensor, quantize."""

from __future__ import annotations

from trainstream._lazy import forward

__getattr__, __dir__ = forward(__name__, "ts_quant")
