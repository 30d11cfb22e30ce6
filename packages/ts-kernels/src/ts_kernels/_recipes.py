"""Results that a later backward computes again instead of keeping them.

`rms_norm` and `gated_mlp` keep their inputs for their own backward, and their results can be had
from these again in one pass over memory. A `lora_linear` that is given such a result keeps the same
inputs, which takes no further bytes, in place of the result. The same kernel on the same values
gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

_ATTRIBUTE = "_ts_kernels_recipe"


class Recipe(NamedTuple):
    """How to make a tensor again.

    Attributes:
        make: of `inputs`.
        inputs: tensors that are kept for backward in any case, without their history.
        version: of the result when it was made.
    """

    make: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    version: int


def note(result: Tensor, make: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """`result`, which `make(*inputs)` would give again."""
    detached = tuple(tensor.detach() for tensor in inputs)
    setattr(result, _ATTRIBUTE, Recipe(make, detached, result._version))
    return result


def recipe_of(x: Tensor) -> Recipe | None:
    """The recipe of `x`, unless it has been written since it was made."""
    recipe: Recipe | None = getattr(x, _ATTRIBUTE, None)
    return recipe if recipe is not None and recipe.version == x._version else None


def kept_for(x: Tensor, recipe: Recipe | None) -> Sequence[Tensor]:
    """What to save for `made_again`."""
    return (x,) if recipe is None else recipe.inputs


def made_again(kept: Sequence[Tensor], make: Callable[..., Tensor] | None) -> Tensor:
    """The tensor of which `kept` was saved."""
    return kept[0] if make is None else make(*kept)
