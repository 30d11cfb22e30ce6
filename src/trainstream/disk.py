"""Everything of `ts_core.disk`: weights in files, and folders that go with their process."""

from __future__ import annotations

from trainstream._lazy import forward

__getattr__, __dir__ = forward(__name__, "ts_core.disk")
