"""Runs of `trainstream finetune`, and what they leave in their folder."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file

from ts_hf.cli.run import run_finetune
from ts_hf.cli.settings import FinetuneConfig


def run(config: FinetuneConfig) -> tuple[int, str]:
    """Run it; returns the status, and what it said."""
    text = io.StringIO()
    status = run_finetune(config, Console(file=text, width=1000))
    return status, text.getvalue()


def results_of(config: FinetuneConfig) -> dict[str, Any]:
    """What the run found in the end."""
    found: dict[str, Any] = json.loads((Path(config.output) / "results.json").read_text())
    return found


def lines_of(config: FinetuneConfig, kind: str | None = None) -> list[dict[str, Any]]:
    """Its history, or what is of one kind in it."""
    text = (Path(config.output) / "history.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    return [line for line in lines if kind in (None, line["kind"])]


def steps_of(config: FinetuneConfig) -> list[int]:
    """The steps in its history."""
    return [line["step"] for line in lines_of(config, "step")]


def adapter_of(config: FinetuneConfig) -> dict[str, torch.Tensor]:
    """The adapter that it saved."""
    return load_file(Path(config.output) / "adapter" / "adapter_model.safetensors")
