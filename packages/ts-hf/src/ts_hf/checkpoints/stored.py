"""Checkpoints that store weights quantized: which tensors are one weight, and reading it as it is.

The formats are known to the codecs' package, which is asked through the registry. Here a quantized
weight becomes one entry of the checkpoint, so that names, shapes and conversions are treated as
those of an ordinary one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ts_core.errors import DataError, NotAvailableError
from ts_hf.checkpoints.keymap import Target
from ts_hf.checkpoints.locate import Checkpoint
from ts_hf.checkpoints.safetensors_file import TensorEntry, read_tensor
from ts_hf.codec_hooks import codec_hook

_JOINING = ("MergeModulelist", "Concatenate")
"""Conversions under which codes and scales of several weights are those of the joined weight."""


@dataclass(frozen=True)
class StoredEntry(TensorEntry):
    """A quantized weight, as one entry: its shape is the decoded one.

    Attributes:
        weight: what knows how to build it (of the codecs' package).
        parts: the entries of its tensors by role.
    """

    weight: Any = None
    parts: Mapping[str, TensorEntry] = field(default_factory=dict)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors it is made of, by role, on the CPU."""
        return {role: read_tensor(entry) for role, entry in self.parts.items()}


def stored_checkpoint(checkpoint: Checkpoint, config: Any) -> tuple[Checkpoint, Any]:
    """The checkpoint with each quantized weight as one entry, and the plan of reading it.

    Args:
        checkpoint: as opened.
        config: the `quantization_config` of config.json, or None.

    Returns:
        (checkpoint, plan); the same checkpoint and None when nothing is stored quantized.

    Raises:
        NotAvailableError: the format, or an algorithm of it, is not read; or no package that
            reads any is installed.
        DataError: the tensors are not what the format asks for.
    """
    settings = config.to_dict() if hasattr(config, "to_dict") else config
    modelopt = _json(checkpoint.folder / "hf_quant_config.json")
    codes = any(entry.dtype.itemsize == 1 for entry in checkpoint.tensors.values())
    if settings is None and modelopt is None and not codes:
        return checkpoint, None
    reader = codec_hook("plan_reading")
    if reader is None:
        if settings is None and modelopt is None:
            return checkpoint, None
        raise NotAvailableError(
            "the checkpoint stores its weights quantized, and no installed package reads such "
            "checkpoints. Add one: pip install 'ts-quant>=0.8,<0.9'"
        )
    entries = checkpoint.tensors
    try:
        plan = reader(entries, settings, lambda name: read_tensor(entries[name]), modelopt=modelopt)
    except (DataError, NotAvailableError):
        raise
    except ValueError as error:
        # The codecs' package has exceptions of its own; both kinds keep their meaning here.
        kind = NotAvailableError if type(error).__name__ == "NotAvailableError" else DataError
        raise kind(f"{checkpoint.folder}: {error}.") from error
    if plan is None:
        return checkpoint, None
    left_out = plan.consumed | plan.ignored
    kept = {name: entry for name, entry in entries.items() if name not in left_out}
    for name, weight in plan.weights.items():
        parts = {role: entries[key] for role, key in weight.sources.items()}
        first = next(iter(parts.values()))
        shape = weight.shape
        if weight.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        if name in kept:
            raise DataError(f"{checkpoint.folder} stores {name!r} both quantized and plain.")
        kept[name] = StoredEntry(
            name,
            first.file,
            torch.uint8,
            shape,
            first.offset,
            sum(entry.size_bytes for entry in parts.values()),
            weight=weight,
            parts=parts,
        )
    return replace(checkpoint, tensors=kept), plan


def read_stored(target: Target, model: nn.Module, plan: Any, *, expand: bool) -> dict[str, Tensor]:
    """The tensors of a target that has quantized sources, by their names in the model.

    Args:
        target: from `plan_targets`.
        model: the skeleton, which knows dtypes and shapes.
        plan: from `stored_checkpoint`.
        expand: decode everything to the model's dtype.

    Returns:
        Quantized tensors, or ordinary ones where `expand` is set or the model holds the weight in
        a form that codes cannot take (see `expanded_because`).

    Raises:
        DataError: a source is damaged.
    """
    entries = [entry for entry, _ in target.sources]
    try:
        if not expand and expanded_because(target) is None:
            if target.converter is None:
                return {target.name: _build(entries[0], _dtype(model, target.name))}
            joined = _join(target, model, plan)
            if joined is not None:
                return joined
        return _expanded(target, model)
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{entries[0].file}: {error}.") from error


def expanded_because(target: Target) -> str | None:
    """Why a target's codes cannot be kept, or None."""
    entries = [entry for entry, _ in target.sources]
    if target.converter is None:
        return None
    if any(isinstance(entry, StoredEntry) and entry.weight.transposed for entry in entries):
        return "the model joins them transposed"
    if not all(isinstance(entry, StoredEntry) for entry in entries):
        return "the model joins them with plain tensors"
    steps = {type(step).__name__ for step in getattr(target.converter, "operations", ())}
    if not steps <= set(_JOINING):
        return f"the model converts them ({', '.join(sorted(steps - set(_JOINING)))})"
    return None


def is_stored(target: Target) -> bool:
    """Whether any source of the target is a quantized weight."""
    return bool(stored_entries(target))


def stored_entries(target: Target) -> list[StoredEntry]:
    """The quantized weights among the target's sources."""
    return [entry for entry, _ in target.sources if isinstance(entry, StoredEntry)]


def _build(entry: TensorEntry, dtype: torch.dtype) -> Tensor:
    assert isinstance(entry, StoredEntry)
    built: Tensor = entry.weight.build_as_held(entry.tensors(), dtype)
    return built


def _expanded(target: Target, model: nn.Module) -> dict[str, Tensor]:
    dtype = _dtype(model, target.name)

    def decode(entry: TensorEntry) -> Tensor:
        if not isinstance(entry, StoredEntry):
            return read_tensor(entry)
        dense: Tensor = entry.weight.build_as_held(entry.tensors(), dtype).dequantize()
        return dense

    entries = [entry for entry, _ in target.sources]
    if target.converter is None:
        return {target.name: decode(entries[0])}
    return target.convert(model, [partial(decode, entry) for entry in entries])


def _join(target: Target, model: nn.Module, plan: Any) -> dict[str, Tensor] | None:
    """Fused experts from the experts' codes and scales; None where these cannot be joined.

    Each buffer goes through the conversion by itself, as if it were the weight.
    """
    weights = stored_entries(target)
    parts = [entry.weight.parts(entry.tensors()) for entry in weights]
    first = parts[0]
    if any(part.codec != first.codec or part.layout != first.layout for part in parts):
        return None
    rows = int(first.layout.get("rows", 1))
    steps = {type(step).__name__ for step in target.converter.operations}
    if "Concatenate" in steps and any(entry.shape[-2] % rows for entry in weights):
        return None  # a tile would reach over the seam
    joined: dict[str, dict[str, Tensor]] = {}
    for name, buffer in first.buffers.items():
        same = [part.buffers[name] for part in parts]
        if buffer.dim() < 2:
            if not all(torch.equal(buffer, other) for other in same):
                return None
            continue
        for made, value in target.convert(model, [partial(_self, each) for each in same]).items():
            joined.setdefault(made, {})[name] = value.contiguous()
    single = {name: value for name, value in first.buffers.items() if value.dim() < 2}
    found: dict[str, Tensor] = {}
    for made, buffers in joined.items():
        merged = replace(first, buffers={**buffers, **single})
        slot = model.get_parameter(made)
        found[made] = plan.assemble(made, merged, tuple(slot.shape), slot.dtype)
    return found


def _self(value: Tensor) -> Tensor:
    return value


def _dtype(model: nn.Module, name: str) -> torch.dtype:
    path, _, leaf = name.rpartition(".")
    slot = model.get_submodule(path)._parameters.get(leaf)
    if slot is None:
        raise DataError(f"{name!r} is stored quantized, but the model has no such parameter.")
    return slot.dtype


def _json(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file} cannot be read: {error}.") from error
    if not isinstance(found, dict):
        raise DataError(f"{file} is no JSON object.")
    return found
