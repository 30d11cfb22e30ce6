"""The README.md of a saved adapter: what it was made of, and how to use it."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

from ts_hf.cli.settings import FinetuneConfig
from ts_hf.demo_model import HUB_ID
from ts_hf.demo_model import NAME as DEMO_NAME

_METHODS = {"lora": "LoRA", "dpo": "LoRA, trained on pairs of answers (DPO)"}


def adapter_card(config: FinetuneConfig, steps: int) -> str:
    """Markdown with the model's and the files' names, and no path of this machine.

    Args:
        config: of the run.
        steps: optimizer steps done.
    """
    base = HUB_ID if config.model == DEMO_NAME else _name(config.model)
    facts: list[tuple[str, Any]] = [
        ("base model", f"{base}, with weights drawn at random" if config.random_weights else base),
        (
            "method",
            f"{_METHODS[config.method]}, rank {config.lora_rank}, alpha {config.lora_alpha:g}",
        ),
        ("data", ", ".join(_name(source) for source in config.data)),
        ("steps", steps),
        ("weights in training", config.quantize),
        ("made by", f"trainstream finetune (ts-hf {version('ts-hf')}, peft {version('peft')})"),
    ]
    lines = "\n".join(f"- {name}: {value}" for name, value in facts)
    return f"""---
library_name: peft
tags:
- lora
- trainstream
---

# Adapter of {base}

{lines}

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("{base}")  # or the folder that holds it
model = PeftModel.from_pretrained(base, "this folder")
```
"""


def _name(source: str) -> str:
    """A hub id, or the last part of a path."""
    path = Path(source).expanduser()
    local = path.is_absolute() or path.exists() or source.startswith((".", "~"))
    return path.resolve().name if local else source
