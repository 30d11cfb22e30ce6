"""What autograd keeps for backward inside a block: the hooks that decide it, tensor by tensor.

A tensor that views a streaming slot becomes a handle that finds the view again; one that is paged
becomes a handle to its page; any other is kept. torch checks the version of a saved tensor only
where no hooks are active, so these handles check it themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ts_core.store.pager import ParamPager
from ts_core.store.saved_views import WRITTEN, SavedView

PLAIN_TYPES = (torch.Tensor, nn.Parameter)
_ANOMALY = (
    "Hint: enable anomaly detection to find the operation that failed to compute its gradient, "
    "with torch.autograd.set_detect_anomaly(True)."
)


class SavedTensor(ABC):
    """A handle that autograd keeps."""

    __slots__ = ()

    @abstractmethod
    def tensor(self) -> torch.Tensor:
        """The tensor that was saved."""


class KeptTensor(SavedTensor):
    """A tensor that stays, without its history (which would keep the graph alive in a cycle)."""

    __slots__ = ("_of_weight", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._version = tensor._version
        self._of_weight = isinstance(tensor._base, nn.Parameter) or isinstance(tensor, nn.Parameter)
        self._tensor = tensor.detach() if tensor.grad_fn is not None else tensor

    def tensor(self) -> torch.Tensor:
        """The tensor.

        Raises:
            RuntimeError: it was changed in place since (torch's own message).
        """
        shape = tuple(self._tensor.shape)
        check_version(self._tensor, self._version, shape, WRITTEN if self._of_weight else _ANOMALY)
        return self._tensor


def check_version(
    counter: torch.Tensor, expected: int, shape: tuple[int, ...], hint: str = _ANOMALY
) -> None:
    """Raise torch's error when a saved tensor was changed in place.

    Args:
        counter: the tensor, or one that shares its version counter.
        expected: its version when it was saved.
        shape: of the saved tensor, for the message.
        hint: the end of the message.
    """
    now = counter._version
    if now != expected:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: [{counter.type()} {list(shape)}] is at version {now}; expected "
            f"version {expected} instead. {hint}"
        )


def saved_tensor_hooks(
    pager: ParamPager | None,
    page: Callable[[torch.Tensor], SavedTensor | None] | None = None,
    observe: Callable[[torch.Tensor], None] | None = None,
) -> AbstractContextManager[Any]:
    """Saved-tensor hooks for one call of a block.

    Hooks that are already active (activation checkpointing, a user's) keep seeing every tensor
    that does not view a slot; nothing is paged then.

    Args:
        pager: of the weights, when the block has plain ones that stream.
        page: gives the handle of a paged tensor, None for one that stays.
        observe: is called with every tensor that does not view a slot.
    """
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def pack(tensor: torch.Tensor) -> Any:
        plain = type(tensor) in PLAIN_TYPES
        if plain and pager is not None:
            view = pager.saved_view(tensor)
            if view is not None:
                return view
        if observe is not None:
            observe(tensor)
        if outer is not None:
            return outer[0](tensor)
        if not plain:
            return tensor.detach() if tensor.grad_fn is not None else tensor
        if page is not None:
            handle = page(tensor)
            if handle is not None:
                return handle
        return KeptTensor(tensor)

    def unpack(packed: Any) -> Any:
        if isinstance(packed, SavedTensor | SavedView):
            return packed.tensor()
        return packed if outer is None else outer[1](packed)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def outer_checkpoint() -> bool:
    """Whether torch's activation checkpointing is active around the caller."""
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if outer is None:
        return False
    name = getattr(outer[0], "__qualname__", "")
    return name.startswith(("_checkpoint_hook.", "_recomputation_hook."))
