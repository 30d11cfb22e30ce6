"""On a CUDA GPU: the same bytes as on a CPU, the same values bit for bit, graphs, streams."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import ts_quant
from ts_quant.codecs.base import codec_named

pytestmark = pytest.mark.gpu

SHAPES = [(0,), (1,), (2,), (7,), (63,), (65,), (129, 8), (33, 62), (5, 3, 7), (1000, 1003)]
BLOCK_SIZES = [2, 6, 8, 32, 62, 64, 128, 4096]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def hard_values(dtype: torch.dtype) -> Tensor:
    """Zeros, ties, denormals and the largest values, in blocks of 64."""
    info = torch.finfo(dtype)
    middle = (torch.tensor(CODES[1:]) + torch.tensor(CODES[:-1])) / 2
    ties = torch.cat([middle, torch.nextafter(middle, torch.tensor(2.0)), torch.ones(34)])
    parts = [
        torch.zeros(64, dtype=dtype),
        ties.to(dtype),
        (torch.rand(64) * 2 - 1).to(dtype) * info.max,
        (torch.rand(64) * 2 - 1).to(dtype) * info.smallest_normal,
        torch.full((64,), info.smallest_normal * info.eps, dtype=dtype),
        torch.arange(64).to(dtype) * (info.smallest_normal * info.eps),
        torch.randn(64).to(dtype),
    ]
    return torch.cat(parts)


CODES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[a.element_size()]
    assert torch.equal(a.cpu().view(integers), b.cpu().view(integers))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_the_bytes_are_those_of_a_cpu(codec: str, block_size: int, dtype: torch.dtype) -> None:
    weights = [torch.randn(shape).to(dtype) for shape in SHAPES]
    if dtype is not torch.float64:
        weights.append(hard_values(dtype))
    for w in weights:
        here = ts_quant.quantize(w, codec, block_size)
        there = ts_quant.quantize(w.cuda(), codec, block_size)
        for a, b in zip(here.buffers(), there.buffers(), strict=True):
            assert b.is_cuda
            assert_same_bits(a, b)


def test_chunks_on_a_gpu_change_nothing(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from ts_quant.codecs import blockwise

    w = torch.randn(300, 1001, device="cuda")
    whole = ts_quant.quantize(w, codec)
    monkeypatch.setattr(blockwise, "_VALUES_GPU", 6400)
    for a, b in zip(whole.buffers(), ts_quant.quantize(w, codec).buffers(), strict=True):
        assert_same_bits(a, b)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_the_decoded_values_are_those_of_a_cpu(codec: str, block_size: int) -> None:
    for w in [*(torch.randn(shape) for shape in SHAPES), hard_values(torch.float32)]:
        here = ts_quant.quantize(w, codec, block_size)
        there = here.to("cuda")
        for dtype in (*DTYPES, torch.float64):
            expected = here.dequantize(dtype)
            assert_same_bits(there.dequantize(dtype), expected)
            # Room behind the output must stay as it was: masks hold.
            room = torch.full((w.numel() + 256,), float("nan"), dtype=dtype, device="cuda")
            out = room[: w.numel()].view(w.shape)
            assert there.dequantize(out=out) is out
            assert_same_bits(out, expected)
            assert bool(room[w.numel() :].isnan().all())
            plain = torch.empty(w.shape, dtype=dtype, device="cuda")
            codec_named(codec).decode_reference(*there.buffers(), block_size, plain)  # type: ignore[attr-defined]
            assert_same_bits(plain, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hard_values_of_half_precision_weights(codec: str, dtype: torch.dtype) -> None:
    here = ts_quant.quantize(hard_values(dtype), codec)
    assert_same_bits(here.to("cuda").dequantize(), here.dequantize())


def test_every_kernel_variant_gives_the_same_bits() -> None:
    from ts_quant.codecs import int8_triton, nf4_triton

    w = torch.randn(257, 1000)  # not a whole number of programs
    for block_size in (8, 64, 1024):
        for codec, module, configs in (
            (
                "nf4",
                nf4_triton,
                [
                    nf4_triton.DecodeConfig(lookup, words, warps)
                    for lookup in nf4_triton.LOOKUPS
                    for words, warps in ((128, 1), (512, 4), (2048, 8))
                ],
            ),
            (
                "int8",
                int8_triton,
                [int8_triton.DecodeConfig(v, n) for v, n in ((512, 1), (4096, 4), (16384, 8))],
            ),
        ):
            here = ts_quant.quantize(w, codec, block_size)
            buffers = here.to("cuda").buffers()
            for dtype in DTYPES:
                expected = here.dequantize(dtype)
                for config in configs:
                    out = torch.full(w.shape, float("nan"), dtype=dtype, device="cuda")
                    module.decode_out(*buffers, block_size, out, config)  # type: ignore[attr-defined]
                    assert_same_bits(out, expected)


def test_codes_and_outputs_at_any_address(codec: str) -> None:
    """A slot of a pager may put the inner tensors at any byte."""
    here = ts_quant.quantize(torch.randn(16, 64), codec)
    codes, absmax = here.to("cuda").buffers()
    for offset in (0, 1, 2, 3, 4, 8, 12):
        room = torch.zeros(codes.numel() + 16, dtype=codes.dtype, device="cuda")
        moved = room[offset : offset + codes.numel()].view(codes.shape)
        moved.copy_(codes)
        scale_room = torch.zeros(absmax.numel() + 3, device="cuda")
        scales = scale_room[offset % 3 : offset % 3 + absmax.numel()]
        scales.copy_(absmax)
        q = here.with_buffers((moved, scales))
        for shift in (0, 1, 4):
            out = torch.zeros(16 * 64 + 8, dtype=torch.bfloat16, device="cuda")
            view = out[shift : shift + 16 * 64].view(16, 64)
            q.dequantize(out=view)
            assert_same_bits(view, here.dequantize(torch.bfloat16))
            assert bool((out[:shift] == 0).all()) and bool((out[shift + 16 * 64 :] == 0).all())


def test_more_than_two_to_the_31_values(codec: str) -> None:
    """About 5 GiB (NF4) or 6 GiB (int8) of device memory."""
    n = 2**31 + 4096
    chosen = codec_named(codec)
    code_shape = chosen.code_shape(n)  # type: ignore[attr-defined]
    dtype = chosen.code_dtype  # type: ignore[attr-defined]
    low, high = (0, 256) if dtype is torch.uint8 else (-127, 128)
    codes = torch.randint(low, high, code_shape, dtype=dtype, device="cuda")
    absmax = torch.rand(n // 64, device="cuda")
    out = chosen.decode((codes, absmax), 64, [n], torch.bfloat16)
    tail = 8192
    end = codes.view(-1)[-(tail * codes.numel() // n) :]
    expected = torch.empty(tail, dtype=torch.bfloat16, device="cuda")
    chosen.decode_reference(end, absmax[-tail // 64 :], 64, expected)  # type: ignore[attr-defined]
    assert_same_bits(out[-tail:], expected)
    start = codes.view(-1)[: tail * codes.numel() // n]
    chosen.decode_reference(start, absmax[: tail // 64], 64, expected)  # type: ignore[attr-defined]
    assert_same_bits(out[:tail], expected)


def test_decode_into_out_allocates_nothing(codec: str) -> None:
    q = ts_quant.quantize(torch.randn(512, 512, device="cuda"), codec)
    out = torch.empty(512, 512, dtype=torch.bfloat16, device="cuda")
    q.dequantize(out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        q.dequantize(out=out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_decode_in_a_cuda_graph(codec: str) -> None:
    q = ts_quant.quantize(torch.randn(256, 320, device="cuda"), codec)
    out = torch.empty(256, 320, dtype=torch.bfloat16, device="cuda")
    q.dequantize(out=out)  # compiles the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q.dequantize(out=out)
    for _ in range(3):
        new = torch.randn(256, 320, device="cuda")
        q.copy_(new)
        out.fill_(float("nan"))
        graph.replay()
        assert_same_bits(out, ts_quant.quantize(new, codec).dequantize(torch.bfloat16))


def test_linear_forward_and_backward_in_a_cuda_graph(codec: str) -> None:
    q = ts_quant.quantize(torch.randn(256, 320, device="cuda").bfloat16(), codec)
    x = torch.randn(8, 320, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(8, 256, device="cuda", dtype=torch.bfloat16)

    def step() -> tuple[Tensor, Tensor]:
        y = torch.nn.functional.linear(x, q)
        (grad_x,) = torch.autograd.grad(y, x, grad)
        return y.detach(), grad_x

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, grad_x = step()
    for _ in range(2):
        with torch.no_grad():
            x.copy_(torch.randn_like(x))
            q.copy_(torch.randn(256, 320, device="cuda"))
        graph.replay()
        dense = q.dequantize()
        expected = torch.nn.functional.linear(x, dense)
        assert_same_bits(y, expected.detach())
        assert_same_bits(grad_x, grad @ dense)


def test_decode_runs_on_the_current_stream(codec: str) -> None:
    here = ts_quant.quantize(torch.randn(2048, 2048), codec)
    q = here.to("cuda")
    expected = here.dequantize(torch.bfloat16)
    out = torch.zeros(2048, 2048, dtype=torch.bfloat16, device="cuda")
    kept = q.buffers()[0].clone()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        # The right codes arrive late, on this stream; only a decode queued behind them sees them.
        q.buffers()[0].zero_()
        torch.cuda._sleep(50_000_000)
        q.buffers()[0].copy_(kept)
        q.dequantize(out=out)
    side.synchronize()
    assert_same_bits(out, expected)


def test_without_triton_the_reference_runs(codec: str) -> None:
    probe = f"""
