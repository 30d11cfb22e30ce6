"""Our own files: what is saved is what is loaded, and damage is refused with a clear error."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ts_quant
from ts_quant.safetensors_file import read_header, read_tensor, write_file
from ts_quant.stored import WEIGHTS_KEY, iterate_quantized


def _tensors() -> dict[str, Tensor]:
    torch.manual_seed(5)
    weight = torch.randn(20, 64)
    return {
        "a.weight": ts_quant.quantize(weight.bfloat16(), "nf4"),
        "b.weight": ts_quant.quantize(weight, "int8", block_size=32, double_quant=True),
        "c.weight": ts_quant.quantize(weight.half(), "fp8"),
        "d.weight": ts_quant.quantize(weight, "nvfp4"),
        "e.bias": torch.randn(7, dtype=torch.bfloat16),
        "empty": torch.empty(0, 3),
        "number": torch.tensor(2.5),
    }


def test_round_trip(tmp_path: Path) -> None:
    given_tensors = _tensors()
    file = ts_quant.save_quantized(given_tensors, tmp_path / "w.safetensors")
    found = ts_quant.load_quantized(file)
    assert set(found) == set(given_tensors)
    for name, tensor in given_tensors.items():
        assert found[name].dtype is tensor.dtype and found[name].shape == tensor.shape
        if isinstance(tensor, ts_quant.QuantTensor):
            assert found[name].spec == tensor.spec  # type: ignore[attr-defined]
            for one, other in zip(found[name].buffers(), tensor.buffers(), strict=True):  # type: ignore[operator]
                assert torch.equal(one, other)
        else:
            assert torch.equal(found[name], tensor)
    assert list(tmp_path.iterdir()) == [file]
    some = ts_quant.load_quantized(file, ["d.weight", "e.bias"])
    assert set(some) == {"d.weight", "e.bias"}
    with pytest.raises(ts_quant.CheckpointError, match="nope"):
        ts_quant.load_quantized(file, ["nope"])


def test_the_safetensors_library_reads_the_same_bytes(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    given_tensors = _tensors()
    file = ts_quant.save_quantized(given_tensors, tmp_path / "w.safetensors")
    theirs = safetensors.load_file(file)
    assert torch.equal(theirs["a.weight.codes"], given_tensors["a.weight"].codes)  # type: ignore[attr-defined]
    assert torch.equal(theirs["e.bias"], given_tensors["e.bias"])
    again = tmp_path / "theirs.safetensors"
    safetensors.save_file(theirs, again)
    entries, _ = read_header(again)
    assert all(torch.equal(read_tensor(entries[name]), value) for name, value in theirs.items())


@pytest.mark.parametrize(
    ("codec", "options", "buffer", "value"),
    [
        ("nf4", {}, "absmax", float("nan")),
        ("nf4", {"double_quant": True}, "absmax_scale", float("inf")),
        ("int8", {}, "absmax", float("-inf")),
        ("fp8", {}, "scale", 0xFF),
        ("fp8", {"outlier_channels": [3, 40]}, "outlier_values", float("nan")),
        ("nvfp4", {}, "scale", 0xFF),
        ("nvfp4", {}, "global_scale", float("nan")),
        ("mxfp4", {}, "scale", 0xFF),
    ],
)
def test_scales_that_no_weight_has(
    tmp_path: Path, codec: str, options: dict[str, Any], buffer: str, value: float
) -> None:
    weight = ts_quant.quantize(torch.randn(64, 64, dtype=torch.bfloat16), codec, **options)
    file = ts_quant.save_quantized({"good": weight}, tmp_path / "good.safetensors")
    assert list(ts_quant.load_quantized(file)) == ["good"]
    getattr(weight, buffer).view(-1)[3 if getattr(weight, buffer).numel() > 3 else 0] = value
    file = ts_quant.save_quantized({"w": weight}, tmp_path / "bad.safetensors")
    with pytest.raises(ts_quant.CheckpointError, match=rf"bad.*'w' has 1 scales.*{buffer}"):
        ts_quant.load_quantized(file)


def test_names_that_would_clash(tmp_path: Path) -> None:
    q = ts_quant.quantize(torch.randn(4, 64))
    with pytest.raises(ts_quant.OptionError, match=r"a\.codes"):
        ts_quant.save_quantized({"a": q, "a.codes": torch.ones(1)}, tmp_path / "x")
    with pytest.raises(ts_quant.CheckpointError, match="complex128"):
        ts_quant.save_quantized({"c": torch.ones(1, dtype=torch.complex128)}, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_one_tensor_at_a_time(tmp_path: Path) -> None:
    weights = {f"w{i}": ts_quant.quantize(torch.randn(256, 1024), "int8") for i in range(6)}
    file = ts_quant.save_quantized(weights, tmp_path / "w.safetensors")
    tracemalloc.start()
    for _, tensor in iterate_quantized(file):
        del tensor
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.5 * weights["w0"].nbytes  # not six


def test_another_file_is_refused(tmp_path: Path) -> None:
    write_file(tmp_path / "plain", {"a": torch.ones(2)})
    with pytest.raises(ts_quant.CheckpointError, match=r"trainstream\.layout=None"):
        ts_quant.load_quantized(tmp_path / "plain")
    with pytest.raises(ts_quant.CheckpointError, match="cannot be read"):
        ts_quant.load_quantized(tmp_path / "missing")


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """(where to write, the bytes of a good file)."""
    folder = tmp_path_factory.mktemp("fuzz")
    file = ts_quant.save_quantized(_tensors(), folder / "good.safetensors")
    return folder / "bad.safetensors", file.read_bytes()


def _try(file: Path, data: bytes) -> None:
    """Loads or refuses; never another error, never more memory than a few times the file's."""
    file.write_bytes(data)
    tracemalloc.start()
    try:
        for _, tensor in iterate_quantized(file):
            assert tensor.numel() * tensor.element_size() <= 16 * len(data)
            if tensor.numel():
                getattr(tensor, "dequantize", tensor.float)()
    except ts_quant.CheckpointError as error:
        assert str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 40 * len(data) + 4_000_000


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 20_000))
def test_truncated_files(raw: tuple[Path, bytes], cut: int) -> None:
    file, data = raw
    _try(file, data[: cut % len(data)])
    with pytest.raises(ts_quant.CheckpointError):
        ts_quant.load_quantized(file)


