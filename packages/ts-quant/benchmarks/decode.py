"""Decode speed: variants and configurations of the Triton kernels on a GPU, or the CPU decoder.

    python packages/ts-quant/benchmarks/decode.py                   # all variants, one table each
    python packages/ts-quant/benchmarks/decode.py --rows 5120 --columns 5120 --quick
    python packages/ts-quant/benchmarks/decode.py --device cpu --rows 576 --columns 1536

Each variant's output is compared with the PyTorch reference before it is timed. A time is the
median of repeated launches with the L2 cache flushed in between (triton.testing.do_bench); bytes
are the codes and scales read plus the values written. "copy" is a device-to-device copy of as
many bytes written, the practical ceiling. The last line of a table names the fastest
configuration; the defaults live in nf4_triton.DEFAULT_CONFIG and int8_triton.DEFAULT_CONFIG.
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


def nf4_configs(quick: bool) -> list[Any]:
    from ts_quant.codecs.nf4_triton import LOOKUPS, DecodeConfig

    lookups = ["gather"] if quick else list(LOOKUPS)
    sizes = [(256, 2), (256, 4), (512, 2), (512, 4), (1024, 4), (1024, 8), (2048, 4), (2048, 8)]
    if not quick:
        sizes += [(128, 1), (256, 1), (512, 8), (4096, 8), (4096, 16)]
    return [DecodeConfig(lookup, words, warps) for lookup in lookups for words, warps in sizes]


def int8_configs(quick: bool) -> list[Any]:
    from ts_quant.codecs.int8_triton import DecodeConfig

    sizes = [(1024, 2), (2048, 4), (4096, 4), (4096, 8), (8192, 8)]
    if not quick:
        sizes += [(1024, 1), (2048, 2), (8192, 4), (16384, 8)]
    return [DecodeConfig(values, warps) for values, warps in sizes]


def gpu_ms(call: Callable[[], object]) -> float:
    from triton.testing import do_bench

    ms: float = do_bench(call, warmup=20, rep=80, return_mode="median")
    return ms


def bench_gpu(codec: str, w: Tensor, block_size: int, dtype: torch.dtype, quick: bool) -> None:
    from importlib import import_module

    module = import_module(f"ts_quant.codecs.{codec}_triton")
    configs = {"nf4": nf4_configs, "int8": int8_configs}[codec](quick)
    q = ts_quant.quantize(w, codec, block_size)
    expected = torch.empty(w.shape, dtype=dtype, device=w.device)
    codec_named(codec).decode_reference(*q.buffers(), block_size, expected)  # type: ignore[attr-defined]
    out = torch.empty_like(expected)
    moved_bytes = q.nbytes + out.numel() * out.element_size()
    shape = tuple(w.shape)
    print(f"\n{codec} -> {dtype}, {shape}, block size {block_size}, {moved_bytes / 1e6:.1f} MB")
    rows: list[tuple[float, str]] = []
    for config in configs:
        out.fill_(float("nan"))
        try:
            module.decode_out(*q.buffers(), block_size, out, config)
        except Exception as error:  # a configuration the compiler refuses is a result too
            print(f"  {config}: does not run ({type(error).__name__}: {str(error)[:100]})")
            continue
        if not torch.equal(out, expected):
            raise SystemExit(f"{config}: wrong values")
        ms = gpu_ms(lambda c=config: module.decode_out(*q.buffers(), block_size, out, c))  # type: ignore[misc]
        rows.append((ms, str(config)))
    source = torch.empty_like(out)
    copy_ms = gpu_ms(lambda: out.copy_(source))
    copy_bytes = 2 * out.numel() * out.element_size()
    for ms, label in sorted(rows):
        print(f"  {ms:8.4f} ms {moved_bytes / ms / 1e9:6.2f} TB/s  {label}")
    print(f"  {copy_ms:8.4f} ms {copy_bytes / copy_ms / 1e9:6.2f} TB/s  copy")
    default = gpu_ms(lambda: q.dequantize(out=out))
    print(f"  {default:8.4f} ms {moved_bytes / default / 1e9:6.2f} TB/s  as called by QuantTensor")
    print(f"  fastest: {min(rows)[1]}")


def bench_cpu(codec: str, w: Tensor, block_size: int, dtype: torch.dtype) -> None:
    ts_quant.quantize(w, codec, block_size)
    start = time.perf_counter()
    q = ts_quant.quantize(w, codec, block_size)
    encode_ms = (time.perf_counter() - start) * 1e3
    out = torch.empty(w.shape, dtype=dtype)
    times = []
    for _ in range(30):
        start = time.perf_counter()
        q.dequantize(out=out)
        times.append((time.perf_counter() - start) * 1e3)
    ms = sorted(times)[len(times) // 2]
    written_bytes = out.numel() * out.element_size()
    print(
        f"{codec} -> {dtype}, {tuple(w.shape)}, {torch.get_num_threads()} threads: decode "
        f"{ms:.3f} ms, {(q.nbytes + written_bytes) / ms / 1e6:.2f} GB/s; encode {encode_ms:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rows", type=int, default=13824)
    parser.add_argument("--columns", type=int, default=5120)
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--codec", choices=["nf4", "int8"], action="append")
    parser.add_argument("--quick", action="store_true", help="fewer configurations")
    arguments = parser.parse_args()
    dtype: torch.dtype = getattr(torch, arguments.dtype)
    print(f"torch {torch.__version__}", end=", ")
    if arguments.device == "cpu":
        print("CPU")
    else:
        import triton

        print(f"triton {triton.__version__}, {torch.cuda.get_device_name()}")
    w = torch.randn(arguments.rows, arguments.columns, device=arguments.device).to(dtype)
    for codec in arguments.codec or ["nf4", "int8"]:
        if arguments.device == "cpu":
            bench_cpu(codec, w, arguments.block_size, dtype)
        else:
            bench_gpu(codec, w, arguments.block_size, dtype, arguments.quick)


if __name__ == "__main__":
    main()
