"""How fast this machine updates on the host, and how fast its link is, measured in the run."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from ts_core.memory.arena import PinnedArena
from ts_core.optim.device_update import DeviceState, update_on_host
from ts_core.optim.layout import Hyper
from ts_core.transfer import CopyEngine

_PROBE_BYTES = 64 << 20
_PROBE_VALUES = 16 << 20
_ROUNDS = 4


@dataclass(frozen=True)
class Rates:
    """What was measured.

    Attributes:
        host: values per second that host threads update (fp32 state).
        link: bytes per second in each direction of the link, both busy.
    """

    host: float
    link: float


def measure_rates(copies: CopyEngine, arena: PinnedArena, threads: int) -> Rates:
    """Measure both, one after the other; about a tenth of a second, 320 MiB of host memory.

    Waits for what the compute stream and the link still have to do.

    Args:
        copies: the run's own link.
        arena: pinned memory for it.
        threads: host threads; 0 for all usable cores.
    """
    copies.device.compute_stream().synchronize()
    copies.synchronize()
    return Rates(_host_rate(threads), _link_rate(copies, arena))


def _host_rate(threads: int) -> float:
    param, grad, exp_avg, exp_avg_sq = (torch.zeros(_PROBE_VALUES) for _ in range(4))
    state = DeviceState(exp_avg, exp_avg_sq, None)
    hyper = Hyper(1e-3, 0.9, 0.999, 1e-8, 0.0)
    best = float("inf")
    for step in range(1, _ROUNDS + 1):
        start = time.perf_counter()
        update_on_host(param, grad, state, hyper, step, 1.0, threads)
        best = min(best, time.perf_counter() - start)
    return _PROBE_VALUES / best


def _link_rate(copies: CopyEngine, arena: PinnedArena) -> float:
    where = copies.device.torch_device
    host = [arena.empty((_PROBE_BYTES,), torch.uint8, tag="measuring") for _ in range(2)]
    device = [torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=where) for _ in range(2)]
    best = float("inf")
    for _ in range(_ROUNDS):
        copies.synchronize()
        start = time.perf_counter()
        copies.h2d(device[0], host[0])
        copies.d2h(host[1], device[1])
        copies.synchronize()
        best = min(best, time.perf_counter() - start)
    return _PROBE_BYTES / best