@settings(max_examples=150, deadline=None)
@given(edits=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), min_size=1, max_size=4))
def test_bytes_changed_in_the_header(raw: tuple[Path, bytes], edits: list[tuple[int, int]]) -> None:
    file, data = raw
    length = int.from_bytes(data[:8], "little")
    changed = bytearray(data)
    for place, value in edits:
        changed[place % (8 + length)] = value
    _try(file, bytes(changed))


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 1 << 70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(-2, 1 << 66), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_fields_of_headers_and_descriptions_replaced(raw: tuple[Path, bytes], data: Any) -> None:
    file, good = raw
    length = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + length])
    weights = json.loads(header["__metadata__"][WEIGHTS_KEY])
    target = data.draw(st.sampled_from([header, weights]))
    path = []
    while isinstance(target, dict) and target and (not path or data.draw(st.booleans())):
        key = data.draw(st.sampled_from(sorted(target)))
        path.append((target, key))
        target = target[key]
    owner, key = path[-1]
    if data.draw(st.booleans()):
        owner[key] = data.draw(JUNK)
    else:
        del owner[key]
    metadata = header.get("__metadata__")
    if isinstance(metadata, dict) and isinstance(metadata.get(WEIGHTS_KEY), str):
        metadata[WEIGHTS_KEY] = json.dumps(weights)
    made = json.dumps(header).encode()
    _try(file, len(made).to_bytes(8, "little") + made + good[8 + length :])
