"""The plain tensors inside a parameter, and how to put other ones in their place.

A parameter is either a plain tensor or a wrapper subclass that follows PyTorch's traceable
protocol (`__tensor_flatten__` names its inner tensors, which may be such subclasses themselves).
Nothing here knows a format.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


@dataclass(frozen=True)
class Leaf:
    """One plain tensor that can be replaced.

    Attributes:
        name: dotted name, for messages.
        holder: the parameter itself, or the subclass instance that has it as an attribute.
        attribute: name of the attribute of `holder`, or None when the leaf is the parameter.
        owner: the parameter.
        trained: whether an optimizer changes it (then it is the parameter itself).
    """

    name: str
    holder: Any
    attribute: str | None
    owner: torch.Tensor
    trained: bool = False

    def get(self) -> torch.Tensor:
        """The tensor that is there, after an update of it that is still in flight."""
        if self.attribute is None:
            data: torch.Tensor = self.holder.data
            return data
        return self.peek()

    def peek(self) -> torch.Tensor:
        """`get` without waiting: the same memory, but an update may still write into it."""
        if self.attribute is None:
            with torch._C.DisableTorchFunctionSubclass():
                now: torch.Tensor = self.holder.data
            return now
        inner: torch.Tensor = getattr(self.holder, self.attribute)
        return inner

    def set(self, tensor: torch.Tensor) -> None:
        """Put `tensor` (same shape and dtype, any address or device) in its place."""
        if self.attribute is None:
            with torch._C.DisableTorchFunctionSubclass():
                self.holder.data = tensor
        else:
            setattr(self.holder, self.attribute, tensor)

    def version(self) -> int:
        """The parameter's count of in-place writes, without waiting for an update in flight."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.owner._version


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a subclass that names its inner tensors."""
    return bool(is_traceable_wrapper_subclass(tensor))


def tensor_leaves(name: str, tensor: torch.Tensor) -> Iterator[Leaf]:
    """The leaves of a parameter: itself when plain, else its inner tensors, in order."""
    if not is_wrapper(tensor):
        yield Leaf(name, tensor, None, tensor)
        return
    yield from _inner_leaves(name, tensor, tensor)


def _inner_leaves(name: str, wrapper: Any, owner: torch.Tensor) -> Iterator[Leaf]:
    attributes, _ = wrapper.__tensor_flatten__()
    for attribute in attributes:
        inner = getattr(wrapper, attribute)
        if is_wrapper(inner):
            yield from _inner_leaves(f"{name}.{attribute}", inner, owner)
        else:
            yield Leaf(f"{name}.{attribute}", wrapper, attribute, owner)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a (permuted) tensor covers a range of memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a parameter really occupies, subclass or not."""
    found = [leaf.peek() for leaf in tensor_leaves("", tensor)]
    return sum(inner.numel() * inner.element_size() for inner in found)
