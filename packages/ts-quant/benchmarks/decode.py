"""Decode speed: variants and configurations of the Triton kernels on a GPU, or the CPU decoder.

    python packages/ts-quant/benchmarks/decode.py                   # all variants, one table each
    python packages/ts-quant/benchmarks/decode.py --rows 5120 --columns 5120 --quick
    python packages/ts-quant/benchmarks/decode.py --device cpu --rows 576 --columns 1536

Each variant's output is compared with the PyTorch reference before it is timed. A time is the
median of repeated launches with the L2 cache flushed in between (triton.testing.do_bench); bytes
are the codes and scales read plus the values written. "copy" is a copy of as many bytes written,
in the same memory and with the same threads, measured in the same run: the practical ceiling, of
which every row says its share. On a CPU decoding uses torch's threads (--threads).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import ts_quant
from ts_quant.codecs.base import codec_named

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "int8": ("int8", {}),
    "int8+dq": ("int8", {"double_quant": True}),
    "fp8": ("fp8", {}),
    "fp8-row": ("fp8", {"layout": "row"}),
    "fp8-tile": ("fp8", {"layout": "tile"}),
    "nf4": ("nf4", {}),
    "nf4+dq": ("nf4", {"double_quant": True}),
    "nvfp4": ("nvfp4", {}),
    "mxfp4": ("mxfp4", {}),
}


def variants(q: ts_quant.QuantTensor, out: Tensor, quick: bool) -> dict[str, Callable[[], None]]:
    """Kernel calls by name; one, if `quick`."""
    from ts_quant.codecs import byte_triton, nibble_triton, shuffle_triton

    calls: dict[str, Callable[[], None]] = {}

    def add(module: Any, config: Any) -> None:
        calls[f"{module.__name__.rsplit('.', 1)[-1]} {config}"] = lambda: module.decode_out(
            q.buffers(), q.spec, out, config
        )

    if q.codec in ("int8", "fp8"):
        sizes = [(4096, 8), (2048, 4), (4096, 4), (8192, 8), (1024, 2)]
        if q.spec.scales == "tile":
            sizes = sizes[:1]  # has no choices
        for values, warps in sizes[:1] if quick else sizes:
            add(byte_triton, byte_triton.DecodeConfig(values, warps))
        return calls
    add(shuffle_triton, shuffle_triton.DEFAULT_CONFIG)
    if not quick:
        for words, warps in ((128, 1), (512, 4)):
            add(nibble_triton, nibble_triton.DecodeConfig("gather", words, warps))
        for warps, unroll in ((4, 1), (8, 1), (4, 4), (8, 2)):
            add(shuffle_triton, shuffle_triton.ShuffleConfig(warps, unroll))
    return calls


def gpu_ms(call: Callable[[], object]) -> float:
    from triton.testing import do_bench

    ms: float = do_bench(call, warmup=20, rep=80, return_mode="median")
    return ms


def bench_gpu(
    case: str, w: Tensor, block_size: int, dtype: torch.dtype, quick: bool, copy_gbs: float
) -> None:
    codec, options = CASES[case]
    q = ts_quant.quantize(w, codec, block_size, **options)
    expected = torch.empty(w.shape, dtype=dtype, device=w.device)
    codec_named(codec).decode_reference(q.buffers(), q.spec, expected)  # type: ignore[attr-defined]
    out = torch.empty_like(expected)
    moved_bytes = q.nbytes + out.numel() * out.element_size()
    print(f"\n{case} -> {dtype}, {tuple(w.shape)}, {q.spec}, {moved_bytes / 1e6:.1f} MB")
    rows: list[tuple[float, str]] = []
    for name, call in variants(q, out, quick).items():
        out.fill_(float("nan"))
        try:
            call()
        except Exception as error:  # a configuration the compiler refuses is a result too
            print(f"  {name}: does not run ({type(error).__name__}: {str(error)[:100]})")
            continue
        if not torch.equal(out, expected):
            raise SystemExit(f"{name}: wrong values")
        rows.append((gpu_ms(call), name))
    default = gpu_ms(lambda: q.dequantize(out=out))
    for ms, label in [*sorted(rows), (default, "as called by QuantTensor")]:
        gbs = moved_bytes / ms / 1e6
        print(f"  {ms:8.4f} ms {gbs:8.1f} GB/s {gbs / copy_gbs:6.1%} of copy  {label}")


def cpu_ms(call: Callable[[], object]) -> float:
    """Median of 30 calls after three."""
    times = []
    for _ in range(33):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times[3:])[15]


def bench_cpu(case: str, w: Tensor, block_size: int, dtype: torch.dtype, copy_gbs: float) -> None:
    codec, options = CASES[case]
    ts_quant.quantize(w, codec, block_size, **options)
    start = time.perf_counter()
    q = ts_quant.quantize(w, codec, block_size, **options)
    encode_ms = (time.perf_counter() - start) * 1e3
    out = torch.empty(w.shape, dtype=dtype)
    ms = cpu_ms(lambda: q.dequantize(out=out))
    written_bytes = out.numel() * out.element_size()
    gbs = (q.nbytes + written_bytes) / ms / 1e6
    print(
        f"{case:8} {ms:9.3f} ms {gbs:7.2f} GB/s {gbs / copy_gbs:6.1%} of copy; encode "
        f"{encode_ms:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=13824)
    parser.add_argument("--columns", type=int, default=5120)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--codec", choices=list(CASES), action="append")
    parser.add_argument("--quick", action="store_true", help="fewer configurations")
    parser.add_argument(
        "--threads", type=int, help="torch's threads on a CPU (default: torch's own)"
    )
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    print(f"torch {torch.__version__}", end=", ")
    if arguments.device == "cpu":
        print(f"CPU, {torch.get_num_threads()} threads, {arguments.dtype}")
    else:
        import triton

        print(f"triton {triton.__version__}, {torch.cuda.get_device_name()}")
    w = torch.randn(arguments.rows, arguments.columns, device=arguments.device).to(dtype)
    copied = torch.empty_like(w)
    time_ms = cpu_ms if arguments.device == "cpu" else gpu_ms
    copy_gbs = 2 * w.numel() * w.element_size() / time_ms(lambda: copied.copy_(w)) / 1e6
    print(f"copy {copy_gbs:.1f} GB/s")
    for case in arguments.codec or list(CASES):
        if arguments.device == "cpu":
            bench_cpu(case, w, arguments.block_size, dtype, copy_gbs)
        else:
            bench_gpu(case, w, arguments.block_size, dtype, arguments.quick, copy_gbs)


if __name__ == "__main__":
    main()
