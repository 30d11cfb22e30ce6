"""`model.train()` before every micro-batch, without setting thousands of flags that are set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class TrainingMode:
    """Knows the modules of a model, so that their flags can be read instead of written.

    transformers.Trainer calls `model.train()` before each micro-batch, which takes the host
    milliseconds for a large model with adapters: as long as a layer's launches.
    """

    def __init__(self) -> None:
        self._model: nn.Module | None = None
        self._modules: list[nn.Module] = []

    @contextmanager
    def quick(self, model: nn.Module) -> Iterator[None]:
        """Meanwhile `model.train()` does nothing where every module is in training mode already.

        Modules are those of the last `model.train()` that did something.
        """
        if "train" in vars(model):  # one of somebody else's
            yield
            return

        def train(mode: bool = True) -> nn.Module:
            if mode and self._model is model and all(m.training for m in self._modules):
                return model
            type(model).train(model, mode)
            self._model, self._modules = model, list(model.modules())
            return model

        shadowed: Any = model
        shadowed.train = train
        try:
            yield
        finally:
            del shadowed.train
