"""Read safetensors files one tensor at a time, with nothing mapped and nothing left open.

A memory-mapped reader counts every page it touched as resident until the file is closed. Loading a
model larger than free RAM needs the opposite: read exactly one tensor's bytes into memory that the
caller owns. The header is checked against the file's size before any tensor is read, so a
truncated file is refused up front, by name.

Layout (https://huggingface.co/docs/safetensors): a little-endian u64 header length, a JSON header
{name: {dtype, shape, data_offsets: [begin, end]}}, then the tensors' bytes.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ts_core.errors import DataError

_MAX_HEADER_BYTES = 100_000_000
_MOST_DIMENSIONS = 64

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
}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor's bytes are: `size_bytes` bytes from `offset` on in `file`.

    `state` is that of the file when its header was read (`file_state`).
    """

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    size_bytes: int
    state: tuple[int, ...] = ()


def read_header(file: Path) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file, by name, checked against the file's size.

    Raises:
        DataError: the file is missing, truncated or not a safetensors file, or one of its entries
            is inconsistent; the message names the file and, where there is one, the tensor.
    """
    try:
        with file.open("rb") as stream:
            state = file_state(stream)
            total = state[0]
            prefix = stream.read(8)
            if len(prefix) < 8:
                raise DataError(
                    f"{file} has {total} bytes, too few for a safetensors file. "
                    f"It is truncated: fetch it again."
                )
            (length,) = struct.unpack("<Q", prefix)
            if length > min(total - 8, _MAX_HEADER_BYTES):
                raise DataError(
                    f"{file} announces a header of {length} bytes but has {total} bytes. "
                    f"It is truncated or not a safetensors file: fetch it again."
                )
            raw = stream.read(length)
    except FileNotFoundError:
        raise DataError(f"{file} does not exist. Fetch the missing shard.") from None
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error}.") from error
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{file} does not have a JSON header ({error}). It is not a safetensors file, or it is "
            f"damaged: fetch it again."
        ) from error
    if not isinstance(header, dict):
        raise DataError(f"{file} has a header that is not a JSON object. Fetch it again.")
    data_start, data_bytes = 8 + length, total - 8 - length
    entries = {
        name: _entry(file, name, fields, data_start, data_bytes, state)
        for name, fields in header.items()
        if name != "__metadata__"
    }
    _check_coverage(file, entries, data_start, data_bytes)
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _check_coverage(
    file: Path, entries: dict[str, TensorEntry], data_start: int, data_bytes: int
) -> None:
    """The format's rule: tensors lie one after the other and fill the data exactly."""
    position = data_start
    for entry in sorted(entries.values(), key=lambda e: (e.offset, e.size_bytes)):
        if entry.offset != position:
            raise DataError(
                f"{file}: tensor {entry.name!r} begins at byte {entry.offset - data_start} of the "
                f"data, where byte {position - data_start} was expected: its header is damaged, "
                f"and would give it another tensor's values. Fetch the file again."
            )
        position += entry.size_bytes
    if position != data_start + data_bytes:
        raise DataError(
            f"{file} has {data_start + data_bytes - position} bytes of data that belong to no "
            f"tensor. The file is damaged: fetch it again."
        )


def file_state(stream: IO[bytes]) -> tuple[int, ...]:
    """Size, place and time of an open file: another one, or other contents, have another state."""
    found = os.fstat(stream.fileno())
    return found.st_size, found.st_dev, found.st_ino, found.st_mtime_ns


def _entry(
    file: Path,
    name: str,
    fields: Any,
    data_start: int,
    data_bytes: int,
    state: tuple[int, ...],
) -> TensorEntry:
    try:
        code, shape = fields["dtype"], _shape(fields["shape"])
        begin, end = (_size(offset) for offset in fields["data_offsets"])
    except (TypeError, KeyError, ValueError) as error:
        raise DataError(
            f"{file}: the header entry of tensor {name!r} is damaged ({error!r})."
        ) from error
    if not isinstance(code, str) or code not in DTYPES:
        raise DataError(
            f"{file}: tensor {name!r} has dtype {code!r}, which this version does not read "
            f"(it reads {', '.join(DTYPES)})."
        )
    if end > data_bytes:
        raise DataError(
            f"{file} is truncated: tensor {name!r} ends at byte {end} of the data, but the file "
            f"has only {data_bytes} bytes of data. Fetch the file again."
        )
    dtype = DTYPES[code]
    count = math.prod(shape)
    if end - begin != count * dtype.itemsize:
        raise DataError(
            f"{file}: tensor {name!r} of shape {list(shape)} and dtype {code} needs "
            f"{count * dtype.itemsize} bytes, but its header entry gives {end - begin}. "
            f"The file is damaged: fetch it again."
        )
    return TensorEntry(name, file, dtype, shape, data_start + begin, end - begin, state)


def _shape(values: Any) -> tuple[int, ...]:
    """A shape such as PyTorch can have; anything else is a ValueError."""
    if not isinstance(values, list) or len(values) > _MOST_DIMENSIONS:
        raise ValueError(f"the shape is no list of up to {_MOST_DIMENSIONS} sizes")
    shape = tuple(_size(value) for value in values)
    if math.prod(max(size, 1) for size in shape) >= 1 << 59:  # bytes and strides fit an int64
        raise ValueError(f"the shape {values!r} is beyond what a tensor may have")
    return shape


def _size(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is not a size")
    return value


def read_tensor(entry: TensorEntry) -> Tensor:
    """The tensor of `entry`, on the CPU, in memory of its own.

    Raises:
        DataError: the bytes cannot be read; names file and tensor.
    """
    data = torch.empty(entry.size_bytes, dtype=torch.uint8, device="cpu")
    view = memoryview(data.numpy().data)
    done = 0
    try:
        with entry.file.open("rb", buffering=0) as stream:
            stream.seek(entry.offset)
            while done < entry.size_bytes:
                count = stream.readinto(view[done:])
                if not count:
                    raise DataError(
                        f"{entry.file} ended after {done} of the {entry.size_bytes} bytes of "
                        f"tensor {entry.name!r}. It changed or was truncated while being read."
                    )
                done += count
            if file_state(stream) != entry.state:
                raise DataError(
                    f"{entry.file} was replaced or written after its header was read, so "
                    f"{entry.name!r} may be another file's bytes. Load it again, once nothing "
                    f"writes it."
                )
    except OSError as error:
        raise DataError(f"{entry.file}: tensor {entry.name!r} cannot be read: {error}.") from error
    if entry.size_bytes == 0:
        return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
    return data.view(entry.dtype).reshape(entry.shape)
