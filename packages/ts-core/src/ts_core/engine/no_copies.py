"""Modules that refuse to be copied or pickled while they stream.

A copy would share the hooks: it would compute with the weights of the original.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from ts_core.errors import StateError

NO_COPY = (
    "a wrapped model, or one of its blocks, cannot be copied or pickled, since it owns device "
    "memory and threads. unwrap() the model first, or save model.state_dict()."
)
_HOOK = "__reduce_ex__"  # what copy.deepcopy, pickle and torch.save call


class _Refusal:
    def __call__(self, protocol: Any) -> Any:
        raise StateError(NO_COPY)


class NoCopies:
    """Makes modules refuse to be copied, until `remove()`.

    Args:
        modules: the modules; not kept alive.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules: list[weakref.ref[nn.Module]] = []
        for module in modules:
            module.__dict__[_HOOK] = _Refusal()
            self._modules.append(weakref.ref(module))

    def remove(self) -> None:
        """Copying works again."""
        for reference in self._modules:
            module = reference()
            if module is not None:
                module.__dict__.pop(_HOOK, None)
        self._modules.clear()


def refuses_copies(module: nn.Module) -> bool:
    """Whether the module streams, as a wrapped model or as a block of one."""
    return isinstance(module.__dict__.get(_HOOK), _Refusal)
