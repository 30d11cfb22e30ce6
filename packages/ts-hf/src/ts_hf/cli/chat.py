"""Conversations through a tokenizer's chat template, and where in the text the assistant speaks."""

from __future__ import annotations

from typing import Any

from ts_hf.cli.problems import RecordError, shown
from ts_hf.cli.records import Message

_STAND_IN = "\ue000\ue001\ue002"  # private characters: no template looks for them
_ASSISTANT = ("assistant", "model", "gpt")

Span = tuple[int, int]


def render(tokenizer: Any, messages: list[Message], *, to_answer: bool = False) -> str:
    """The conversation as the model is to read it.

    Args:
        tokenizer: a transformers tokenizer.
        messages: role and content.
        to_answer: end with what introduces the assistant's next turn.

    Raises:
        RecordError: the tokenizer has no template, or the template refuses the conversation.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise RecordError(
            "a conversation, but the model's tokenizer has no chat template. Give a 'tokenizer' "
            "that has one, or use 'text', or 'prompt' and 'completion' with texts"
        )
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=to_answer
        )
    except Exception as error:  # templates are programs: Jinja's errors and Python's
        raise RecordError(
            f"the model's chat template refuses it ({type(error).__name__}: {error})"
        ) from error
    return text


def answer_spans(tokenizer: Any, messages: list[Message]) -> tuple[str, list[Span]]:
    """The text of a conversation, and where the assistant's turns are in it.

    A turn is found by rendering the conversation again with that turn's content replaced: where
    the two texts differ, the assistant speaks. So it does not matter what a template puts around
    a turn, or changes in earlier ones. The token that ends the turn belongs to it.

    Returns:
        (text, spans of characters [begin, end), in order).

    Raises:
        RecordError: as `render`.
    """
    text = render(tokenizer, messages)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] not in _ASSISTANT or not message["content"]:
            continue
        changed = [*messages]
        changed[index] = {**message, "content": _STAND_IN}
        other = render(tokenizer, changed)
        begin = _shared(text, other)
        tail = min(_shared(text[::-1], other[::-1]), len(text) - begin, len(other) - begin)
        end = len(text) - tail
        if end > begin:
            spans.append((begin, _with_end(tokenizer, text, end)))
    return text, spans


def encode(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a text, without any that the tokenizer would add around it."""
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def encode_marked(tokenizer: Any, text: str, spans: list[Span]) -> tuple[list[int], list[bool]]:
    """Tokens of a text, and which of them begin in one of the spans."""
    if getattr(tokenizer, "is_fast", False):
        found = tokenizer(
            text, add_special_tokens=False, verbose=False, return_offsets_mapping=True
        )
        marks = [
            any(begin <= start < end for begin, end in spans)
            for start, _ in found["offset_mapping"]
        ]
        return found["input_ids"], marks
    # Without offsets, piece by piece: a token cannot reach over a piece's border then.
    ids: list[int] = []
    marks = []
    position = 0
    for begin, end in [*spans, (len(text), len(text))]:
        for piece, marked in ((text[position:begin], False), (text[begin:end], True)):
            tokens = encode(tokenizer, piece) if piece else []
            ids += tokens
            marks += [marked] * len(tokens)
        position = end
    return ids, marks


def split_answer(tokenizer: Any, prompt: list[Message], answer: list[Message]) -> tuple[str, str]:
    """(text of the prompt, with what introduces the answer; text of the answer).

    Raises:
        RecordError: as `render`, or the template shows nothing of the answer.
    """
    introduction = render(tokenizer, prompt, to_answer=True) if prompt else ""
    whole = render(tokenizer, [*prompt, *answer])
    if introduction and whole.startswith(introduction) and len(whole) > len(introduction):
        return introduction, whole[len(introduction) :]
    _, spans = answer_spans(tokenizer, [*prompt, *answer])
    wanted = sum(1 for message in answer if message["role"] in _ASSISTANT and message["content"])
    if not wanted or len(spans) < wanted:
        raise RecordError(
            f"the chat template shows no assistant's turn of the answer ({shown(answer)})"
        )
    begin = spans[-wanted][0]
    return whole[:begin], whole[begin:]


def _shared(left: str, right: str) -> int:
    """How many characters two texts have in common at the beginning."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[:middle] == right[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _with_end(tokenizer: Any, text: str, end: int) -> int:
    """`end` moved behind the token that ends the turn, if one follows."""
    rest = text[end:]
    spaces = len(rest) - len(rest.lstrip())
    for token in sorted(getattr(tokenizer, "all_special_tokens", ()), key=len, reverse=True):
        if token and rest[spaces:].startswith(token):
            return end + spaces + len(token)
    return end
