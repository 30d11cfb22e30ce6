"""Texts that the model writes before and after training."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ts_hf.cli.chat import encode, render
from ts_hf.cli.records import Completion, Pair
from ts_hf.cli.sources import Document


@dataclass(frozen=True)
class Sample:
    """What was given and what the model went on with."""

    prompt: str
    text: str


def prompt_tokens(
    tokenizer: Any,
    prompts: Sequence[str],
    openings: Sequence[list[int]],
    count: int,
    as_turns: bool,
) -> list[list[int]]:
    """Tokens to go on from: the given prompts, or the first `count` held-out beginnings.

    `as_turns`: a tokenizer with a chat template has the prompts put as a user's turn.
    """
    if not prompts:
        return [list(opening) for opening in openings[:count] if opening]
    found = []
    for prompt in prompts:
        text = prompt
        if as_turns and getattr(tokenizer, "chat_template", None):
            text = render(tokenizer, [{"role": "user", "content": prompt}], to_answer=True)
        found.append(encode(tokenizer, text))
    return found


def are_turns(documents: Iterable[Document]) -> bool:
    """Whether prompts are put to the model as a user's turn: not where it learns from prompts and
    answers that are plain texts, without the chat template."""
    return not any(
        isinstance(document.record, Completion)
        or (isinstance(document.record, Pair) and isinstance(document.record.prompt, str))
        for document in documents
    )


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
