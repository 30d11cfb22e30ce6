"""Fused kernels inside blocks and adapters, by whatever plug-in offers them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ts_core.config import WrapOptions
from ts_core.device import Device
from ts_core.registry import kernels

_PLUGINS = {"kernels": "patch_blocks", "fused_lora": "patch_lora"}


def patches_asked_for(config: WrapOptions) -> list[Any]:
    """The plug-ins that the options name.

    Raises:
        UnknownPluginError: one is not installed; the message has the line that adds it.
    """
    names = [plugin for option, plugin in _PLUGINS.items() if getattr(config, option) is True]
    return [kernels.get(name) for name in names]


def patches_chosen(
    config: WrapOptions, stored: bool, device: Device, say: Callable[[str], None]
) -> list[Any]:
    """The plug-ins of options that are "auto": on where frozen weights are stored in fewer bits, on
    a GPU. Elsewhere the model's own code runs, and its numbers stay what they were.

    Args:
        config: the options.
        stored: whether the blocks have stored (quantized) weights.
        device: of the session.
        say: told where one is off.
    """
    found = []
    for option, plugin in _PLUGINS.items():
        if getattr(config, option) != "auto":
            continue
        if not stored:
            why = "as no weight of the blocks is quantized"
        elif device.kind != "cuda":
            why = "as there is no GPU"
        elif not kernels.has(plugin):
            why = "as ts-kernels is not installed (pip install 'ts-kernels>=0.8,<0.9')"
        else:
            found.append(kernels.get(plugin))
            continue
        say(f"{option}='auto': off, {why}; {option}=True turns it on")
    return found


def apply_patches(
    patches: Sequence[Any],
    model: nn.Module,
    blocks: Sequence[nn.Module],
    device: Device,
    say: Callable[[str], None],
) -> list[Any]:
    """Put them into the model; returns handles with `undo()`. Where one raises, none stays."""
    handles: list[Any] = []
    try:
        for patch in patches:
            if patch.name == "patch_blocks":
                handles.append(patch.fn(blocks, on_event=say, device=device.torch_device))
            else:
                handles.append(patch.fn(model, on_event=say))
    except BaseException:
        for handle in reversed(handles):
            handle.undo()
        raise
    return handles
