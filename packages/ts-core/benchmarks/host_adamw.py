"""Host AdamW against torch.optim.AdamW(fused=True) on the CPU, in one run.

    python packages/ts-core/benchmarks/host_adamw.py [--millions 32] [--rounds 9] [--threads 0]

Both update the same number of fp32 parameters, turn by turn, so that a noisy neighbour slows both;
the best and the median of the rounds are printed. An fp32 update moves 28 bytes per parameter
(reads p, g, m, v; writes p, m, v), with a bf16 gradient and an fp32 master copy 28 too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from ts_core import _native

PAUSE_S = 0.05
HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-2}


def torch_fused(count: int) -> Callable[[], None]:
    """One step() of torch's fused AdamW over `count` fp32 parameters."""
    parameter = torch.nn.Parameter(torch.randn(count))
    parameter.grad = torch.randn(count)
    optimizer = torch.optim.AdamW([parameter], lr=HYPER["lr"], fused=True)

    def step() -> None:
        optimizer.step()

    return step


def native(count: int, dtype: torch.dtype, threads: int) -> Callable[[], None]:
    """One native update: fp32 in place, or a 16-bit parameter and gradient with an fp32 master."""
    param = torch.randn(count).to(dtype)
    grad = torch.randn(count).to(dtype)
    moments = torch.zeros(2, count)
    master = param.float() if dtype != torch.float32 else None
    name = str(dtype).removeprefix("torch.")
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        _native.adamw_step(
            param.data_ptr(),
            name,
            grad.data_ptr(),
            name,
            moments[0].data_ptr(),
            moments[1].data_ptr(),
            0 if master is None else master.data_ptr(),
            count,
            step=steps,
            threads=threads,
            **HYPER,
        )

    return step


def main() -> None:
    """Prints G params/s and GB/s of each, and the ratio of the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=float, default=32, help="parameters, in millions")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0, help="0: all usable cores")
    arguments = parser.parse_args()
    count = int(arguments.millions * 1e6)
    threads = arguments.threads or _native.usable_cores()
    torch.set_num_threads(threads)

    runs = {
        "torch fused, fp32": (torch_fused(count), 28),
        "native, fp32": (native(count, torch.float32, threads), 28),
        "native, bf16 + fp32 master": (native(count, torch.bfloat16, threads), 28),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_index in range(arguments.rounds + 2):  # the first two warm up
        for name, (step, _) in runs.items():
            # torch's OpenMP threads spin for a while after their work and would take cores from
            # whoever is measured next.
            time.sleep(PAUSE_S)
            start = time.perf_counter()
            step()
            if round_index >= 2:
                times[name].append(time.perf_counter() - start)

    print(f"{count / 1e6:.0f} M parameters, {threads} threads, SIMD level {_native.simd_level()}")
    print(f"{'':28} {'median G/s':>10} {'best G/s':>10} {'GB/s':>8}")
    for name, (_, bytes_each) in runs.items():
        median, best = statistics.median(times[name]), min(times[name])
        rate = count / median / 1e9
        print(f"{name:28} {rate:10.3f} {count / best / 1e9:10.3f} {rate * bytes_each:8.1f}")
    ratio = statistics.median(times["torch fused, fp32"]) / statistics.median(times["native, fp32"])
    print(f"native fp32 is {ratio:.2f}x torch fused (median)")


if __name__ == "__main__":
    main()
