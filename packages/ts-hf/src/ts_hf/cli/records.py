"""Records of a JSON-lines file: what they may hold, and what is wrong with one that is not used.

A record is one of
- {"text": ...}: plain text;
- {"messages": [{"role": ..., "content": ...}, ...]}: a conversation;
- {"prompt": ..., "completion": ...}: learned from the completion only;
- {"prompt": ..., "chosen": ..., "rejected": ...}: two answers, for method dpo.

Prompt, completion and answers are texts, or lists of messages. Without a prompt, chosen and
rejected are whole conversations, and what they share at the beginning is the prompt.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ts_hf.cli.problems import RecordError, shown, shown_line

Message = dict[str, Any]
Turn = str | list[Message]  # a text, or messages


@dataclass(frozen=True)
class Text:
    """Plain text."""

    text: str


@dataclass(frozen=True)
class Conversation:
    """Messages, each with role and content."""

    messages: list[Message]


@dataclass(frozen=True)
class Completion:
    """A prompt and what is to follow it; both texts, or both messages."""

    prompt: Turn
    completion: Turn


@dataclass(frozen=True)
class Pair:
    """A prompt and two answers; all texts, or all messages."""

    prompt: Turn
    chosen: Turn
    rejected: Turn


Record = Text | Conversation | Completion | Pair


def parse_line(line: str, *, pairs: bool) -> Record:
    """The record of one line.

    Args:
        line: JSON.
        pairs: whether pairs are wanted (method dpo), or anything but pairs.

    Raises:
        RecordError: it cannot be used; says what was found and what was expected.
    """
    try:
        content = json.loads(line, object_pairs_hook=_once)
    except ValueError as error:
        raise RecordError(f"not valid JSON ({error}): {shown_line(line)}") from None
    except RecursionError:
        raise RecordError(f"nested too deeply: {shown_line(line)}") from None
    if not isinstance(content, dict):
        raise RecordError(f"expected a JSON object, found {_found(content)}") from None
    return _pair(content) if pairs else _example(content)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; a key that is there twice would silently lose its first value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise RecordError(f"an object has the key {shown(twice[0])} twice. Keep one of them")
    return found


def _example(content: dict[str, Any]) -> Record:
    if "text" in content:
        return Text(_text(content, "text"))
    if "messages" in content:
        return Conversation(_messages(content, "messages"))
    if "prompt" in content and "completion" in content:
        prompt, completion = _turn(content, "prompt", empty=True), _turn(content, "completion")
        _same_kind({"prompt": prompt, "completion": completion})
        return Completion(prompt, completion)
    if "chosen" in content and "rejected" in content:
        raise RecordError("'chosen' and 'rejected' are for method=dpo; this run learns from texts")
    raise RecordError(
        f"expected 'text', 'messages', or 'prompt' and 'completion'; found {_keys(content)}"
    )


def _pair(content: dict[str, Any]) -> Record:
    missing = [key for key in ("chosen", "rejected") if key not in content]
    if missing:
        raise RecordError(
            f"method=dpo expects 'prompt', 'chosen' and 'rejected'; found {_keys(content)}"
        )
    chosen, rejected = _turn(content, "chosen"), _turn(content, "rejected")
    if "prompt" in content:
        prompt = _turn(content, "prompt", empty=True)
    elif isinstance(chosen, list) and isinstance(rejected, list):
        shared = 0
        while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
            shared += 1
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        if not shared:
            raise RecordError("there is no 'prompt', and 'chosen' and 'rejected' share no message")
    else:
        raise RecordError(
            f"there is no 'prompt', which texts in 'chosen' need; found {_keys(content)}"
        )
    _same_kind({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    if chosen == rejected or not chosen or not rejected:
        raise RecordError(f"'chosen' and 'rejected' are the same ({shown(content['chosen'])})")
    return Pair(prompt, chosen, rejected)


def _turn(content: dict[str, Any], key: str, *, empty: bool = False) -> Turn:
    if isinstance(content[key], list):
        return _messages(content, key)
    return _text(content, key, empty=empty, other=" or a list of messages")


def _text(content: dict[str, Any], key: str, *, empty: bool = False, other: str = "") -> str:
    value = content[key]
    if not isinstance(value, str):
        raise RecordError(f"{key!r} is {_found(value)}; expected a text{other}")
    if not empty and not value.strip():
        raise RecordError(f"{key!r} is empty ({shown(value)}); expected a text{other}")
    _check_characters(key, value)
    return value


def _messages(content: dict[str, Any], key: str) -> list[Message]:
    value = content[key]
    if not isinstance(value, list) or not value:
        raise RecordError(
            f"{key!r} is {_found(value)}; expected a list of messages with 'role' and 'content'"
        )
    for index, message in enumerate(value):
        place = f"{key}[{index}]"
        if not isinstance(message, dict):
            raise RecordError(
                f"{place} is {_found(message)}; expected an object with 'role' and 'content'"
            )
        for name in ("role", "content"):
            if name not in message:
                raise RecordError(
                    f"{place} has no {name!r}; found {_keys(message)} ({shown(message)})"
                )
            if not isinstance(message[name], str):
                raise RecordError(f"{place}[{name!r}] is {_found(message[name])}; expected a text")
            _check_characters(f"{place}[{name!r}]", message[name])
        if not message["role"]:
            raise RecordError(f"{place}['role'] is empty; expected user, assistant or system")
    return value


def _same_kind(parts: dict[str, Turn]) -> None:
    kinds = {name: isinstance(part, list) for name, part in parts.items()}
    if len(set(kinds.values())) > 1:
        told = ", ".join(
            f"{name!r} is {'a list of messages' if many else 'a text'}"
            for name, many in kinds.items()
        )
        raise RecordError(f"{told}; expected all texts, or all lists of messages")


def _check_characters(name: str, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RecordError(
            f"{name} has half of a surrogate pair at character {error.start} "
            f"({shown(value[max(0, error.start - 8) : error.start + 8])}), which is no character"
        ) from None


def _keys(content: dict[str, Any]) -> str:
    return f"the keys {sorted(content)}" if content else "no keys"


def _found(value: Any) -> str:
    """A value, and what it is where that is not plain to see."""
    if value is None or isinstance(value, bool):
        return shown(value)
    names: dict[type, str] = {int: "a number", float: "a number", str: "a text", list: "a list"}
    return f"{shown(value)} ({names.get(type(value), 'an object')})"
