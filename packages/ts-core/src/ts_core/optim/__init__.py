"""AdamW whose state lives in host memory, fed by gradients as autograd produces them."""

from __future__ import annotations

from ts_core.optim.adamw import OffloadAdamW
from ts_core.optim.convert import check_convertible, convert_optimizer

__all__ = ["OffloadAdamW", "check_convertible", "convert_optimizer"]
