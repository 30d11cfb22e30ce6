"""The hooks by which an OffloadAdamW takes gradients from its parameters during backward."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle

from ts_core.errors import StateError
from ts_core.optim.clip_guard import install_clip_guard, mark_streamed, unmark_streamed
from ts_core.optim.ownership import Owner, own, owners


class Taker(Owner, Protocol):
    """What hooks give gradients to."""

    def _on_gradient(self, param: torch.nn.Parameter) -> None:
        """The gradient of one backward is in `param.grad`."""


class GradientHooks:
    """Hooks on the parameters of one optimizer.

    Attributes:
        attached: whether gradients are taken by hooks.
    """

    def __init__(self) -> None:
        self.attached = False
        self._displaced = False
        self._handles: list[RemovableHandle] = []

    def attach(self, taker: Taker, params: Sequence[torch.nn.Parameter]) -> None:
        """Hook all parameters; other optimizers stop taking gradients of theirs.

        Raises:
            StateError: another optimizer has taken over from this one.
        """
        self.check_not_displaced()
        self.attached = True
        self.add(taker, params)
        install_clip_guard()

    def add(self, taker: Taker, params: Sequence[torch.nn.Parameter]) -> None:
        """Hook parameters that have been added."""
        # A weak reference: a hook that held the optimizer would keep both alive for ever.
        hook = functools.partial(_forward_gradient, weakref.ref(taker))
        for other in owners(params):
            if other is not taker:
                other.displace()
        own(taker, params)
        for param in params:
            if param.requires_grad:
                self._handles.append(param.register_post_accumulate_grad_hook(hook))
        mark_streamed(params)

    def detach(self, params: Iterable[torch.nn.Parameter]) -> None:
        """Remove the hooks: gradients stay in `param.grad`."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        unmark_streamed(params)
        self.attached = False

    def displace(self) -> None:
        """Another optimizer has taken over: no hooks any more."""
        self._displaced = True

    def check_not_displaced(self) -> None:
        """Raise if another optimizer has taken over.

        Raises:
            StateError: it has.
        """
        if self._displaced:
            raise StateError(
                "another OffloadAdamW was made for parameters of this one and takes their "
                "gradients. Use one optimizer per parameter, and load_state_dict() to go on from "
                "an older one's state."
            )


def _forward_gradient(taker: weakref.ref[Taker], param: torch.nn.Parameter) -> None:
    owner = taker()
    if owner is not None:
        owner._on_gradient(param)
