"""What holds for every codec: shapes, dtypes, blocks, chunks, refusals, the contract."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ts_quant
from ts_quant.codecs import blockwise
from ts_quant.codecs.base import codec_named

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ODD_SHAPES = [(), (1,), (2,), (63,), (64,), (65,), (7, 11), (0,), (3, 0), (5, 1, 13), (128, 64)]


def e4m3(byte: int) -> float:
    """The definition: sign, 4 bits of exponent (bias 7), 3 bits of mantissa."""
    exponent, mantissa = byte >> 3 & 15, byte & 7
    assert byte & 127 != 127
    magnitude = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    return -magnitude if byte & 128 else magnitude


def unit(q: ts_quant.QuantTensor, flat: list[int], i: int) -> Tensor:
    """Value i before it is scaled, in fp32."""
    from ts_quant.codecs.nf4 import CODEBOOK

    if q.codec == "nf4":
        return torch.tensor(CODEBOOK[flat[i // 2] >> 4 if i % 2 == 0 else flat[i // 2] & 15])
    if q.codec in ("nvfp4", "mxfp4"):
        code = flat[i // 2] & 15 if i % 2 == 0 else flat[i // 2] >> 4
        magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][code & 7]
        return torch.tensor(-magnitude if code & 8 else magnitude)
    return torch.tensor(e4m3(flat[i])) if q.codec == "fp8" else torch.tensor(float(flat[i])) / 127


def scale(q: ts_quant.QuantTensor, i: int) -> Tensor:
    """The scale of value i, in fp32."""
    _, *scales = q.buffers()
    block = i // q.block_size
    if q.spec.scales == "float32":
        return scales[0][block]
    if q.spec.scales == "tile":
        n, k = [1, 1, *q.shape][-2:]
        row, column = i // k, i % k
        tile_row = row // n * -(-n // q.spec.rows) + row % n // q.spec.rows
        return scales[0].view(-1)[tile_row * -(-k // q.block_size) + column // q.block_size]
    code = int(scales[0].view(-1)[block])
    if q.spec.scales == "log8":
        factor = torch.tensor(2.0 ** ((code - 255) / 16) if code else 0.0, dtype=torch.float32)
        return factor * scales[1][block // 256]
    if q.spec.scales == "e8m0":
        return torch.tensor(2.0 ** (code - 127))
    if q.spec.scales == "e4m3":
        return torch.tensor(e4m3(code)) * scales[1][0]
    assert q.spec.scales == "e4m3_div"
    return torch.tensor(e4m3(code)) / scales[1][0]


def slow_decode(q: ts_quant.QuantTensor) -> Tensor:
    """The definition, element by element, in fp32."""
    flat = q.buffers()[0].flatten().tolist()
    out = [unit(q, flat, i) * scale(q, i) for i in range(q.numel())]
    return torch.stack(out).view(q.shape) if out else torch.empty(q.shape)


BLOCK = {"nf4": 64, "int8": 64, "fp8": 32, "nvfp4": 16, "mxfp4": 32}
SCALE_BYTES = {"nf4": 4, "int8": 4, "fp8": 1, "nvfp4": 1, "mxfp4": 1}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ODD_SHAPES, ids=str)
def test_odd_shapes(codec: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    w = torch.randn(shape).to(dtype)
    q = ts_quant.quantize(w, codec)
    assert isinstance(q, ts_quant.QuantTensor)
    assert q.shape == w.shape and q.dtype == dtype and q.device == w.device
    assert q.codec == codec and q.block_size == BLOCK[codec] and not q.requires_grad
    blocks = -(-w.numel() // BLOCK[codec])
    code_bytes = w.numel() if codec in ("int8", "fp8") else (w.numel() + 1) // 2
    global_bytes = 4 if codec == "nvfp4" else 0
    assert q.nbytes == code_bytes + SCALE_BYTES[codec] * blocks + global_bytes
    expected = slow_decode(q)
    for target in DTYPES:
        decoded = q.dequantize(target)
        assert decoded.shape == w.shape and type(decoded) is Tensor
        assert torch.equal(decoded, expected.to(target))
    assert torch.equal(q.dequantize(), expected.to(dtype))


@settings(max_examples=40, deadline=None)
@given(n=st.integers(0, 700), half=st.integers(1, 200), name=st.sampled_from(["nf4", "int8"]))
def test_any_even_block_size(n: int, half: int, name: str) -> None:
    w = torch.randn(n)
    q = ts_quant.quantize(w, name, block_size=2 * half)
    assert torch.equal(q.dequantize(), slow_decode(q))
    absmax = [part.abs().max() for part in w.split(2 * half)] if n else []
    assert q.buffers()[1].tolist() == [float(a) for a in absmax]


LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("nf4", {"double_quant": True}),
    ("int8", {"double_quant": True}),
    ("fp8", {"layout": "row"}),
    ("fp8", {"layout": "tile"}),
    ("fp8", {"layout": "tensor"}),
    ("nvfp4", {"layout": "e4m3_div"}),
]


@pytest.mark.parametrize(("name", "options"), LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (0,), (3, 0), (2, 3, 17), (130, 3), (3, 140)], ids=str)
def test_odd_shapes_in_other_layouts(
    shape: tuple[int, ...], name: str, options: dict[str, Any]
) -> None:
    q = ts_quant.quantize(torch.randn(shape).bfloat16(), name, **options)
    expected = slow_decode(q)
    assert q.shape == shape and torch.equal(q.dequantize(torch.float32), expected)
    assert torch.equal(q.dequantize(), expected.bfloat16())


@pytest.mark.parametrize("block_size", [2, 62, 64, 4096])
def test_chunks_change_nothing(
    codec: str, block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = torch.randn(37, 1001)
    whole = ts_quant.quantize(w, codec, block_size)
    decoded = whole.dequantize(torch.bfloat16)
    monkeypatch.setattr(blockwise, "_ENCODE_VALUES_CPU", 640)
    monkeypatch.setattr(blockwise, "_DECODE_VALUES_CPU", 1000)
    cut = ts_quant.quantize(w, codec, block_size)
    for a, b in zip(whole.buffers(), cut.buffers(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(cut.dequantize(torch.bfloat16), decoded)


def test_temporary_memory_is_bounded(codec: str) -> None:
    """Nothing made while encoding or decoding is larger than a chunk in fp32, but the result."""
    from torch.utils._python_dispatch import TorchDispatchMode

    made: dict[int, int] = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                storage = result.untyped_storage()
                made[storage.data_ptr()] = storage.nbytes()
            return result

    def largest_besides(*known: Tensor) -> int:
        mine = {tensor.untyped_storage().data_ptr() for tensor in known}
        return max(size for pointer, size in made.items() if pointer not in mine)

    w = torch.randn(1 << 22).bfloat16()
    out = torch.empty_like(w)
    chosen = codec_named(codec)
    spec = chosen.spec_for(w.shape)
    with Watch():
        *buffers, absmax = chosen.encode_reference(w, spec)  # type: ignore[attr-defined]
    per_block = absmax.numel() * 4
    assert largest_besides(w, *buffers) <= max(4 * blockwise._ENCODE_VALUES_CPU, per_block)
    made.clear()
    with Watch():
        chosen.decode_reference(buffers, spec, out)  # type: ignore[attr-defined]
    assert largest_besides(*buffers, out) <= 4 * blockwise._DECODE_VALUES_CPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_values_survive(codec: str, dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    w = torch.tensor([top, -top, 0.0, top / 2], dtype=dtype)
    decoded = ts_quant.quantize(w, codec).dequantize()
    assert bool(torch.isfinite(decoded).all())
    # The next code of a format whose nearest one would be infinite.
    allowed = {"fp8": 0.0625, "mxfp4": 0.25, "nvfp4": 0.07}.get(codec, 0.0)
    assert bool(((decoded.double() - w.double()).abs()[:3] <= allowed * top).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_denormals_survive(codec: str, dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    w = torch.tensor([tiny, -tiny, 0.0, tiny], dtype=dtype)
    assert float(w[0]) == tiny > 0
    decoded = ts_quant.quantize(w, codec).dequantize()
    # Half the smallest code at the smallest scale of a format with small floating-point scales.
    lost = {"fp8": 2.0**-137, "mxfp4": 2.0**-129, "nvfp4": 2.0**-137}.get(codec, 0.0)
    assert bool(((decoded.double() - w.double()).abs() <= lost).all())


def test_non_contiguous_and_expanded_weights(codec: str) -> None:
    w = torch.randn(40, 70)
    for view in (w.t(), w[::3, ::2], w[:1].expand(9, 70)):
        q = ts_quant.quantize(view, codec)
        assert q.is_contiguous() and q.shape == view.shape
        assert torch.equal(q.dequantize(), ts_quant.quantize(view.clone(), codec).dequantize())


def test_the_default_dtype_and_device_do_not_matter(codec: str) -> None:
    """transformers builds models under both."""
    from ts_quant.codecs import nf4

    w = torch.randn(8, 72).bfloat16()
    expected = ts_quant.quantize(w, codec)
    dense = expected.dequantize()
    nf4._codebook_pairs.cache_clear()
    nf4._threshold_bins.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), torch.inference_mode():
            q = ts_quant.quantize(w, codec)
            again = q.dequantize()
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(expected.buffers(), q.buffers(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(again, dense)
    assert torch.equal(ts_quant.quantize(w, codec).dequantize(), dense)


def test_meta_weights_give_meta_buffers_of_the_right_size(codec: str) -> None:
    q = ts_quant.quantize(torch.empty(100, 33, device="meta", dtype=torch.bfloat16), codec)
    real = ts_quant.quantize(torch.randn(100, 33).bfloat16(), codec)
    assert q.device.type == "meta" and q.nbytes == real.nbytes
    assert q.dequantize().device.type == "meta" and q.dequantize().shape == (100, 33)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_are_refused_by_name(codec: str, bad: float, dtype: torch.dtype) -> None:
    w = torch.randn(10, 64).to(dtype)
    w[3, 5] = bad
    with pytest.raises(ts_quant.NonFiniteWeightError, match=r"layers\.3\.q_proj\.weight") as info:
        ts_quant.quantize(w, codec, name="layers.3.q_proj.weight")
    assert isinstance(info.value, ValueError)
    last = 191 + BLOCK[codec]
    assert f"1 of its {640 // BLOCK[codec]} blocks" in str(info.value)
    assert f"192 to {last}" in str(info.value)
    with pytest.raises(ValueError, match="the weight"):
        codec_named(codec).encode(w)


def test_float64_beyond_float32_is_refused(codec: str) -> None:
    w = torch.tensor([1e39, 1.0], dtype=torch.float64)
    with pytest.raises(ValueError, match="beyond the range of float32"):
        ts_quant.quantize(w, codec)


@pytest.mark.parametrize("name", ["fp8", "nvfp4", "mxfp4"])
def test_double_quant_is_refused_where_scales_are_one_byte(name: str) -> None:
    w = torch.randn(64)
    for call in (
        lambda: ts_quant.quantize(w, name, double_quant=True),
        lambda: codec_named(name).encode(w, double_quant=True),
        lambda: codec_named(name).bytes_per_weight(64, True),
        lambda: ts_quant.error(w, name, double_quant=True),
    ):
        with pytest.raises(ts_quant.OptionError, match="one byte each already"):
            call()


@pytest.mark.parametrize(
    ("name", "layout"), [("nf4", "row"), ("int8", "nested"), ("fp8", "e4m3"), ("nvfp4", "e8m0")]
)
def test_layouts_of_other_formats_are_refused(name: str, layout: str) -> None:
    with pytest.raises(ts_quant.OptionError, match=f"layout='{layout}'.*{name}.*expected"):
        ts_quant.quantize(torch.randn(8, 8), name, layout=layout)


def test_nested_scales_are_only_read() -> None:
    with pytest.raises(ts_quant.OptionError, match=r"read from checkpoints.*double_quant=True"):
        ts_quant.quantize(torch.randn(8, 8), "nf4", layout="nested")


@pytest.mark.parametrize("block_size", [0, 1, -2, 63, 64.0, True, "64", None, 1 << 70])
def test_block_sizes_that_are_refused(codec: str, block_size: object) -> None:
    with pytest.raises(ts_quant.OptionError, match=r"block_size.*even int of at least 2"):
        ts_quant.quantize(torch.randn(64), codec, block_size)  # type: ignore[arg-type]


def test_other_bad_arguments(codec: str) -> None:
    with pytest.raises(ts_quant.OptionError, match=r"unknown codec 'nf5'.*'int8', 'mxfp4', 'nf4'"):
        ts_quant.quantize(torch.randn(4), "nf5")
    with pytest.raises(ts_quant.OptionError, match="unknown codec"):
        ts_quant.quantize(torch.randn(4), ["nf4"])  # type: ignore[arg-type]
    with pytest.raises(ts_quant.OptionError, match=r"'w'.*torch\.int32"):
        ts_quant.quantize(torch.ones(4, dtype=torch.int32), codec, name="w")
    with pytest.raises(ts_quant.OptionError, match="not list"):
        ts_quant.quantize([1.0], codec)  # type: ignore[arg-type]
    with pytest.raises(ts_quant.OptionError, match="sparse"):
        ts_quant.quantize(torch.eye(4).to_sparse(), codec)


def test_the_codec_contract(codec: str) -> None:
    (entry,) = entry_points(group="trainstream.codecs", name=codec)
    plugin = entry.load()
    assert plugin is codec_named(codec)
    assert plugin.API_VERSION == 1 and plugin.name == codec
    n = 64 * 1000
    for block_size in (64, 128):
        q = plugin.encode(torch.randn(n), block_size=block_size, double_quant=False, name="w")
        global_bytes = 4 if codec == "nvfp4" else 0
        assert (q.nbytes - global_bytes) / n == plugin.bytes_per_weight(block_size)
    expected = {"nf4": 0.5625, "int8": 1.0625, "fp8": 1.03125, "nvfp4": 0.5625, "mxfp4": 0.53125}
    assert plugin.bytes_per_weight() == expected[codec]
    names = ("int8", "fp8", "nf4", "nvfp4", "mxfp4")
    assert [codec_named(name).error_rank_order for name in names] == [1, 2, 3, 4, 5]


def test_encoding_needs_no_gradient_and_keeps_none(codec: str) -> None:
    w = torch.nn.Parameter(torch.randn(8, 64))
    q = ts_quant.quantize(w, codec)
    assert not q.requires_grad and w.grad is None
    again = ts_quant.quantize(q, codec)  # a QuantTensor is read through its decoded values
    assert torch.equal(again.dequantize(), q.dequantize())
