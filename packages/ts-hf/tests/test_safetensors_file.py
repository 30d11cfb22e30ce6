"""Reading safetensors files: equal to the safetensors package, and damaged files by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ts_core.errors import DataError
from ts_hf.checkpoints.safetensors_file import DTYPES, read_header, read_tensor


def _sample(dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(1, 13).reshape(3, 4)
    return (values % 2 == 0) if dtype == torch.bool else values.to(dtype)


@pytest.mark.parametrize("code", sorted(DTYPES))
def test_every_dtype_reads_back(code: str, tmp_path: Path) -> None:
    dtype = DTYPES[code]
    wanted = {"a": _sample(dtype), "empty": torch.empty((0, 5), dtype=dtype)}
    save_file(wanted, tmp_path / "x.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    assert set(header) == {"a", "empty"}
    read = read_tensor(header["a"])
    assert read.dtype == dtype and read.shape == (3, 4)
    assert torch.equal(read.view(torch.uint8), wanted["a"].view(torch.uint8))
    assert read_tensor(header["empty"]).shape == (0, 5)


def test_scalar_and_own_memory(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"s": torch.tensor(2.5)}, file)
    first = read_tensor(read_header(file)["s"])
    first.fill_(7.0)
    assert first.shape == () and read_tensor(read_header(file)["s"]).item() == 2.5


@pytest.mark.parametrize("keep", [0, 5, 8, 40, -1])
def test_truncated_file_is_refused_by_name(keep: int, tmp_path: Path) -> None:
    file = tmp_path / "shard.safetensors"
    save_file({"weight": torch.ones(8, 8)}, file)
    raw = file.read_bytes()
    file.write_bytes(raw[:keep])
    with pytest.raises(DataError, match=r"shard\.safetensors"):
        read_header(file)


def test_truncated_data_names_the_tensor(tmp_path: Path) -> None:
    file = tmp_path / "shard.safetensors"
    save_file({"weight": torch.ones(8, 8)}, file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"shard\.safetensors is truncated: tensor 'weight'"):
        read_header(file)


def test_file_that_shrinks_while_being_read(tmp_path: Path) -> None:
    file = tmp_path / "shard.safetensors"
    save_file({"weight": torch.ones(8, 8)}, file)
    entry = read_header(file)["weight"]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"shard\.safetensors ended after 156 of the 256.*'weight'"):
        read_tensor(entry)


def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path) -> None:
    """A header's offsets are not used for another file's bytes."""
    file = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(4), "b": torch.zeros(4)}, file)
    entries = read_header(file)
    assert torch.equal(read_tensor(entries["a"]), torch.zeros(4))
    save_file({"c": torch.ones(4), "d": torch.ones(4)}, tmp_path / "y.safetensors")
    (tmp_path / "y.safetensors").replace(file)
    with pytest.raises(DataError, match=r"x\.safetensors was replaced .*'b'"):
        read_tensor(entries["b"])


@pytest.mark.parametrize("shape", [(2, 3), (0, 3)])
def test_tensors_are_on_the_cpu_whatever_the_default_device(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(shape)}, file)
    with torch.device("meta"):
        found = read_tensor(read_header(file)["a"])
    assert torch.equal(found, torch.ones(shape))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h: h["w"].update(dtype="F6"), "'w' has dtype 'F6'"),
        (lambda h: h["w"].update(shape=[3, 3]), r"'w' of shape \[3, 3\].*needs 36 bytes"),
        (lambda h: h["w"].update(shape=[-2, -2]), "'w'"),
        (lambda h: h["w"].update(data_offsets=[0, 1 << 40]), "truncated: tensor 'w'"),
        (lambda h: h["w"].update(data_offsets=[-4, 12]), "'w'"),
        (lambda h: h["w"].pop("shape"), "header entry of tensor 'w' is damaged"),
        (lambda h: h.update(w=3), "header entry of tensor 'w' is damaged"),
        (lambda h: h["w"].update(shape=[float("inf")]), "header entry of tensor 'w' is damaged"),
        (lambda h: h["w"].update(shape=[1 << 61] * 100_000), "list of up to 64 sizes"),
        (lambda h: h["w"].update(shape=[1 << 61, 0, 1 << 61]), "beyond what a tensor may have"),
    ],
)
def test_damaged_header_entries(
    change: Callable[[dict[str, Any]], None],
    words: str,
    tmp_path: Path,
    edit_header: Callable[..., None],
) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"w": torch.ones(2, 2)}, file)
    edit_header(file, change)
    with pytest.raises(DataError, match=words):
        read_header(file)


def test_not_a_safetensors_file(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes((20).to_bytes(8, "little") + b"this is not JSON at all, is it")
    with pytest.raises(DataError, match="does not have a JSON header"):
        read_header(file)
    with pytest.raises(DataError, match=r"gone\.safetensors does not exist"):
        read_header(tmp_path / "gone.safetensors")


def _rewrite_header(file: Path, change: Callable[[str], str]) -> None:
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = change(raw[8 : 8 + length].decode()).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h: h.replace("[16,32]", "[0,16]"), "was expected"),
        (lambda h: h.replace("[16,32]", "[20,36]"), "truncated|was expected"),
        (lambda h: h.replace('"b"', '"a"'), "occurs twice"),
        (lambda h: h.replace('"F32"', '["F32"]'), "dtype"),
        (lambda h: '{"a":' * 50_000, "JSON"),
    ],
)
def test_headers_that_would_give_other_values_are_refused(
    change: Callable[[str], str], words: str, tmp_path: Path
) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(4), "b": torch.zeros(4)}, file)
    assert "[16,32]" in file.read_bytes().decode(errors="replace")
    _rewrite_header(file, change)
    with pytest.raises(DataError, match=words):
        read_header(file)
