"""Safetensors files: strange headers and descriptions, and values that cannot be written."""

from __future__ import annotations

import json
import os
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import ts_quant
from ts_quant.safetensors_file import read_header, read_tensor, write_file


def written(file: Path, header: dict[str, Any], data: bytes) -> Path:
    raw = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return file


HUGE = 1 << 61


@pytest.mark.parametrize(
    ("shape", "size", "words"),
    [
        ([HUGE] * 100_000, 4, "up to 64 sizes"),  # whose product alone takes minutes
        ([0] * 65, 0, "up to 64 sizes"),
        ([HUGE] * 5 + [0], 0, "beyond what a tensor may have"),
        ([0, HUGE, 2], 0, "beyond what a tensor may have"),
        ([1 << 30] * 2 + [0], 0, "beyond what a tensor may have"),
        ([float("inf")], 4, "inf is not a size"),
        ([1.0], 4, "not a size"),
        ([True], 4, "not a size"),
        ([-1], 4, "not a size"),
        ("1", 4, "str"),
        ({"1": 1}, 4, "dict"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_impossible_shapes(tmp_path: Path, shape: Any, size: int, words: str) -> None:
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, size]}
    with pytest.raises(ts_quant.CheckpointError, match=f"(?s)'a'.*{words}") as caught:
        read_header(written(tmp_path / "x.safetensors", {"a": entry}, bytes(size)))
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("code", ["F4", None, ["F32"], 3])
def test_unknown_dtypes_are_named(tmp_path: Path, code: Any) -> None:
    entry = {"dtype": code, "shape": [1], "data_offsets": [0, 4]}
    with pytest.raises(ts_quant.CheckpointError, match=r"'a' has dtype .*it reads BOOL"):
        read_header(written(tmp_path / "x.safetensors", {"a": entry}, bytes(4)))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.complex64])
def test_dtypes_of_other_peoples_tensors(tmp_path: Path, dtype: torch.dtype) -> None:
    value = torch.tensor([1, 2, 3], dtype=dtype)
    write_file(tmp_path / "x.safetensors", {"a": value})
    entries, _ = read_header(tmp_path / "x.safetensors")
    assert torch.equal(read_tensor(entries["a"]), value)


def test_values_are_written_as_they_read(tmp_path: Path) -> None:
    """Also where torch keeps a sign or a conjugate apart from the bytes."""
    complex_values = torch.tensor([1 + 2j, 3 - 1j])
    tensors = {
        "conjugate": complex_values.conj(),
        "imaginary": complex_values.conj().imag,
        "expanded": torch.ones(1).expand(5),
        "view": ts_quant.quantize(torch.randn(4, 8), "int8")[1],
        "nothing": torch.empty(0, 3),
    }
    found = ts_quant.load_quantized(ts_quant.save_quantized(tensors, tmp_path / "x.safetensors"))
    for name, value in tensors.items():
        assert torch.equal(found[name], value.clone().resolve_conj().resolve_neg())


