"""The full-precision weights of a checkpoint, by their names in the model, one at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ts_core.errors import DataError
from ts_hf.checkpoints.keymap import Target, plan_targets, siblings
from ts_hf.checkpoints.locate import open_checkpoint, resolve_folder
from ts_hf.checkpoints.stored import stored_checkpoint
from ts_hf.skeleton import build_skeleton, load_config, take_quantization_config


class Originals:
    """Reads a checkpoint's weights by the names that transformers gives them.

    Args:
        name_or_path: folder or hub id.

    Raises:
        DataError: there is no such checkpoint, or it stores its weights quantized.
    """

    def __init__(self, name_or_path: str | Path) -> None:
        if not str(name_or_path):
            raise DataError(
                "the model was not loaded from a checkpoint, so its original weights are unknown. "
                "Give original=FOLDER, or merge into 'dequantized'."
            )
        folder = resolve_folder(str(name_or_path), weights=True)
        config = load_config(folder, trust_remote_code=False, overrides={})
        checkpoint, plan = stored_checkpoint(
            open_checkpoint(folder), take_quantization_config(config)
        )
        if plan is not None:
            raise DataError(
                f"{folder} stores its weights quantized ({plan.format}): it has no original ones. "
                f"Give original=FOLDER, or merge into 'dequantized'."
            )
        self._model = build_skeleton(config, torch.bfloat16, trust_remote_code=False, options={})
        self._folder = folder
        self._targets: dict[str, Target] = {}
        self._last: dict[str, Tensor] = {}
        wanted = self._model.state_dict()
        for target in plan_targets(self._model, checkpoint):
            names = siblings(target, wanted) if target.converter is not None else set()
            self._targets.update(dict.fromkeys({target.name, *names}, target))

    def read(self, name: str) -> Tensor:
        """The weight called `name` in the model, on the CPU, in the checkpoint's dtype.

        Raises:
            DataError: the checkpoint does not hold it, or its bytes cannot be read.
        """
        if name in self._last:
            return self._last[name]
        target = self.require(name)
        self._last = target.read(self._model)
        return self._last[name] if name in self._last else next(iter(self._last.values()))

    def require(self, name: str) -> Target:
        """Where the weight called `name` is read from.

        Raises:
            DataError: the checkpoint does not hold it.
        """
        target = self._targets.get(name) or self._tied(name)
        if target is None:
            raise DataError(f"{self._folder} holds no weight {name!r}: it is of another model.")
        return target

    def _tied(self, name: str) -> Target | None:
        tied: dict[str, str] = getattr(self._model, "all_tied_weights_keys", None) or {}
        for key, source in tied.items():
            if name in (key, source):
                return self._targets.get(source) or self._targets.get(key)
        return None
