"""Storing frozen block weights in an installed codec's format. No format is named here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ts_core.device import Device, HostDevice
from ts_core.errors import OptionError
from ts_core.registry import codecs
from ts_core.store.leaves import is_wrapper, stored_bytes


def quantize_model(
    model: nn.Module,
    quantize: str = "nf4",
    *,
    blocks: Sequence[nn.Module] | None = None,
    block_size: int = 64,
    device: Device | None = None,
) -> dict[str, Any]:
    """Store the frozen linear weights of the blocks in a codec's format, one at a time.

    A weight that is already stored in some format is left as it is. Trained weights, weights
    used by more than one module, and everything outside the blocks stay as they are.

    Args:
        model: the model; changed in place.
        quantize: name of an installed codec.
        blocks: the layer stack; found with `find_blocks` when omitted.
        block_size: values per scale.
        device: where the encoding runs (the result stays on the weight's device).

    Returns:
        tensors (how many were stored), bytes_before, bytes_after.

    Raises:
        UnknownPluginError: no installed package offers the codec.
        OptionError: there is no frozen linear weight in the blocks.
    """
    from ts_core.engine.blocks import find_blocks

    codec = codecs.get(quantize)
    stack = find_blocks(model) if blocks is None else list(blocks)
    device = device or HostDevice()
    uses = _uses(model)
    count = before = after = already = 0
    for index, block in enumerate(stack):
        for name, module in block.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            weight = module._parameters.get("weight")
            if weight is None or weight.requires_grad or uses[id(weight)] > 1:
                continue
            if is_wrapper(weight):
                already += 1
                continue
            before += stored_bytes(weight)
            source = weight.data.to(device.torch_device) if device.separate_memory else weight.data
            stored = codec.encode(source, block_size=block_size, name=f"block {index}: {name}")
            module.weight = nn.Parameter(stored.to(weight.device), requires_grad=False)
            after += stored_bytes(module.weight)
            count += 1
    if count == 0 and already == 0:
        raise OptionError(
            f"quantize={quantize!r} found no frozen linear weight in {len(stack)} blocks. Freeze "
            f"the base model (or add adapters) before wrapping, or use quantize='none'."
        )
    return {"tensors": count, "bytes_before": before, "bytes_after": after}


def quantizable_weights(blocks: Sequence[nn.Module]) -> list[tuple[int, int]]:
    """Per block, count and bytes of the weights that `quantize_model` would store."""
    found = []
    for block in blocks:
        weights = [
            module.weight
            for module in block.modules()
            if isinstance(module, nn.Linear)
            and not module.weight.requires_grad
            and not is_wrapper(module.weight)
        ]
        found.append((sum(w.numel() for w in weights), sum(stored_bytes(w) for w in weights)))
    return found


def _uses(model: nn.Module) -> dict[int, int]:
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return uses
