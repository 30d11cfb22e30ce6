"""What the entry points of the group `trainstream.kernels` name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ts_kernels import reference
from ts_kernels._cross_entropy import chunked_cross_entropy
from ts_kernels._rms_norm import rms_norm


@dataclass(frozen=True)
class Kernel:
    """A kernel and its plain PyTorch reference, with the same signature.

    Attributes:
        name: the entry point's name.
        fn: what to call.
        reference: the same function op by op, for checks.
        API_VERSION: version of this interface.
    """

    name: str
    fn: Callable[..., Any]
    reference: Callable[..., Any]
    API_VERSION: int = 1


RMS_NORM = Kernel("rms_norm", rms_norm, reference.rms_norm)
CHUNKED_CROSS_ENTROPY = Kernel(
    "chunked_cross_entropy", chunked_cross_entropy, reference.chunked_cross_entropy
)
