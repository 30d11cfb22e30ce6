"""The README.md of a saved adapter names no path of the machine."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import yaml

from ts_hf.cli.card import adapter_card
from ts_hf.cli.settings import FinetuneConfig


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("smollm2-135m-instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
        ("folder", "base-model"),
        ("../there", "there"),
        ("~/models/mine", "mine"),
    ],
)
def test_names_without_paths(tmp_path: Path, model: str, named: str) -> None:
    if model == "folder":
        model = str(tmp_path / "base-model")
    data = tmp_path / "private" / "chats.jsonl"
    config = dataclasses.replace(FinetuneConfig(), model=model, data=(str(data), "stdlib"))
    card = adapter_card(config, 12)
    assert f"# Adapter of {named}\n" in card and f'from_pretrained("{named}")' in card
    assert "- data: chats.jsonl, stdlib\n" in card and "- steps: 12\n" in card
    assert str(tmp_path) not in card and os.path.expanduser("~") not in card


def test_what_it_says_of_the_method() -> None:
    config = dataclasses.replace(
        FinetuneConfig(), method="dpo", lora_rank=4, lora_alpha=8.0, random_weights=True
    )
    card = adapter_card(config, 1)
    assert "- method: LoRA, trained on pairs of answers (DPO), rank 4, alpha 8\n" in card
    assert "drawn at random" in card
    header = yaml.safe_load(card.split("---")[1])
    assert header["library_name"] == "peft" and "lora" in header["tags"]
