"""Small models of every family, adapters, and training loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ts_hf.testing import FAMILIES, token_batch


@pytest.fixture(autouse=True)
def _quiet_transformers() -> Iterator[None]:
    import transformers.utils.logging as hf_logging

    hf_logging.disable_progress_bar()
    level = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    yield
    hf_logging.set_verbosity(level)


@pytest.fixture
def adapted() -> Callable[..., Any]:
    """adapted("llama", **changes): a small model with LoRA whose B is not zero."""
    peft = pytest.importorskip("peft", reason="the optional package peft is not installed")

    def make(family: str, *, lora: dict[str, Any] | None = None, **changes: Any) -> Any:
        row = FAMILIES[family]
        model = row.build(**changes)
        torch.manual_seed(0)
        options = {"r": 4, "target_modules": row.targets, "task_type": "CAUSAL_LM", **(lora or {})}
        wrapped = peft.get_peft_model(model, peft.LoraConfig(**options))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
        return wrapped

    return make


@pytest.fixture
def train_steps() -> Callable[..., tuple[list[torch.Tensor], dict[str, torch.Tensor]]]:
    """train_steps(model, optimizer, steps): the losses, and the trained values at the end."""

    def run(
        model: Any, optimizer: Any, steps: int = 5, *, accumulation: int = 1, device: str = "cpu"
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        losses = []
        for step in range(steps):
            torch.manual_seed(100 + step)
            for micro in range(accumulation):
                batch = token_batch(10 * step + micro)
                batch = {name: value.to(device) for name, value in batch.items()}
                loss = model(**batch).loss
                (loss / accumulation).backward()
                losses.append(loss.detach().clone())
            optimizer.step()
            optimizer.zero_grad()
        trained = {
            name: parameter.detach().clone()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        return losses, trained

    return run