class Wrapper(torch.Tensor):
    """A tensor subclass without memory, as other libraries have them."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        return made

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return Wrapper(args[0].inner)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({1: torch.ones(2)}, "1 cannot name"),
        ({None: ts_quant.quantize(torch.ones(2))}, "None cannot name"),
        ({"__metadata__": torch.ones(2)}, "'__metadata__' cannot name"),
        ({"a": [1.0]}, "'a' is a list"),
        ({"a": torch.ones(2, device="meta")}, "'a' is a Tensor on meta"),
        ({"a": ts_quant.quantize(torch.ones(2, device="meta"))}, "on meta"),
        ({"a": torch.eye(3).to_sparse()}, "sparse"),
        ({"a": Wrapper(torch.ones(3))}, "'a' is a Wrapper"),
        ({"a": FakeTensorMode().from_tensor(torch.ones(3))}, "'a' is a FakeTensor"),
        ([torch.ones(2)], "is a list"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-",
)
def test_what_cannot_be_written_leaves_no_file(tmp_path: Path, tensors: Any, words: str) -> None:
    with pytest.raises(ts_quant.OptionError, match=words):
        ts_quant.save_quantized(tensors, tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())


def test_threads_that_write_one_file(tmp_path: Path) -> None:
    """The file is one thread's, whole."""
    file, errors = tmp_path / "x.safetensors", []

    def write(value: int) -> None:
        try:
            for _ in range(10):
                ts_quant.save_quantized({"a": torch.full((20_000,), value)}, file)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(value,)) for value in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    found = ts_quant.load_quantized(file)["a"]
    assert bool((found == found[0]).all())
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path) -> None:
    """A header's offsets are not used for another file's bytes."""
    file = tmp_path / "x.safetensors"
    ts_quant.save_quantized({"a": torch.zeros(4), "b": torch.zeros(4)}, file)
    tensors = ts_quant.iterate_quantized(file)
    next(tensors)
    ts_quant.save_quantized({"c": torch.ones(4), "d": torch.ones(4)}, file)
    with pytest.raises(ts_quant.CheckpointError, match=r"x\.safetensors was replaced .*'b'"):
        next(tensors)
    tensors = ts_quant.iterate_quantized(file)
    next(tensors)
    with file.open("r+b") as stream:  # in place
        stream.seek(-4, 2)
        stream.write(b"abcd")
        os.utime(stream.fileno(), ns=(1, 1))  # whatever the clock's resolution
    with pytest.raises(ts_quant.CheckpointError, match="was replaced or written"):
        next(tensors)


def description(file: Path) -> tuple[dict[str, Any], bytes]:
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def test_ambiguous_descriptions(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    ts_quant.save_quantized({"w": ts_quant.quantize(torch.randn(4, 64)), "p": torch.ones(3)}, file)
    header, data = description(file)
    key = "trainstream.weights"
    weights = json.loads(header["__metadata__"][key])
    twice = f'{{"w": 1, "w": {json.dumps(weights["w"])}}}'
    header["__metadata__"][key] = twice
    with pytest.raises(ts_quant.CheckpointError, match="occurs twice"):
        ts_quant.load_quantized(written(file, header, data))
    header["__metadata__"][key] = json.dumps({"p": weights["w"]})
    for part in ("codes", "absmax"):
        header[f"p.{part}"] = header.pop(f"w.{part}")
    with pytest.raises(ts_quant.CheckpointError, match="holds 'p' twice"):
        ts_quant.load_quantized(written(file, header, data))
    weights["w"]["shape"] = [HUGE] * 100_000
    header["__metadata__"][key] = json.dumps(weights)
    with pytest.raises(ts_quant.CheckpointError, match="impossible shape"):
        ts_quant.load_quantized(written(file, header, data))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(ts_quant.CheckpointError, match="no regular file"):
        list(ts_quant.iterate_checkpoint(tmp_path))


@pytest.mark.parametrize("name", ["a\0b", "a" * 5000, "..", "."])
def test_names_that_no_file_can_have(tmp_path: Path, name: str) -> None:
    with pytest.raises(ts_quant.CheckpointError):
        read_header(tmp_path / name)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ts_quant.CheckpointError, match="names"):
        list(ts_quant.iterate_checkpoint(tmp_path))


def test_an_index_whose_tensors_are_missing(tmp_path: Path) -> None:
    write_file(tmp_path / "a.safetensors", {"one": torch.ones(2)})
    write_file(tmp_path / "b.safetensors", {"two": torch.ones(2)})
    index = tmp_path / "model.safetensors.index.json"
    shards = {"one": "a.safetensors", "two": "b.safetensors"}
    index.write_text(json.dumps({"weight_map": shards}))
    assert {name for name, _ in ts_quant.iterate_checkpoint(tmp_path)} == {"one", "two"}
    for wrong in ({**shards, "three": "b.safetensors"}, {**shards, "two": "a.safetensors"}):
        index.write_text(json.dumps({"weight_map": {**wrong, "one": "b.safetensors"}}))
        with pytest.raises(ts_quant.CheckpointError, match=r"b\.safetensors does not hold 'one'"):
            list(ts_quant.iterate_checkpoint(tmp_path))
