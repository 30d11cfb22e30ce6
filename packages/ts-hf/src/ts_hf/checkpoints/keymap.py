"""From the keys of a checkpoint to the parameters of a model.

transformers 5 keeps, for each architecture, the renamings and conversions (fused experts, split
projections) that turn a published checkpoint's keys into its module names. This asks transformers
for them and applies them per target tensor, so that only the sources of one target are in memory.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from ts_core.errors import DataError
from ts_hf.checkpoints.locate import Checkpoint
from ts_hf.checkpoints.safetensors_file import TensorEntry, read_tensor


@dataclass
class Target:
    """One unit of reading: the sources of one model tensor, or of a few through a converter."""

    name: str
    sources: list[tuple[TensorEntry, str]] = field(default_factory=list)
    converter: Any = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the sources as stored."""
        return sum(entry.size_bytes for entry, _ in self.sources)

    def read(self, model: nn.Module) -> dict[str, Tensor]:
        """The tensors of this target by their names in the model, on the CPU.

        Raises:
            DataError: a source cannot be read or converted.
        """
        if self.converter is None:
            return {self.name: read_tensor(self.sources[0][0])}
        return self.convert(model, [partial(read_tensor, entry) for entry, _ in self.sources])

    def convert(self, model: nn.Module, readers: list[Callable[[], Tensor]]) -> dict[str, Tensor]:
        """What transformers' conversion makes of one tensor for each source.

        Raises:
            DataError: the conversion fails.
        """
        converter = copy.deepcopy(self.converter)
        for (entry, pattern), reader in zip(self.sources, readers, strict=True):
            converter.add_tensor(self.name, entry.name, pattern, reader)
        try:
            made = converter.convert(self.name, model=model, config=model.config)
        except DataError:
            raise
        except Exception as error:
            entry = self.sources[0][0]
            raise DataError(
                f"{entry.file}: transformers' conversion of {len(self.sources)} tensor(s) "
                f"(first {entry.name!r}) into {self.name!r} failed: {type(error).__name__}: {error}"
            ) from error
        return {
            name: value[0] if isinstance(value, list) else value for name, value in made.items()
        }


def plan_targets(model: nn.Module, checkpoint: Checkpoint) -> list[Target]:
    """What to read for `model`, in the order of the files, after checking that it is complete.

    Args:
        model: the skeleton; its state dict says which tensors are needed and their shapes.

    Raises:
        DataError: a tensor is missing, unexpected, or of another shape; names file and tensor.
    """
    wanted: dict[str, Tensor] = model.state_dict()
    rename = _renamer(model, wanted)
    targets: dict[str, Target] = {}
    unexpected: list[tuple[TensorEntry, str]] = []
    for key in sorted(checkpoint.tensors, key=_natural):
        entry = checkpoint.tensors[key]
        name, pattern, converter = rename(key)
        if name not in wanted:
            unexpected.append((entry, name))
            continue
        target = targets.setdefault(name, Target(name, converter=converter))
        if target.sources and converter is None:
            raise DataError(
                f"{entry.file}: tensor {key!r} and tensor {target.sources[0][0].name!r} both "
                f"stand for {name!r} of the model. The checkpoint mixes two naming schemes."
            )
        target.sources.append((entry, pattern))
    _refuse_unexpected(model, unexpected, checkpoint)
    _refuse_missing(model, wanted, targets, checkpoint)
    for target in targets.values():
        if target.converter is None:
            check_shape(target.name, target.sources[0][0].shape, wanted, target.sources[0][0])
    return sorted(
        targets.values(), key=lambda item: (item.sources[0][0].file, item.sources[0][0].offset)
    )


def check_shape(
    name: str, shape: Iterable[int], wanted: Mapping[str, Tensor], entry: TensorEntry
) -> None:
    """Raise DataError unless `shape` is what the model has for `name`."""
    expected = list(wanted[name].shape)
    if list(shape) != expected:
        raise DataError(
            f"{entry.file}: tensor {entry.name!r} gives {name!r} of shape {list(shape)}, but the "
            f"model made from config.json has {expected}. Config and weights do not belong "
            f"together, or an override changed a size."
        )


