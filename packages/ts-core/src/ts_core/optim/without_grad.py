"""What runs for every gradient, in hooks of a backward, where autograd is off already."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def without_grad(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`torch.no_grad()` as a decorator that costs nothing where gradients are off."""

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return run