import sys, torch, ts_quant
w = torch.randn(33, 62)
q = ts_quant.quantize(w, "{codec}")
for dtype in (torch.bfloat16, torch.float32):
    assert torch.equal(q.to("cuda").dequantize(dtype).cpu(), q.dequantize(dtype))
assert "triton" not in sys.modules
print("clean")
"""
    done = subprocess.run(
        [sys.executable, "-c", probe],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "TS_QUANT_TRITON": "0"},
    )
    assert done.returncode == 0 and done.stdout.strip() == "clean", done.stderr


def test_print_decode_speed(codec: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A figure to read, not to assert; benchmarks/decode.py compares variants."""
    w = torch.randn(13824, 5120, device="cuda", dtype=torch.bfloat16)
    q = ts_quant.quantize(w, codec)
    assert_same_bits(q.dequantize()[:8], q.cpu().dequantize()[:8])
    out = torch.empty_like(w)
    for _ in range(3):
        q.dequantize(out=out)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(50):
        q.dequantize(out=out)
    stop.record()
    torch.cuda.synchronize()
    ms = start.elapsed_time(stop) / 50
    moved_bytes = q.nbytes + out.numel() * out.element_size()
    with capsys.disabled():
        print(f"\n{codec} -> bf16, 13824 x 5120: {ms:.4f} ms, {moved_bytes / ms / 1e6:.0f} GB/s")
