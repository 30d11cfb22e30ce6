"""Registration of this package's operators under `torch.ops.ts_kernels`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "ts_kernels"
_torch_library: Any = torch.library  # its functions are partly untyped
_LIBRARY = _torch_library.Library(NAMESPACE, "DEF")


def define_op(
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any],
    setup_context: Callable[..., None] | None = None,
) -> None:
    """Defines one operator: schema, implementation for every device, fake, and autograd.

    The implementation is opaque to torch.compile and chooses between Triton and PyTorch by the
    device of its tensors. It runs on the current stream and its results belong to the caller.

    Args:
        schema: `name(arguments) -> returns` in torch's schema language.
        implementation: computes the results on real tensors.
        fake: gives the results' shapes, dtypes and strides without data.
        backward: autograd formula, as for `torch.library.register_autograd`.
        setup_context: saves what `backward` needs.
    """
    name = schema.split("(", 1)[0]
    qualified = f"{NAMESPACE}::{name}"
    tags = (torch.Tag.pt2_compliant_tag,)
    _LIBRARY.define(schema, tags=tags)
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    _torch_library.register_fake(qualified, fake, lib=_LIBRARY)
    _torch_library.register_autograd(qualified, backward, setup_context=setup_context, lib=_LIBRARY)


def not_twice_differentiable(what: str, instead: str) -> Callable[..., Any]:
    """A backward formula that refuses, for operators that compute gradients."""

    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            f"the gradient of {what} cannot be differentiated again. "
            f"For second derivatives use {instead}, which is plain PyTorch."
        )

    return backward