Renamer = Callable[[str], tuple[str, str, Any]]


def _renamer(model: nn.Module, wanted: Mapping[str, Tensor]) -> Renamer:
    """key -> (name in the model, source pattern, converter or None), as transformers loads."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )
    except ImportError:  # another transformers: names must agree, up to the base model's prefix
        return partial(_plain_rename, getattr(model, "base_model_prefix", ""), wanted)
    mapping = get_model_conversion_mapping(model)
    renamings = [item for item in mapping if isinstance(item, WeightRenaming)]
    converters = [item for item in mapping if isinstance(item, WeightConverter)]
    by_pattern = {pattern: item for item in converters for pattern in item.source_patterns}
    prefix = model.base_model_prefix

    def rename(key: str) -> tuple[str, str, Any]:
        name, pattern = rename_source_key(key, renamings, converters, prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = rename_source_key(key, [], [], prefix, wanted)
        if pattern is None:
            return name, key, None
        return name, pattern, by_pattern[pattern]

    return rename


def _plain_rename(prefix: str, wanted: Mapping[str, Tensor], key: str) -> tuple[str, str, Any]:
    if key not in wanted and prefix:
        for name in (f"{prefix}.{key}", key.removeprefix(f"{prefix}.")):
            if name in wanted:
                return name, key, None
    return key, key, None


def _refuse_unexpected(
    model: nn.Module, unexpected: list[tuple[TensorEntry, str]], checkpoint: Checkpoint
) -> None:
    buffers = [name for name, _ in model.named_buffers()]
    patterns = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    # Buffers that older checkpoints store and that every model now computes.
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    left = [
        (entry, name)
        for entry, name in unexpected
        if not any(re.search(pattern, name) for pattern in patterns)
    ]
    if left:
        entry, name = left[0]
        renamed = "" if name == entry.name else f" (as {name!r})"
        raise DataError(
            f"{entry.file}: tensor {entry.name!r}{renamed} has no place in a "
            f"{type(model).__name__}; {len(left)} of the checkpoint's {len(checkpoint.tensors)} "
            f"tensors are unexpected. config.json is of another model, or this transformers does "
            f"not know this checkpoint's naming: try a newer one."
        )


def _refuse_missing(
    model: nn.Module,
    wanted: Mapping[str, Tensor],
    targets: Mapping[str, Target],
    checkpoint: Checkpoint,
) -> None:
    given = set(targets)
    for target in targets.values():
        if target.converter is not None:
            # One source may become several tensors; transformers names only the first of them.
            given |= siblings(target, wanted)
    tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    for name, source in tied.items():
        if name in given or source in given:
            given |= {name, source}
    ignored = set(getattr(model, "_keys_to_ignore_on_load_missing", None) or ())
    computed = {name for name, _ in model.named_buffers()}
    missing = [
        name
        for name in wanted
        if name not in given
        and not (name in computed and any(re.search(pattern, name) for pattern in ignored))
    ]
    if missing:
        raise DataError(
            f"{checkpoint.folder} has no tensor for {missing[0]!r}; {len(missing)} of the "
            f"{len(wanted)} tensors of {type(model).__name__} are missing. A shard is missing, or "
            f"config.json is of another model."
        )


def siblings(target: Target, wanted: Mapping[str, Tensor]) -> set[str]:
    """The other tensors that a target's converter makes beside the one it is named after."""
    first, *others = target.converter.target_patterns
    return {name for other in others if (name := target.name.replace(first, other, 1)) in wanted}


def _natural(key: str) -> list[tuple[int, int, str]]:
    """Sort key with numbers in numeric order: experts must be stacked 0, 1, 2, .. 10."""
    return [
        (0, int(part), "") if part.isdigit() else (1, 0, part)
        for part in re.split(r"(\d+)", key)
        if part != ""
    ]
