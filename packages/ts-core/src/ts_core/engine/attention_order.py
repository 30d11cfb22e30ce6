"""Changing the order of torch's attention kernels for a while, from several threads.

torch keeps one order for the whole process. Passes of several threads may overlap in any way, so
the order from before comes back when the last of them ends, not when each ends.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, _sdpa_kernel


class _Mine(threading.local):
    """The orders that the calling thread has open, outermost first."""

    def __init__(self) -> None:
        self.orders: list[Sequence[SDPBackend]] = []


_mine = _Mine()
_lock = threading.Lock()
_open = 0
_before: Sequence[SDPBackend] = ()


def settle_torchs_order(device: torch.device) -> None:
    """Let torch put its order in place now, which it does at the first attention call on a GPU.

    On some GPUs (Hopper) that is another order than before, written over whatever is in force. So
    it must not come while `attention_order` is open: the order asked for would not count, and
    torch's own would be lost when the one from before comes back. No kernel is launched.
    """
    if device.type != "cuda":
        return
    tiny = torch.empty(1, 1, 1, 8, dtype=torch.float16, device=device)
    with torch.cuda.device(device):
        torch._fused_sdp_choice(tiny, tiny, tiny)


@contextmanager
def attention_order(order: Sequence[SDPBackend] | None) -> Iterator[None]:
    """Let attention calls use `order` while the context is open (in the calling thread).

    Where threads overlap, all see the order that was set last; results differ by rounding only.

    Args:
        order: kernels that may be used, the first that can run is; None changes nothing.
    """
    if order is None:
        yield
        return
    _enter(order)
    try:
        yield
    finally:
        _leave()


def _enter(order: Sequence[SDPBackend]) -> None:
    global _open, _before
    with _lock:
        if _open == 0:
            _before = _cur_sdpa_kernel_backends(with_priority=True)
        _sdpa_kernel(order, set_priority=True)
        _open += 1
        _mine.orders.append(order)


def _leave() -> None:
    global _open
    with _lock:
        _mine.orders.pop()
        _open -= 1
        if _open == 0:
            _sdpa_kernel(_before, set_priority=True)
        elif _mine.orders:
            _sdpa_kernel(_mine.orders[-1], set_priority=True)
