"""Chunked cross-entropy: time and peak memory, beside eager torch, torch.compile and Liger.

    python packages/ts-kernels/benchmarks/cross_entropy.py [ts_kernels eager compile liger]

Time of loss and backward; memory above what is allocated before. "rows kernel" is the kernel alone
over [1024, V] logits: GB/s, counting two reads and one write, as % of the copy rate. A CUDA GPU is
needed.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from _timing import copy_rate_gb_s, liger, milliseconds

import ts_kernels
from ts_kernels._softmax_rows import softmax_rows_

MIB = 2**20


def eager(hidden, weight, targets):
    return F.cross_entropy(F.linear(hidden, weight).float(), targets)


def contenders():
    found = {
        "ts_kernels": ts_kernels.chunked_cross_entropy,
        "eager": eager,
        "compile": torch.compile(eager, dynamic=False),
    }
    loss_class = liger("transformers.fused_linear_cross_entropy.LigerFusedLinearCrossEntropyLoss")
    if loss_class is not None:
        loss = loss_class()
        found["liger"] = lambda hidden, weight, targets: loss(weight, hidden, targets)
    return found


def measure(function, hidden, weight, targets):
    """(ms, peak MiB)."""
    inputs = [t for t in (hidden, weight) if t.requires_grad]

    def step():
        torch.autograd.grad(function(hidden, weight, targets), inputs)

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[2], (torch.cuda.max_memory_allocated() - before) / MIB


def rows_kernel_share(classes: int, copy: float) -> float:
    logits = [torch.randn(1024, classes, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    targets = torch.randint(0, classes, (1024,), device="cuda")

    def call(chunk):
        softmax_rows_(chunk, targets, ignore_index=-100, softcap=None, write_grad=True)

    ms = milliseconds([lambda chunk=chunk: call(chunk) for chunk in logits])
    return 3 * 1024 * classes * 2 / ms / 1e6 / copy


def main(only: list[str]) -> None:
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs a CUDA GPU; torch sees none.")
    copy = copy_rate_gb_s()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16")
    print(f"copy rate {copy:.0f} GB/s; below: ms (peak MiB)\n")
    functions = {name: f for name, f in contenders().items() if name in only or not only}
    header = "".join(f"{name:>18}" for name in functions)
    print(f"{'tokens':>7}{'hidden':>7}{'vocab':>8}  {'weight':<8}{header}{'rows kernel':>13}")
    for hidden_size, classes in ((576, 49152), (4096, 128256), (5120, 152064)):
        share = rows_kernel_share(classes, copy)
        weight = torch.randn(classes, hidden_size, device="cuda", dtype=torch.bfloat16) * 0.02
        for tokens in (512, 8192):
            targets = torch.randint(0, classes, (tokens,), device="cuda")
            hidden = torch.randn(tokens, hidden_size, device="cuda", dtype=torch.bfloat16)
            hidden.requires_grad_()
            for train in (False, True):
                weight.requires_grad_(train)
                line = ""
                for function in functions.values():
                    torch._dynamo.reset()
                    ms, peak = measure(function, hidden, weight, targets)
                    line += f"{ms:>9.2f} ({peak:6.0f})"
                print(
                    f"{tokens:>7}{hidden_size:>7}{classes:>8}  "
                    f"{'trained' if train else 'frozen':<8}{line}{share:>13.0%}",
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1:])
