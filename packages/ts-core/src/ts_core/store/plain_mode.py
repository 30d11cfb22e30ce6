"""Tensors that streaming makes or binds are ordinary ones, whatever mode the caller is in.

Under `torch.inference_mode()` a weight that is bound to another tensor would become an inference
tensor, which no later training step may save; inside a `torch.func` transform even a slice of a
slot would be a wrapper without memory.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch

CallableT = TypeVar("CallableT", bound=Callable[..., Any])


def plain_mode(function: CallableT) -> CallableT:
    """A function that runs outside inference mode and outside any `torch.func` transform.

    Gradients stay disabled where the caller's mode had disabled them.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        inference = torch.is_inference_mode_enabled()
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        if not inference and not transformed:
            return function(*args, **kwargs)
        with _left(inference, transformed):
            return function(*args, **kwargs)

    return cast(CallableT, call)


@contextlib.contextmanager
def _left(inference: bool, transformed: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if transformed:
            stack.enter_context(torch._C._DisableFuncTorch())
        if inference:
            grad_enabled = torch.is_grad_enabled()
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(grad_enabled))
        yield
