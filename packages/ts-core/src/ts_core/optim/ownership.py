"""Who takes the gradients of a parameter: the newest optimizer or offloader made for it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch


class Owner(Protocol):
    """What takes gradients."""

    @property
    def takes_gradients(self) -> bool:
        """Whether it does at present."""

    def displace(self) -> None:
        """An optimizer has taken over parameters of this one, which stops here."""


_owners: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[Owner]]] = {}


def own(owner: Owner, params: Sequence[torch.Tensor]) -> None:
    """`owner` takes the gradients of `params` from now on."""
    for param in params:
        key = id(param)
        gone = functools.partial(_forget, key)
        _owners[key] = (weakref.ref(param, gone), weakref.ref(owner))


def disown(owner: Owner, params: Sequence[torch.Tensor]) -> None:
    """`owner` takes no gradients of `params` any more."""
    for param in params:
        entry = _owners.get(id(param))
        if entry is not None and entry[1]() is owner:
            del _owners[id(param)]


def owners(params: Sequence[torch.Tensor]) -> list[Owner]:
    """Who takes gradients of any of `params`, each once."""
    found = {}
    for param in params:
        entry = _owners.get(id(param))
        owner = entry[1]() if entry is not None and entry[0]() is param else None
        if owner is not None:
            found[id(owner)] = owner
    return list(found.values())


def _forget(key: int, _: object) -> None:
    _owners.pop(key, None)
