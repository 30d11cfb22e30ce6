"""Parameters on the meta device that know how to get their values: loaded where they are needed.

Such a parameter has a shape and a dtype and no memory. It gets memory at most once, in the place
where its values are to stay, so that a model larger than free memory never lies there as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn

Load: TypeAlias = Callable[[], torch.Tensor]

_LOAD = "_trainstream_load"


def set_load(param: nn.Parameter, load: Load) -> None:
    """`load` returns the values of `param`: a plain tensor of its shape and dtype, on any device.

    It may be called more than once.
    """
    param.__dict__[_LOAD] = load


def forget_load(param: nn.Parameter) -> None:
    """The parameter is an ordinary one again."""
    param.__dict__.pop(_LOAD, None)


def can_load(param: Any) -> bool:
    """Whether `param` has no values yet and knows how to get them."""
    return bool(param.is_meta) and _LOAD in getattr(param, "__dict__", {})


def values_of(param: Any) -> torch.Tensor:
    """The values of a parameter: its tensor, or what is loaded now and kept by the caller alone."""
    if can_load(param):
        load: Load = param.__dict__[_LOAD]
        return load()
    tensor: torch.Tensor = param.data
    return tensor


def give_memory(param: nn.Parameter, values: torch.Tensor) -> None:
    """Let a parameter on the meta device be `values` (its shape and dtype): it stays the same
    object, so that optimizers and modules that hold it have the values too.

    torch does not let `.data` change between such devices; what is inside the object is exchanged.
    """
    forget_load(param)
    own = values.data  # with a count of writes of its own: views of one image share theirs
    made = nn.Parameter(own, requires_grad=param.requires_grad)
    made.__class__ = type(param)
    made.__dict__.update(param.__dict__)
    torch.utils.swap_tensors(param, made)
