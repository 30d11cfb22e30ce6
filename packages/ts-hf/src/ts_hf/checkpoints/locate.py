"""Find a checkpoint's files: a folder, or a hub id through huggingface_hub's cache."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ts_core.errors import DataError
from ts_hf.checkpoints.safetensors_file import TensorEntry, read_header

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "model.pth")
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.\-]*(/[\w.\-]+)?$")


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a checkpoint by name, from the headers of its checked files."""

    folder: Path
    tensors: Mapping[str, TensorEntry]

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(entry.size_bytes for entry in self.tensors.values())


def resolve_folder(name_or_path: str, *, weights: bool, code: bool = False) -> Path:
    """The local folder of `name_or_path`, fetched from the hub if it is no folder.

    Args:
        name_or_path: a folder, or a hub id ("owner/name").
        weights: whether the weights are needed, or only the small files.
        code: whether Python files are needed too (trust_remote_code).

    Raises:
        DataError: neither a folder nor something the hub, or its local cache, has.
    """
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise DataError(
            f"{name_or_path} is a file. Give the folder that holds config.json and the "
            f"safetensors file(s)."
        )
    if not _HUB_ID.match(name_or_path):
        raise DataError(
            f"there is no folder {name_or_path!r}, and it is not a hub id such as "
            f"'owner/name' either. Check the path."
        )
    small = ["*.json", "*.txt", "*.model", "*.jinja", *(["*.py"] if code else [])]
    folder = _snapshot(name_or_path, small)
    if weights:
        index = folder / INDEX_NAME
        names = sorted(set(_weight_map(index).values())) if index.is_file() else [SINGLE_NAME]
        folder = _snapshot(name_or_path, [*small, *names])
    return folder


def _snapshot(repo_id: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo_id, allow_patterns=patterns))
    except Exception as error:
        # The client raises many types (HTTP, cache, validation, offline); all mean the same here.
        raise DataError(
            f"{repo_id!r} is not a folder, and could not be fetched as a hub model: "
            f"{type(error).__name__}: {error}"
        ) from error


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read and check every header of the safetensors checkpoint in `folder`.

    Raises:
        DataError: no safetensors weights, a missing or damaged shard, or an index that disagrees
            with the shards; the message names the file and the tensor.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        return Checkpoint(folder, _sharded(folder, _weight_map(index)))
    single = folder / SINGLE_NAME
    if single.is_file():
        return Checkpoint(folder, read_header(single))
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return Checkpoint(folder, read_header(others[0]))
    if others:
        raise DataError(
            f"{folder} holds {len(others)} safetensors files but no {INDEX_NAME} that says which "
            f"tensor is where. Fetch the index."
        )
    found = [name for name in _PICKLES if (folder / name).is_file()]
    if found:
        raise DataError(
            f"{folder} holds its weights in {found[0]}, a pickle, which could run code when it is "
            f"read. Convert it to safetensors first (transformers' save_pretrained writes it)."
        )
    raise DataError(f"{folder} holds no weights: expected {SINGLE_NAME} or {INDEX_NAME}.")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map: Any = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        items = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{index} is not a safetensors index: {error!r}. Fetch it again."
        ) from error
    for name, file in items.items():
        if Path(file).name != file:
            raise DataError(
                f"{index} places tensor {name!r} in {file!r}; a shard must be a file of the same "
                f"folder."
            )
    return items


def _sharded(folder: Path, weight_map: dict[str, str]) -> dict[str, TensorEntry]:
    first_of: dict[str, str] = {}
    for name, file in weight_map.items():
        first_of.setdefault(file, name)
    tensors: dict[str, TensorEntry] = {}
    for file, first in sorted(first_of.items()):
        if not (folder / file).is_file():
            raise DataError(
                f"{folder / file} does not exist, but {INDEX_NAME} places tensor {first!r} "
                f"(and maybe others) there. Fetch the missing shard."
            )
        for name, entry in read_header(folder / file).items():
            if weight_map.get(name, file) == file:
                tensors[name] = entry
    for name, file in weight_map.items():
        if name not in tensors:
            raise DataError(
                f"{folder / file} does not contain tensor {name!r}, which {INDEX_NAME} places "
                f"there. Index and shards are of different checkpoints: fetch them again."
            )
    return tensors
