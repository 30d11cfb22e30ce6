"""Putting something around a module's `forward`, so that recomputation passes through it too."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Around = Callable[[Callable[..., Any], Any, Any], Any]

# What each forward put in front of another: whether it still does something, and the other.
_under: weakref.WeakKeyDictionary[Any, tuple[list[bool], Any]] = weakref.WeakKeyDictionary()


class OwnForward:
    """A module's `forward`, put in front of its own as an attribute of the instance.

    Unlike hooks it is inside the module's call, and so inside what activation checkpointing calls
    again in backward. Several nest: the last one put there is outermost.

    Args:
        module: gets the attribute; not kept alive.
        around: called as `around(own, args, kwargs)`; returns what the module returns. It must not
            keep the module alive.
    """

    def __init__(self, module: nn.Module, around: Around) -> None:
        self._module = weakref.ref(module)
        self._mine = module.__dict__.get("forward")  # set by someone before
        mine = self._mine
        module_ref = self._module
        self._active = active = [True]

        def forward(*args: Any, **kwargs: Any) -> Any:
            own = mine
            if own is None:
                here = module_ref()
                assert here is not None
                own = type(here).forward.__get__(here)
            return around(own, args, kwargs) if active[0] else own(*args, **kwargs)

        forward.__wrapped__ = type(module).forward if mine is None else mine  # type: ignore[attr-defined]
        self._forward = torch.compiler.disable(forward)  # a compiled model breaks its graph here
        _under[self._forward] = (active, mine)
        module.__dict__["forward"] = self._forward

    def remove(self) -> None:
        """Put the module's own forward back.

        Where another forward has been put around ours since, ours passes through, and goes
        when that one is removed.
        """
        self._active[0] = False
        module = self._module()
        if module is None or module.__dict__.get("forward") is not self._forward:
            return
        mine = self._mine
        while inspect.isfunction(mine) and mine in _under and not _under[mine][0][0]:
            mine = _under[mine][1]
        if mine is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = mine
