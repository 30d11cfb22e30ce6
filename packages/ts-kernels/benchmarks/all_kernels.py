"""Every kernel beside eager torch, torch.compile and Liger: time, bandwidth, peak memory.

    python packages/ts-kernels/benchmarks/all_kernels.py [--json FILE] [--only NAME ...]

For the kernels bound by memory: bytes that must be read and written, per second, as % of the
measured copy rate (a kernel that reads and writes once). "backward" is the time of both passes less
that of forward. Peak memory of both passes is beside the inputs. All times are of CUDA-graph
replays over inputs that do not fit in the cache, so the host counts for nothing. bf16. A CUDA GPU
is needed; about 100 seconds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _timing import L2_SEVERAL_TIMES, copy_rate_gb_s, liger, milliseconds

import ts_kernels
from ts_kernels import reference

MIB = 2**20
BF16 = torch.bfloat16


@dataclass
class Case:
    """One kernel at one size. `bytes_*` are those that must move; 0: not bound by memory."""

    kernel: str
    size: str
    make: Callable[[], tuple[list[torch.Tensor], list[torch.Tensor]]]  # inputs, rest
    functions: dict[str, Callable[..., Any]]
    bytes_forward: int
    bytes_backward: int
    bytes_set: int


@dataclass
class Row:
    kernel: str
    size: str
    contender: str
    forward_us: float
    backward_us: float
    forward_share: float | None
    backward_share: float | None
    peak_mib: float


def randn(*shape: int, grad: bool = True, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(shape, device="cuda")).to(BF16).requires_grad_(grad)


def contenders(ours: Any, plain: Any, compile_too: bool) -> dict[str, Any]:
    """torch.compile takes seconds per case, so it is in the first size of each kernel only."""
    found = {"ts_kernels": ours, "eager": plain}
    return found | ({"compile": torch.compile(plain, dynamic=False)} if compile_too else {})


def with_liger(found: dict[str, Any], path: str, make: Callable[[Any], Any]) -> dict[str, Any]:
    function = liger(path)
    if function is not None:
        found["liger"] = make(function)
    return found


def norm_cases() -> list[Case]:
    cases = []
    for rows, hidden in ((8192, 4096), (8192, 5120), (8192, 8192), (512, 5120)):
        size = rows * hidden * 2

        def make(rows=rows, hidden=hidden):
            return [randn(rows, hidden), randn(hidden)], []

        def make_two(rows=rows, hidden=hidden):
            return [randn(rows, hidden), randn(rows, hidden), randn(hidden)], []

        for kernel, kw, liger_kw in (
            ("rms_norm", {}, (1e-6, 0.0, "llama", False)),
            ("rms_norm, Gemma", {"offset": 1.0, "round_first": False}, (1e-6, 1.0, "gemma", False)),
        ):
            if kw and (rows, hidden) != (8192, 4096):
                continue
            functions = contenders(
                partial(ts_kernels.rms_norm, eps=1e-6, **kw),
                partial(reference.rms_norm, eps=1e-6, **kw),
                (rows, hidden) == (8192, 4096),
            )
            with_liger(
                functions,
                "ops.rms_norm.LigerRMSNormFunction",
                lambda f, a=liger_kw: lambda x, w: f.apply(x, w, *a),
            )
            cases.append(
                Case(kernel, f"{rows} x {hidden}", make, functions, 2 * size, 3 * size, size)
            )
        functions = contenders(
            partial(ts_kernels.add_rms_norm, eps=1e-6),
            partial(reference.add_rms_norm, eps=1e-6),
            (rows, hidden) == (8192, 4096),
        )
        with_liger(
            functions,
            "ops.fused_add_rms_norm.LigerFusedAddRMSNormFunction",
            lambda f: lambda x, r, w: f.apply(x, r, w, 1e-6, 0.0, "llama", False),
        )
        cases.append(
            Case(
                "add_rms_norm",
                f"{rows} x {hidden}",
                make_two,
                functions,
                4 * size,
                4 * size,
                2 * size,
            )
        )
    return cases


def gate_cases() -> list[Case]:
    cases = []
    for rows, inner, activation in (
        (8192, 13824, "silu"),
        (2048, 13824, "silu"),
        (512, 13824, "silu"),
        (8192, 14336, "gelu_tanh"),
    ):
        size = rows * inner * 2
        functions = contenders(
            partial(ts_kernels.gated_mlp, activation=activation),
            partial(reference.gated_mlp, activation=activation),
            rows == 8192,
        )
        path = (
            "swiglu.LigerSiLUMulFunction" if activation == "silu" else "geglu.LigerGELUMulFunction"
        )
        # (its backward writes over the gate and up that it was given)
        with_liger(functions, f"ops.{path}", lambda f: lambda g, u: f.apply(g, u))

        def make(rows=rows, inner=inner):
            return [randn(rows, inner), randn(rows, inner)], []

        name = f"gated_mlp, {activation}"
        cases.append(Case(name, f"{rows} x {inner}", make, functions, 3 * size, 5 * size, 2 * size))
    return cases


def rotary_cases() -> list[Case]:
    cases = []
    for tokens, heads, kv_heads, interleaved in (
        (8192, 40, 8, False),
        (2048, 40, 8, False),
        (512, 40, 8, False),
        (8192, 40, 8, True),
    ):
        size = tokens * (heads + kv_heads) * 128 * 2

        def make(tokens=tokens, heads=heads, kv_heads=kv_heads):
            q, k = (randn(1, tokens, n, 128).detach().transpose(1, 2) for n in (heads, kv_heads))
            angles = torch.randn(1, tokens, 64, device="cuda").repeat(1, 1, 2)
            return [q.requires_grad_(), k.requires_grad_()], [
                angles.cos().to(BF16),
                angles.sin().to(BF16),
            ]

        kw = {"interleaved": interleaved}
        functions = contenders(
            partial(ts_kernels.rotary, **kw), partial(reference.rotary, **kw), tokens == 8192
        )
        if not interleaved:
            with_liger(
                functions,
                "ops.rope.LigerRopeFunction",
                lambda f: lambda q, k, cos, sin: f.apply(q, k, cos, sin),
            )
        name = "rotary, interleaved" if interleaved else "rotary"
        cases.append(
            Case(name, f"{tokens} x {heads}+{kv_heads}", make, functions, 2 * size, 2 * size, size)
        )
    return cases


def lora_cases() -> list[Case]:
    cases = []
    for tokens, inner, outer in ((2048, 5120, 5120), (512, 5120, 13824), (2048, 5120, 13824)):
        weight = randn(outer, inner, grad=False, scale=inner**-0.5)
        for adapter in (BF16, torch.float32):

            def make(tokens=tokens, inner=inner, outer=outer, adapter=adapter, weight=weight):
                a = randn(16, inner, scale=inner**-0.5).detach().to(adapter).requires_grad_()
                b = randn(outer, 16).detach().to(adapter).requires_grad_()
                return [randn(tokens, inner), a, b], [weight]

            def ours(x, a, b, weight):
                return ts_kernels.lora_linear(x, weight, a, b, 2.0)

            def plain(x, a, b, weight):
                return reference.lora_linear(x, weight, a, b, 2.0)

            def base(x, a, b, weight):
                return torch.nn.functional.linear(x, weight)

            functions = contenders(ours, plain, (tokens, outer) == (2048, 5120))
            functions["no adapter"] = base
            name = f"lora_linear, {'bf16' if adapter == BF16 else 'fp32'} adapters"
            size = f"{tokens}, {inner} -> {outer}"
            cases.append(Case(name, size, make, functions, 0, 0, L2_SEVERAL_TIMES // 2))
    return cases


def measure(case: Case, contender: str, copy: float) -> Row:
    """Times and peak memory; `copy` in GB/s."""
    function = case.functions[contender]
    sets = [case.make() for _ in range(max(1, min(32, L2_SEVERAL_TIMES // case.bytes_set)))]
    outs = function(*sets[0][0], *sets[0][1])
    outs = outs if isinstance(outs, tuple) else (outs,)
    ups = [torch.randn_like(out) for out in outs]

    def forward(inputs, rest):
        with torch.no_grad():
            function(*inputs, *rest)

    def both(inputs, rest):
        outs = function(*inputs, *rest)
        outs = outs if isinstance(outs, tuple) else (outs,)
        wanted = [t for t in inputs if t.requires_grad]
        torch.autograd.grad(outs, wanted, ups, allow_unused=True)

    del outs
    both(*sets[0])
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    both(*sets[0])
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / MIB
    forward_ms = milliseconds([partial(forward, *each) for each in sets])
    backward_ms = milliseconds([partial(both, *each) for each in sets]) - forward_ms

    def share(moved: int, ms: float) -> float | None:
        return moved / ms / 1e6 / copy if moved else None

    return Row(
        case.kernel,
        case.size,
        contender,
        forward_ms * 1e3,
        backward_ms * 1e3,
        share(case.bytes_forward, forward_ms),
        share(case.bytes_backward, backward_ms),
        peak,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--only", nargs="*", default=[], help="kernels whose name begins so")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs a CUDA GPU; torch sees none.")
    started = time.monotonic()
    copy = copy_rate_gb_s()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bf16")
    print(f"copy rate {copy:.0f} GB/s; below: microseconds (% of it), peak MiB\n")
    print(f"{'kernel':<28}{'size':<20}{'':<12}{'forward':>16}{'backward':>16}{'peak':>8}")
    rows, failed = [], []
    for case in [*norm_cases(), *gate_cases(), *rotary_cases(), *lora_cases()]:
        if options.only and not any(case.kernel.startswith(name) for name in options.only):
            continue
        for contender in case.functions:
            torch._dynamo.reset()
            try:
                row = measure(case, contender, copy)
            except Exception as error:  # of another library; the others are still of interest
                if contender == "ts_kernels":
                    raise
                failed.append(f"{case.kernel} {case.size} {contender}: {error!r:.200}")
                continue
            rows.append(row)
            cells = ""
            for us, share in (
                (row.forward_us, row.forward_share),
                (row.backward_us, row.backward_share),
            ):
                cells += f"{us:>9.1f}" + ("       " if share is None else f" ({share:4.0%})")
            line = f"{row.kernel:<28}{row.size:<20}{contender:<12}{cells}{row.peak_mib:>8.0f}"
            print(line, flush=True)
    print(f"\n{time.monotonic() - started:.0f} s")
    for text in failed:
        print("failed:", text)
    if options.json is not None:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
        data = {**about, "copy_gb_s": copy, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    main()
