"""Finding the repeated layer stack of a model, and which parameters belong to whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn

from ts_core.errors import OptionError

# What find_blocks() looks for.
A_STACK = "a ModuleList or Sequential of two or more modules, all of one class"


def needs_stack(option: str) -> OptionError:
    """What to raise where `option` ("name=value") was given for a model without blocks."""
    return OptionError(
        f"{option} needs a stack of blocks and none was found ({A_STACK}). Pass blocks=[...], the "
        f"modules of the model that repeat."
    )


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The model's repeated stack: its largest ModuleList or Sequential of one type.

    Args:
        model: any module.

    Returns:
        The children of the ModuleList or Sequential with the most parameters among those that
        have at least two children, all of one type; [] when there is none.
    """
    best: list[nn.Module] = []
    best_size = -1
    for module in model.modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = list(module)
        if len(children) < 2 or len({type(child) for child in children}) != 1:
            continue
        size = sum(parameter.numel() for parameter in module.parameters())
        if size > best_size:
            best, best_size = children, size
    return best


def shared_parameters(model: nn.Module, blocks: Sequence[nn.Module]) -> set[int]:
    """`id`s of parameters that more than one block, or a block and the rest, use."""
    owners: Counter[int] = Counter()
    inside: set[int] = set()
    for block in blocks:
        ids = {id(parameter) for parameter in block.parameters()}
        owners.update(ids)
        inside |= {id(module) for module in block.modules()}
    for module in model.modules():
        if id(module) not in inside:
            owners.update(
                {id(p) for p in module._parameters.values() if p is not None} & set(owners)
            )
    return {key for key, count in owners.items() if count > 1}
