"""Finding the decoder layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import ts_hf
from ts_core import registry


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "mixtral", "gemma2"])
def test_layers_of_a_family(family: str, tiny_model: Callable[..., Any]) -> None:
    model = tiny_model(family)
    layers = ts_hf.find_decoder_layers(model)
    stack = model.transformer.h if family == "gpt2" else model.model.layers
    assert layers == list(stack)


def test_layers_inside_peft(tiny_model: Callable[..., Any], lora: Callable[..., Any]) -> None:
    model = tiny_model("llama")
    stack = list(model.model.layers)
    assert ts_hf.find_decoder_layers(lora(model)) == stack


def test_unknown_layout_falls_back_to_the_largest_stack() -> None:
    model = nn.Module()
    model.tower = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
    assert ts_hf.find_decoder_layers(model) == list(model.tower)
    assert ts_hf.find_decoder_layers(nn.Linear(2, 2)) == []


def test_a_plug_in_decides_for_its_model_type(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Family:
        API_VERSION = 1

        def find_blocks(self, model: nn.Module) -> list[nn.Module]:
            return [model.lm_head]

    monkeypatch.setattr(registry.models, "has", lambda name: name == "llama")
    monkeypatch.setattr(registry.models, "get", lambda name: Family())
    model = tiny_model("llama")
    assert ts_hf.find_decoder_layers(model) == [model.lm_head]
    other = tiny_model("qwen2")
    assert ts_hf.find_decoder_layers(other) == list(other.model.layers)
