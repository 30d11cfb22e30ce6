"""Which optimizer takes the gradients of a parameter: the newest one made for it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence

import torch

_owners: dict[int, tuple[weakref.ref[torch.Tensor], weakref.ref[object]]] = {}


def own(optimizer: object, params: Sequence[torch.Tensor]) -> None:
    """`optimizer` takes the gradients of `params` from now on."""
    for param in params:
        key = id(param)
        gone = functools.partial(_forget, key)
        _owners[key] = (weakref.ref(param, gone), weakref.ref(optimizer))


def owners(params: Sequence[torch.Tensor]) -> list[object]:
    """The optimizers that take gradients of any of `params`, each once."""
    found = {}
    for param in params:
        entry = _owners.get(id(param))
        owner = entry[1]() if entry is not None and entry[0]() is param else None
        if owner is not None:
            found[id(owner)] = owner
    return list(found.values())


def _forget(key: int, _: object) -> None:
    _owners.pop(key, None)
