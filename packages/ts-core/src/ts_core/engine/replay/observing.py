"""Watching one eager call of a block: what a recording of such calls has to know, or why not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ts_core.engine.activation_meter import tensors_in
from ts_core.engine.replay.inspector import Before, Inspector, foreign_leaves
from ts_core.engine.replay.recording import Observed
from ts_core.engine.replay.signature import NotReplayable, Spec, take_apart
from ts_core.engine.replay.watch import ModuleWatch, Weights
from ts_core.store.leaves import is_wrapper


def check_weights(weights: Weights, shared: frozenset[int]) -> None:
    """Refuse a block whose weights no recording can train.

    Args:
        weights: of the block.
        shared: `id`s of parameters that other modules use too.

    Raises:
        NotReplayable: why not.
    """
    for param in weights.params:
        if param.requires_grad and is_wrapper(param):
            raise NotReplayable(f"a {type(param).__name__} is trained")
        if param.requires_grad and id(param) in shared:
            raise NotReplayable("a trained parameter is used by other modules too")
    for tensor in (*weights.params, *weights.buffers):
        if not is_wrapper(tensor) and tensor.layout is not torch.strided:
            raise NotReplayable("a weight is no ordinary strided tensor")


def observe(
    block: nn.Module,
    weights: Weights,
    watch: ModuleWatch,
    generator: torch.Generator,
    called: tuple[Any, Any],
    spec: Spec,
    tensors: Sequence[torch.Tensor],
    eager: Callable[[], Any],
) -> tuple[Any, Observed | str]:
    """Run the caller's own eager call, watched.

    Args:
        block: what is called.
        weights, watch: of it, now.
        generator: of the device's random numbers.
        called: (args, kwargs).
        spec, tensors: those taken apart.
        eager: runs it.

    Returns:
        Its result, and what it showed, or why it cannot be recorded.
    """
    state, before = generator.get_state(), Before(block, tensors[0].device)
    inspector = Inspector(tensors, weights)
    with inspector:
        result = eager()
    try:
        outputs: list[torch.Tensor] = []
        take_apart(result, outputs)
        found = inspector.reason or before.broken()
        after: list[torch.Tensor] = []
        if found is None and not watch.unchanged():
            found = "it changes modules or their attributes in forward"
        if found is None and (
            take_apart(called, after) != spec
            or any(a is not b for a, b in zip(after, tensors, strict=True))
        ):
            found = "it changes the containers that it is given"
        if found is None and foreign_leaves(outputs, tensors, weights.params):
            found = "gradients go to something that is neither an argument nor its parameter"
    except NotReplayable as error:
        found = str(error)
    if found is not None:
        return result, found
    gradients = torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(result))
    random = not torch.equal(state, generator.get_state())
    return result, Observed(spec, random, inspector.outside, gradients)
