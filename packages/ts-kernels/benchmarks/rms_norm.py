"""RMSNorm: share of the device's copy rate, beside eager torch, torch.compile and Liger.

    python packages/ts-kernels/benchmarks/rms_norm.py [ts_kernels eager compile liger]

Bytes counted: forward reads x and writes y; backward reads dy and x and writes dx. The backward
time is that of both passes less that of the forward pass. A CUDA GPU is needed.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from _timing import L2_SEVERAL_TIMES, copy_rate_gb_s, liger, milliseconds

import ts_kernels
from ts_kernels import reference

EPS = 1e-6


def contenders():
    found = {
        "ts_kernels": ts_kernels.rms_norm,
        "eager": reference.rms_norm,
        "compile": torch.compile(reference.rms_norm, dynamic=False),
    }
    function = liger("ops.rms_norm.LigerRMSNormFunction")
    if function is not None:
        found["liger"] = lambda x, w, eps: function.apply(x, w, eps, 0.0, "llama", False)
    return found


def measure(function, rows, hidden, train_weight):
    """(forward ms, backward ms)."""
    sets = max(1, min(64, L2_SEVERAL_TIMES // (rows * hidden * 2)))
    xs = [
        torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16).requires_grad_()
        for _ in range(sets)
    ]
    dy = torch.randn_like(xs[0])
    weight = torch.randn(hidden, device="cuda", dtype=torch.bfloat16, requires_grad=train_weight)

    def forward(x):
        with torch.no_grad():
            function(x, weight, EPS)

    def both(x):
        inputs = (x, weight) if train_weight else (x,)
        torch.autograd.grad(function(x, weight, EPS), inputs, dy)

    forward_ms = milliseconds([partial(forward, x) for x in xs])
    return forward_ms, milliseconds([partial(both, x) for x in xs]) - forward_ms


def main(only: list[str]) -> None:
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs a CUDA GPU; torch sees none.")
    copy = copy_rate_gb_s()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16")
    print(f"copy rate {copy:.0f} GB/s; below: GB/s as % of it (microseconds)\n")
    functions = {name: f for name, f in contenders().items() if name in only or not only}
    header = "".join(f"{name:>18}" for name in functions)
    print(f"{'rows':>6}{'hidden':>7}  {'pass':<16}{header}")
    for rows in (512, 8192):
        for hidden in (576, 4096, 5120, 8192):
            lines = {"forward": "", "backward": "", "backward, no dw": ""}
            for function in functions.values():
                torch._dynamo.reset()
                forward, backward = measure(function, rows, hidden, True)
                _, backward_frozen = measure(function, rows, hidden, False)
                size = rows * hidden * 2
                for name, ms, factor in (
                    ("forward", forward, 2),
                    ("backward", backward, 3),
                    ("backward, no dw", backward_frozen, 3),
                ):
                    share = factor * size / ms / 1e6 / copy
                    lines[name] += f"{share:>9.0%} ({ms * 1e3:6.1f})"
            for name, line in lines.items():
                print(f"{rows:>6}{hidden:>7}  {name:<16}{line}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
