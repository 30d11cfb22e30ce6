"""Fused kernels inside blocks and adapters, by whatever plug-in offers them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ts_core.config import WrapOptions
from ts_core.device import Device
from ts_core.registry import kernels


def patches_asked_for(config: WrapOptions) -> list[Any]:
    """The plug-ins that the options name.

    Raises:
        UnknownPluginError: one is not installed; the message has the line that adds it.
    """
    names = []
    if config.kernels is True:
        names.append("patch_blocks")
    if config.fused_lora is True:
        names.append("patch_lora")
    return [kernels.get(name) for name in names]


def apply_patches(
    patches: Sequence[Any],
    model: nn.Module,
    blocks: Sequence[nn.Module],
    device: Device,
    say: Callable[[str], None],
) -> list[Any]:
    """Put them into the model; returns handles with `undo()`."""
    handles = []
    for patch in patches:
        if patch.name == "patch_blocks":
            handles.append(patch.fn(blocks, on_event=say, device=device.torch_device))
        else:
            handles.append(patch.fn(model, on_event=say))
    return handles
