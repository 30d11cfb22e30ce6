"""Texts that the model writes before and after training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ts_hf.cli.chat import encode, render


@dataclass(frozen=True)
class Sample:
    """What was given and what the model went on with."""

    prompt: str
    text: str


def prompt_tokens(
    tokenizer: Any, prompts: Sequence[str], openings: Sequence[list[int]], count: int
) -> list[list[int]]:
    """Tokens to go on from: the given prompts, or the first `count` held-out beginnings.

    A tokenizer with a chat template has the prompts put to the model as a user's turn.
    """
    if not prompts:
        return [list(opening) for opening in openings[:count] if opening]
    found = []
    for prompt in prompts:
        text = prompt
        if getattr(tokenizer, "chat_template", None):
            text = render(tokenizer, [{"role": "user", "content": prompt}], to_answer=True)
        found.append(encode(tokenizer, text))
    return found


@torch.no_grad()
def generate(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], length: int, device: torch.device
) -> list[Sample]:
    """The most likely continuation of each prompt, at most `length` tokens; draws no numbers."""
    was_training = model.training
    model.eval()
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    most = getattr(model.config, "max_position_embeddings", None)
    found = []
    try:
        for prompt in prompts:
            room = length if most is None else min(length, most - len(prompt))
            if room < 1:
                prompt, room = prompt[length - room :], length  # its end is what matters
            ids = torch.tensor([prompt], device=device)
            tokens = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=room,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
                pad_token_id=pad,
            )
            made = tokens[0, len(prompt) :].tolist()
            found.append(
                Sample(
                    tokenizer.decode(prompt, skip_special_tokens=False),
                    tokenizer.decode(made, skip_special_tokens=True),
                )
            )
    finally:
        model.train(was_training)
    return found
