"""Running a model with a few of its blocks where all of them are alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

_ENOUGH = 3


@contextmanager
def short_stack(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[list[nn.Module]]:
    """While open, the model has three of its blocks, which are yielded.

    All of them stay when they are not alike (in type, and in the names, shapes and training of
    their parameters), or when the model does not keep them in one ModuleList.
    """
    blocks = list(blocks)
    place = _holder(model, blocks)
    alike = len({_signature(block) for block in blocks}) == 1
    if place is None or not alike or len(blocks) <= _ENOUGH:
        yield blocks
        return
    parent, name, stack = place
    fewer = blocks[: _ENOUGH - 1] + blocks[-1:]
    setattr(parent, name, nn.ModuleList(fewer))
    try:
        yield fewer
    finally:
        setattr(parent, name, stack)


def _holder(
    model: nn.Module, blocks: list[nn.Module]
) -> tuple[nn.Module, str, nn.ModuleList] | None:
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == len(blocks):
                if all(mine is theirs for mine, theirs in zip(child, blocks, strict=True)):
                    return module, name, child
    return None


def _signature(block: nn.Module) -> Any:
    return (
        type(block),
        tuple((n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in block.named_parameters()),
    )
