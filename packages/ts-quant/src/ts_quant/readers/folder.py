"""A checkpoint folder of any format that is read, one weight at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ts_quant.errors import CheckpointError
from ts_quant.readers.plan import ReadPlan, plan_reading
from ts_quant.safetensors_file import Entry, read_header, read_tensor

_MOST_JSON_BYTES = 100_000_000


def iterate_checkpoint(
    folder: str | Path, dtype: torch.dtype = torch.bfloat16
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a safetensors checkpoint, quantized weights as they are stored.

    All headers are checked before the first tensor is read. One weight at a time is in memory, if
    the caller keeps none.

    Args:
        folder: holds *.safetensors, config.json (with its quantization_config) and, from
            ModelOpt, hf_quant_config.json.
        dtype: what quantized weights decode to by default; ordinary tensors keep theirs.

    Yields:
        (name, tensor): QuantTensors for quantized weights, named and shaped as models hold them (a
        TransposedQuantTensor for MXFP4's experts, which are stored the other way round); ordinary
        tensors for the rest. Scales of activations are left out. On the CPU.

    Raises:
        CheckpointError: files are missing, damaged or truncated.
        NotAvailableError: a format or an algorithm that is not read, by name.
    """
    path = Path(folder)
    files, indexed = _files(path)
    entries: dict[str, Entry] = {}
    for file in files:
        found, _ = read_header(file)
        twice = entries.keys() & found.keys()
        if twice:
            raise CheckpointError(f"{file} and another file both hold {min(twice)!r}")
        entries.update(found)
    _refuse_missing(path, indexed, entries)
    plan = plan_reading(
        entries,
        (_json(path / "config.json") or {}).get("quantization_config"),
        lambda name: read_tensor(entries[name]),
        modelopt=_json(path / "hf_quant_config.json"),
    )
    if plan is None:
        plan = ReadPlan("plain")
    for name, weight in plan.weights.items():
        tensors = {role: read_tensor(entries[key]) for role, key in weight.sources.items()}
        yield name, weight.build_as_held(tensors, dtype)
    left_out = plan.consumed | plan.ignored
    for name, entry in entries.items():
        if name not in left_out:
            yield name, read_tensor(entry)


def _json(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        if file.stat().st_size > _MOST_JSON_BYTES:
            raise ValueError("too large")
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} is no JSON object")
    return found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # no name that a file can have
        return False


def _refuse_missing(path: Path, indexed: dict[str, str], entries: Mapping[str, Entry]) -> None:
    """Every tensor of the index is in the file that the index names."""
    missing = [
        name
        for name, file in indexed.items()
        if name not in entries or entries[name].file != path / file
    ]
    if missing:
        raise CheckpointError(
            f"{path}: {indexed[missing[0]]} does not hold {missing[0]!r}, which the index says is "
            f"there ({len(missing)} such tensors). The file is another model's: fetch it again"
        )


def _files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """The shards and what the index says is in them; without one, every .safetensors file."""
    index = path / "model.safetensors.index.json"
    found = _json(index)
    if found is None:
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{path} holds no .safetensors file")
        return files, {}
    shards = found.get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
        raise CheckpointError(f"{index} has no weight_map from tensor names to files")
    names = sorted(set(shards.values()))
    strange = [name for name in names if Path(name).name != name]
    if strange:
        raise CheckpointError(f"{index} names files outside its folder: {', '.join(strange)}")
    missing = [name for name in names if not _is_file(path / name)]
    if missing:
        raise CheckpointError(
            f"{index} names {len(missing)} files that are not in the folder: "
            f"{', '.join(missing[:5])}. Download them, or remove the index."
        )
    return [path / name for name in names], shards
