"""A tokenizer whose tokens are characters, so that rows can be read back as text."""

from __future__ import annotations

from typing import Any

import torch

from ts_hf.cli.rows import IGNORED


class Letters:
    """One token per character; 0 ends a text."""

    eos_token_id = 0
    pad_token_id = 0
    is_fast = True
    all_special_tokens = ("|",)
    chat_template = "made by hand"

    def __call__(self, text: str, **kwargs: Any) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {"input_ids": [ord(letter) for letter in text]}
        if kwargs.get("return_offsets_mapping"):
            found["offset_mapping"] = [(i, i + 1) for i in range(len(text))]
        return found

    def apply_chat_template(
        self, messages: Any, tokenize: bool, add_generation_prompt: bool = False
    ) -> str:
        roles = [m["role"] for m in messages]
        if "nobody" in roles:
            raise ValueError("no such role")
        text = "".join(f"<{m['role']}>{m['content'].strip()}|\n" for m in messages)
        return text + ("<assistant>" if add_generation_prompt else "")


def text_of(row: dict[str, torch.Tensor]) -> str:
    """A row of `Letters` as text."""
    return "".join(chr(token) for token in row["input_ids"])


def learned_of(row: dict[str, torch.Tensor]) -> str:
    """What of a row counts in the loss."""
    return "".join(chr(token) for token in row["labels"] if token != IGNORED)
