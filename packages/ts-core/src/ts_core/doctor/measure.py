"""The measurements of `trainstream doctor --measure`: a few seconds, best of a few tries."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ts_core import _native
from ts_core.memory.arena import PinnedArena

_COPY_BYTES = 256 << 20
_ADAMW_ELEMENTS = 16 << 20
_TRIES = 4


def measurements(with_gpu: bool) -> list[str]:
    """Lines with rates of host copy, host AdamW and, with a GPU, of the link in both directions."""
    lines = [_host_copy(), _host_adamw()]
    if with_gpu:
        lines += _link()
    return lines


def _host_copy() -> str:
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    target = torch.zeros(_COPY_BYTES, dtype=torch.uint8)

    def copy() -> None:
        _native.copy_bytes(target.data_ptr(), source.data_ptr(), _COPY_BYTES)

    return f"host copy: {_COPY_BYTES / _best_seconds(copy) / 1e9:.1f} GB/s copied"


def _host_adamw() -> str:
    param, grad, exp_avg, exp_avg_sq = (torch.ones(_ADAMW_ELEMENTS) for _ in range(4))

    def update() -> None:
        _native.adamw_step(
            param.data_ptr(),
            "float32",
            grad.data_ptr(),
            "float32",
            exp_avg.data_ptr(),
            exp_avg_sq.data_ptr(),
            0,
            _ADAMW_ELEMENTS,
            lr=1e-3,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=1e-2,
            step=1,
        )

    rate = _ADAMW_ELEMENTS / _best_seconds(update) / 1e9
    return f"host AdamW: {rate:.2f} G parameters/s in fp32, {rate * 28:.0f} GB/s moved"


def _link() -> list[str]:
    torch.cuda.init()
    device_d = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    host_h = PinnedArena(slab=_COPY_BYTES).empty(_COPY_BYTES, tag="measurement")
    kind = "page-locked" if host_h.is_pinned() else "pageable"
    lines = []
    for name, target, source in [
        ("host to device", device_d, host_h),
        ("device to host", host_h, device_d),
    ]:

        def copy(target: torch.Tensor = target, source: torch.Tensor = source) -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        rate = _COPY_BYTES / _best_seconds(copy) / 1e9
        lines.append(f"link, {name}: {rate:.1f} GB/s ({kind} memory)")
    return lines


def _best_seconds(action: Callable[[], None]) -> float:
    best = float("inf")
    for _ in range(_TRIES):
        start = time.perf_counter()
        action()
        best = min(best, time.perf_counter() - start)
    return best
