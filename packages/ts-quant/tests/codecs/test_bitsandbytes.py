"""NF4 codes, packing and scales beside the installed bitsandbytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ts_quant
from ts_quant.codecs.nf4 import CODEBOOK

bnb = pytest.importorskip("bitsandbytes.functional")

BLOCK_SIZES = [32, 64, 128, 256, 512, 1024, 2048, 4096]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def ours(w: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    codes, absmax = ts_quant.quantize(w, "nf4", block_size).buffers()
    return codes, absmax


def theirs(w: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    codes, state = bnb.quantize_4bit(w, quant_type="nf4", blocksize=block_size)
    return codes, state.absmax


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_same_bytes_on_a_cpu(block_size: int, dtype: torch.dtype) -> None:
    w = (torch.randn(96, 4 * block_size // 32) * 0.02).to(dtype)
    for mine, other in zip(ours(w, block_size), theirs(w, block_size), strict=True):
        assert mine.shape == other.shape and mine.dtype == other.dtype
        assert torch.equal(mine, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (63,), (65,), (5, 7), (33, 62), (3, 5, 7), (129, 1)])
def test_same_bytes_with_a_partial_last_block_on_a_cpu(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    # bitsandbytes' CPU back end divides by absmax in the last block and multiplies by 1 / absmax
    # in the others; ours (like its CUDA one) multiplies throughout. A value would have to lie
    # within an ulp of a threshold to tell; with these seeds none does.
    w = torch.randn(shape).to(dtype)
    for mine, other in zip(ours(w, 64), theirs(w, 64), strict=True):
        assert mine.shape == other.shape
        assert torch.equal(mine, other)


def test_same_bytes_at_ties_and_zeros_on_a_cpu() -> None:
    code = torch.tensor(CODEBOOK)
    middle = (code[1:] + code[:-1]) / 2
    up, down = torch.tensor(2.0), torch.tensor(-2.0)
    values = [code, middle, torch.nextafter(middle, up), torch.nextafter(middle, down)]
    w = torch.cat([*values, torch.tensor([1.0, 0.0])])
    assert w.numel() == 63
    w = torch.cat([w, torch.tensor([-1.0]), torch.zeros(64)])
    for mine, other in zip(ours(w, 64), theirs(w, 64), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_same_values_on_a_cpu(dtype: torch.dtype) -> None:
    w = torch.randn(48, 64).to(dtype)
    q = ts_quant.quantize(w, "nf4")
    packed, state = bnb.quantize_4bit(w, quant_type="nf4", blocksize=64)
    assert torch.equal(q.dequantize(), bnb.dequantize_4bit(packed, state))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(256, 512), (33, 62), (4096,), (5, 7)])
def test_same_bytes_on_a_gpu_but_at_thresholds(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """bitsandbytes' CUDA back end is built with fast maths: its 1 / absmax may be an ulp off, and
    two of its thresholds are rounded the other way. Only values within 2 ulp of a threshold may
    differ, by one code."""
    w = (torch.randn(shape) * 0.02).to("cuda", dtype)
    (mine, my_absmax), (other, their_absmax) = ours(w, 64), theirs(w, 64)
    assert mine.shape == other.shape and torch.equal(my_absmax, their_absmax)

    def unpack(packed: Tensor) -> Tensor:
        nibbles = torch.stack([packed.view(-1) >> 4, packed.view(-1) & 15], dim=1)
        return nibbles.view(-1)[: w.numel()].int()

    difference = (unpack(mine) - unpack(other)).abs()
    scale = my_absmax.repeat_interleave(64)[: w.numel()]
    unit = w.view(-1).float() * (1 / scale)
    code = torch.tensor(CODEBOOK, device="cuda")
    middle = (code[1:] + code[:-1]) / 2
    distance = (unit[:, None] - middle).abs().min(dim=1).values
    assert bool((difference <= 1).all())
    assert bool((distance[difference == 1] <= 2 * 2.0**-24).all())
    assert int(difference.sum()) <= 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_values_on_a_gpu(dtype: torch.dtype) -> None:
    w = torch.randn(256, 512, dtype=dtype, device="cuda")
    packed, state = bnb.quantize_4bit(w, quant_type="nf4", blocksize=64)
    q = ts_quant.quantize(w, "nf4").with_buffers((packed, state.absmax))
    assert torch.equal(q.dequantize(), bnb.dequantize_4bit(packed, state))
