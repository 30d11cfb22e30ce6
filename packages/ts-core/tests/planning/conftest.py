"""A reader of configs for tests of `trainstream plan` without ts-hf."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ts_core.errors import DataError
from ts_core.planning import estimate
from ts_core.registry import models
from ts_core.testing import TinyModel

SHAPES = {"small": (6, 64), "large": (12, 4096), "wordy": (4, 1024, 40_000)}


class TinyReader:
    """Sources are names of SHAPES; "branches" is a model that looks at values."""

    API_VERSION = 1

    def build(self, source: str, dtype: torch.dtype, trust_remote_code: bool = False) -> nn.Module:
        if source not in (*SHAPES, "branches"):
            raise DataError(f"there is no model {source}.")
        shape = SHAPES.get(source, (4, 64))
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        model = TinyModel(*shape)
        torch.set_default_dtype(before)
        if source == "branches":

            def look(module: nn.Module, args: Any) -> None:
                assert args[0].sum() == 0

            model.register_forward_pre_hook(look)
        return model

    def find_blocks(self, model: Any) -> list[nn.Module]:
        return list(model.layers)

    def loss(self, model: nn.Module, batch: int, length: int) -> Tensor:
        loss: Tensor = model(torch.zeros(batch, length, dtype=torch.long))
        return loss

    def active_share(self, model: nn.Module) -> float:
        return 1.0


@pytest.fixture
def tiny_reader(monkeypatch: pytest.MonkeyPatch) -> TinyReader:
    """Installed in place of ts-hf's."""
    found = TinyReader()
    monkeypatch.setitem(models._loaded, estimate.READER, found)
    return found
