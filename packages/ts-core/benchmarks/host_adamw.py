"""Host AdamW against torch.optim.AdamW(fused=True) on the CPU, in one run.

    python packages/ts-core/benchmarks/host_adamw.py [--millions 32] [--rounds 15] [--threads 0]

All update the same number of parameters, turn by turn in random order, so that a noisy neighbour
slows all; the median and the best of the rounds and the CPU time are printed. An fp32 update moves
28 bytes per parameter (reads p, g, m, v; writes p, m, v); one with bf16 parameters and gradients
and an fp32 master copy moves 28 too.
"""

from __future__ import annotations

import argparse
import random
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
    """Prints G params/s, GB/s and CPU time of each, and how native compares with torch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=float, default=32, help="parameters, in millions")
    parser.add_argument("--rounds", type=int, default=15)
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
    wall: dict[str, list[float]] = {name: [] for name in runs}
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    for round_index in range(arguments.rounds + 2):  # the first two warm up
        for name in random.sample(list(runs), len(runs)):
            # torch's OpenMP threads spin for a while after their work and would take cores from
            # whoever is measured next.
            time.sleep(PAUSE_S)
            start, cpu_start = time.perf_counter(), time.process_time()
            runs[name][0]()
            if round_index >= 2:
                wall[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - cpu_start)

    print(f"{count / 1e6:g} M parameters, {threads} threads, SIMD level {_native.simd_level()}")
    print(f"{'':28} {'median G/s':>10} {'best G/s':>10} {'GB/s':>8} {'CPU s per G':>12}")
    for name, (_, bytes_each) in runs.items():
        rate = count / statistics.median(wall[name]) / 1e9
        best = count / min(wall[name]) / 1e9
        cpu_s = statistics.median(cpu[name]) / count * 1e9
        print(f"{name:28} {rate:10.3f} {best:10.3f} {rate * bytes_each:8.1f} {cpu_s:12.2f}")
    pairs = zip(wall["torch fused, fp32"], wall["native, fp32"], strict=True)
    ratio = statistics.median(theirs / ours for theirs, ours in pairs)
    print(f"native fp32 is {ratio:.2f}x torch fused (median over rounds)")


if __name__ == "__main__":
    main()
