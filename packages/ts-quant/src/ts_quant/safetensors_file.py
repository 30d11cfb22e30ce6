"""Read and write safetensors files one tensor at a time; nothing is mapped or kept open.

Layout (https://huggingface.co/docs/safetensors): a little-endian u64 header length, a JSON header
{name: {dtype, shape, data_offsets: [begin, end]}, "__metadata__": {text: text}}, then the tensors'
bytes, one after the other. A header is checked against the file's size before anything is read, so
what is allocated is never more than the file holds.
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ts_quant.errors import CheckpointError, OptionError

_METADATA = "__metadata__"
MOST_HEADER_BYTES = 100_000_000

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_ALIGN = 8
_MOST_DIMENSIONS = 64


@dataclass(frozen=True)
class Entry:
    """Where one tensor's bytes are, and which state of the file its header is of."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    size_bytes: int
    state: tuple[int, ...]


def read_header(file: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors of a file by name, and its metadata.

    Raises:
        CheckpointError: the file is missing, truncated or not a safetensors file, or one of its
            entries is inconsistent; names the file and, where there is one, the tensor.
    """
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # opening a pipe would wait for its other end
            raise CheckpointError(f"{file} is no regular file")
        with file.open("rb") as stream:
            state = _state(stream)
            total = state[0]
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if len(prefix) < 8 or length > min(total - 8, MOST_HEADER_BYTES):
                raise CheckpointError(
                    f"{file} has {total} bytes and announces a header of {length}. It is truncated "
                    f"or not a safetensors file: fetch it again"
                )
            raw = stream.read(length)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    try:
        header = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{file} has no JSON header ({error}). It is damaged or not a safetensors file"
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{file} has a header that is no JSON object")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{file} has metadata that is not text by name")
    data_bytes = total - 8 - length
    entries = {
        name: _entry(file, name, fields, 8 + length, data_bytes, state)
        for name, fields in header.items()
    }
    _check_coverage(file, entries, 8 + length, total)
    return entries, metadata


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The `object_pairs_hook` of json that refuses a name given twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _state(stream: BinaryIO) -> tuple[int, ...]:
    """Size, place and time of an open file: another one, or other contents, have another state."""
    found = os.fstat(stream.fileno())
    return found.st_size, found.st_dev, found.st_ino, found.st_mtime_ns


def _entry(
    file: Path, name: str, fields: Any, start: int, data_bytes: int, state: tuple[int, ...]
) -> Entry:
    try:
        code, shape = fields["dtype"], sizes(fields["shape"])
        begin, end = (_size(offset) for offset in fields["data_offsets"])
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{file}: the header entry of tensor {name!r} cannot be used: {error!r}"
        ) from error
    if not isinstance(code, str) or code not in DTYPES:
        raise CheckpointError(
            f"{file}: tensor {name!r} has dtype {code!r}, which this version does not read (it "
            f"reads {', '.join(DTYPES)})"
        )
    dtype = DTYPES[code]
    if end > data_bytes:
        raise CheckpointError(
            f"{file} is truncated: tensor {name!r} ends at byte {end} of the data, but the file "
            f"has only {data_bytes}. Fetch it again"
        )
    count = math.prod(shape) * dtype.itemsize
    if end - begin != count:
        raise CheckpointError(
            f"{file}: tensor {name!r} of shape {list(shape)} and {dtype} needs {count} bytes, but "
            f"its header entry gives {end - begin}. The file is damaged"
        )
    return Entry(file, name, dtype, shape, start + begin, end - begin, state)


def sizes(values: Any) -> tuple[int, ...]:
    """A shape from JSON, such as PyTorch can have.

    Raises:
        ValueError: no list of sizes, or more dimensions or elements than a tensor may have.
        TypeError: likewise.
    """
    if not isinstance(values, list) or len(values) > _MOST_DIMENSIONS:
        what = f"{len(values)} sizes" if isinstance(values, list) else type(values).__name__
        raise ValueError(f"the shape is {what}, not a list of up to {_MOST_DIMENSIONS} sizes")
    shape = tuple(_size(value) for value in values)
    if math.prod(max(size, 1) for size in shape) >= 1 << 59:  # bytes and strides fit an int64
        raise ValueError(f"the shape {values!r} is beyond what a tensor may have")
    return shape


def _size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is not a size")
    return value


def _check_coverage(file: Path, entries: dict[str, Entry], start: int, total: int) -> None:
    """Tensors lie one after the other and fill the data exactly."""
    position = start
    for entry in sorted(entries.values(), key=lambda e: (e.offset, e.size_bytes)):
        if entry.offset != position:
            raise CheckpointError(
                f"{file}: tensor {entry.name!r} begins at byte {entry.offset - start} of the data, "
                f"where byte {position - start} was expected: the header is damaged"
            )
        position += entry.size_bytes
    if position != total:
        raise CheckpointError(f"{file} has {total - position} bytes that belong to no tensor")


def read_tensor(entry: Entry) -> Tensor:
    """The tensor of an entry, on the CPU, in memory of its own.

    Raises:
        CheckpointError: its bytes cannot be read; names file and tensor.
    """
    if entry.size_bytes == 0:
        return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    try:
        with entry.file.open("rb") as stream:
            stream.seek(entry.offset)
            data = bytearray(entry.size_bytes)
            count = stream.readinto(data)
            state = _state(stream)
    except OSError as error:
        raise CheckpointError(f"{entry.file}: {entry.name!r} cannot be read: {error}") from error
    if state != entry.state:
        raise CheckpointError(
            f"{entry.file} was replaced or written after its header was read, so {entry.name!r} "
            f"may be another file's bytes. Read it again, once nothing writes it"
        )
    if count != entry.size_bytes:
        raise CheckpointError(
            f"{entry.file} ended after {count} of the {entry.size_bytes} bytes of {entry.name!r}"
        )
    flat = torch.frombuffer(data, dtype=torch.uint8)
    return flat.view(entry.dtype).reshape(entry.shape)


def write_file(
    file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors, one at a time, so that the file appears complete or not at all.

    Raises:
        OptionError: a name that the format cannot hold, or a value that is no tensor with memory.
        CheckpointError: a dtype that the format has no name for.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata or {})}
    position = 0
    for name, tensor in tensors.items():
        _refuse_unwritable(name, tensor)
        code = _CODES.get(tensor.dtype)
        if code is None:
            raise CheckpointError(f"{name!r} has dtype {tensor.dtype}, which safetensors has not")
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": code,
            "shape": list(tensor.shape),
            "data_offsets": [position, position + size],
        }
        position += size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % _ALIGN)
    aside = file.with_name(f"{file.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with aside.open("wb") as stream:
            stream.write(struct.pack("<Q", len(raw)) + raw)
            for tensor in tensors.values():
                stream.write(_bytes(tensor))
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(aside, file)
    finally:
        aside.unlink(missing_ok=True)


def _refuse_unwritable(name: Any, tensor: Any) -> None:
    if not isinstance(name, str) or name == _METADATA:
        raise OptionError(
            f"{name!r} cannot name a tensor of a safetensors file: expected a str other than "
            f"{_METADATA!r}"
        )
    if not isinstance(tensor, Tensor):
        raise OptionError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
    # Wrappers (another library's stored weights, fake tensors) have no memory of their own.
    wrapper = hasattr(tensor, "__tensor_flatten__") or hasattr(tensor, "fake_mode")
    odd = wrapper or tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided
    if odd or (tensor.numel() and not tensor.data_ptr()):
        raise OptionError(
            f"{name!r} is a {type(tensor).__name__} on {tensor.device} with layout "
            f"{tensor.layout}, which has no memory that could be written. Save an ordinary tensor"
        )


def _bytes(tensor: Tensor) -> Any:
    """A tensor's bytes; without numpy, which torch may lack."""
    import ctypes

    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    size = flat.numel() * flat.element_size()
    if size == 0:
        return b""
    # The copy keeps this simple and is bounded by one tensor.
    return ctypes.string_at(flat.data_ptr(), size)
