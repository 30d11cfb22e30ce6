"""On a CUDA GPU: the same bytes as on a CPU, the same values bit for bit, graphs, streams."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import ts_quant
from ts_quant.codecs.base import codec_named

pytestmark = pytest.mark.gpu

SHAPES = [(0,), (1,), (2,), (7,), (63,), (65,), (129, 8), (33, 62), (5, 3, 7), (1000, 1003)]
BLOCK_SIZES = [2, 6, 8, 32, 62, 64, 128, 4096, 8192, 1 << 21]
FORMATS = [(codec, size) for codec in ("nf4", "int8") for size in BLOCK_SIZES]
FORMATS += [("fp8", 32), ("nvfp4", 16), ("mxfp4", 32)]
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
@pytest.mark.parametrize(("codec", "block_size"), FORMATS)
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


@pytest.mark.parametrize(("codec", "block_size"), FORMATS)
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
            codec_named(codec).decode_reference(there.buffers(), there.spec, plain)  # type: ignore[attr-defined]
            assert_same_bits(plain, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_hard_values_of_half_precision_weights(codec: str, dtype: torch.dtype) -> None:
    here = ts_quant.quantize(hard_values(dtype), codec)
    assert_same_bits(here.to("cuda").dequantize(), here.dequantize())


LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("nf4", {"double_quant": True}),
    ("int8", {"double_quant": True}),
    ("fp8", {"layout": "row"}),
    ("fp8", {"layout": "tile"}),
    ("fp8", {"layout": "tensor"}),
    ("nvfp4", {"layout": "e4m3_div"}),
    ("mxfp4", {}),
]


@pytest.mark.parametrize(("codec", "options"), LAYOUTS, ids=str)
def test_other_layouts_give_the_bytes_and_values_of_a_cpu(
    codec: str, options: dict[str, Any]
) -> None:
    weights = [torch.randn(shape) for shape in SHAPES]
    weights += [torch.randn(3, 200, 330), hard_values(torch.float32)]
    weights += [hard_values(torch.bfloat16).view(7, 64), hard_values(torch.float16)]
    for w in weights:
        here = ts_quant.quantize(w, codec, **options)
        there = ts_quant.quantize(w.cuda(), codec, **options)
        for a, b in zip(here.buffers(), there.buffers(), strict=True):
            assert_same_bits(a, b)
        for dtype in DTYPES:
            assert_same_bits(there.dequantize(dtype), here.dequantize(dtype))


@pytest.mark.parametrize(("codec", "options"), LAYOUTS, ids=str)
def test_other_layouts_in_a_cuda_graph(codec: str, options: dict[str, Any]) -> None:
    q = ts_quant.quantize(torch.randn(256, 320, device="cuda"), codec, **options)
    out = torch.empty(256, 320, dtype=torch.bfloat16, device="cuda")
    q.dequantize(out=out)  # compiles the kernel, makes the tables
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    q.dequantize(out=out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q.dequantize(out=out)
    new = torch.randn(256, 320, device="cuda")
    q.copy_(new)
    out.fill_(float("nan"))
    graph.replay()
    assert_same_bits(out, ts_quant.quantize(new, codec, **options).dequantize(torch.bfloat16))


@pytest.mark.parametrize("block_size", [62, 64])
def test_nested_scales_decode_as_on_a_cpu(block_size: int) -> None:
    n = 64 * 6000
    blocks = -(-n // block_size)
    buffers = {
        "codes": torch.randint(0, 256, (n // 2, 1), dtype=torch.uint8),
        "absmax_codes": torch.randint(0, 256, (blocks,), dtype=torch.uint8),
        "nested_absmax": torch.rand(-(-blocks // 256)) * 0.01,
        "nested_map": torch.linspace(-1, 1, 256),
        "nested_offset": torch.tensor(0.0173),
    }
    layout = {"scales": "nested", "block_size": block_size}
    q = ts_quant.QuantTensor.from_buffers(
        "nf4", buffers, shape=(n,), dtype=torch.bfloat16, layout=layout
    )
    for dtype in DTYPES:
        assert_same_bits(q.to("cuda").dequantize(dtype), q.dequantize(dtype))


def test_every_kernel_variant_gives_the_same_bits() -> None:
    from ts_quant.codecs import byte_triton, nibble_triton

    nibble_configs = [
        nibble_triton.DecodeConfig(lookup, words, warps)
        for lookup in nibble_triton.LOOKUPS
        for words, warps in ((128, 1), (512, 4), (2048, 8))
    ]
    byte_configs = [byte_triton.DecodeConfig(v, n) for v, n in ((512, 1), (4096, 4), (16384, 8))]
    w = torch.randn(257, 1000)  # not a whole number of programs
    for block_size in (8, 64, 1024):
        for codec, module, configs in (
            ("nf4", nibble_triton, nibble_configs),
            ("nvfp4", nibble_triton, nibble_configs[:3]),
            ("int8", byte_triton, byte_configs),
            ("fp8", byte_triton, byte_configs),
        ):
            here = ts_quant.quantize(w, codec, block_size)
            buffers = here.to("cuda").buffers()
            for dtype in DTYPES:
                expected = here.dequantize(dtype)
                for config in configs:
                    out = torch.full(w.shape, float("nan"), dtype=dtype, device="cuda")
                    module.decode_out(buffers, here.spec, out, config)  # type: ignore[attr-defined]
                    assert_same_bits(out, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", ["nf4", "nvfp4", "mxfp4"])
def test_the_shuffle_kernel_gives_the_same_bits(codec: str, dtype: torch.dtype) -> None:
    from ts_quant.codecs import shuffle_triton
    from ts_quant.codecs.shuffle_triton import ShuffleConfig

    configs = [ShuffleConfig(w, u) for w in (1, 4, 8) for u in (1, 2, 4)]
    configs += [ShuffleConfig(4, 2, ".cs"), ShuffleConfig(4, 1, "", 4)]
    for w in (torch.randn(257, 1000), torch.randn(8), hard_values(torch.float32)):
        for double_quant in (False, True) if codec == "nf4" else (False,):
            here = ts_quant.quantize(w, codec, double_quant=double_quant)
            there = here.to("cuda")
            expected = here.dequantize(dtype)
            for config in configs:
                room = torch.full((w.numel() + 512,), float("nan"), dtype=dtype, device="cuda")
                out = room[: w.numel()].view(w.shape)
                assert shuffle_triton.takes(there.buffers()[0], out, here.block_size)
                shuffle_triton.decode_out(there.buffers(), here.spec, out, config)
                assert_same_bits(out, expected)
                assert bool(room[w.numel() :].isnan().all())


def test_codes_and_outputs_at_any_address(codec: str) -> None:
    """A slot of a pager may put the inner tensors at any byte."""
    here = ts_quant.quantize(torch.randn(16, 64), codec)
    codes, *scales = here.to("cuda").buffers()
    for offset in (0, 1, 2, 3, 4, 8, 12):
        room = torch.zeros(codes.numel() + 16, dtype=codes.dtype, device="cuda")
        moved = room[offset : offset + codes.numel()].view(codes.shape)
        moved.copy_(codes)
        moved_scales = []
        for scale in scales:
            scale_room = torch.zeros(scale.numel() + 3, dtype=scale.dtype, device="cuda")
            moved_scales.append(scale_room[offset % 3 : offset % 3 + scale.numel()])
            moved_scales[-1].copy_(scale)
        q = here.with_buffers((moved, *moved_scales))
        for shift in (0, 1, 4):
            out = torch.zeros(16 * 64 + 8, dtype=torch.bfloat16, device="cuda")
            view = out[shift : shift + 16 * 64].view(16, 64)
            q.dequantize(out=view)
            assert_same_bits(view, here.dequantize(torch.bfloat16))
            assert bool((out[:shift] == 0).all()) and bool((out[shift + 16 * 64 :] == 0).all())


def test_more_than_two_to_the_31_values(codec: str) -> None:
    """About 5 GiB (4-bit formats) or 6 GiB of device memory."""
    n, tail = 2**31 + 4096, 8192
    chosen = codec_named(codec)
    spec = chosen.spec_for((n,))
    sizes = chosen.buffer_sizes(spec, (n,))[:-1]  # type: ignore[attr-defined]
    buffers = []
    for position, (dtype, size) in enumerate(sizes):
        if dtype is torch.float32:
            buffers.append(torch.rand(size, device="cuda"))
        else:
            low, high = (-127, 128) if dtype is torch.int8 else (0, 112 if position else 126)
            buffers.append(torch.randint(low, high, size, dtype=dtype, device="cuda"))
    out = chosen.decode(buffers, spec, [n], torch.bfloat16)
    expected = torch.empty(tail, dtype=torch.bfloat16, device="cuda")
    for place in (slice(-tail, None), slice(0, tail)):
        parts = []
        for buffer in buffers:
            share = buffer.numel() * tail // n or buffer.numel()
            flat = buffer.view(-1)
            parts.append(flat[-share:] if place.start else flat[:share])
        chosen.decode_reference(parts, spec, expected)  # type: ignore[attr-defined]
        assert_same_bits(out[place], expected)


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
    ts_quant.configure_matmul(q, tensor_cores=False)
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
