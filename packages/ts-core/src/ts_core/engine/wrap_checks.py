"""What wrap() refuses before it changes anything."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ts_core.config import WrapOptions
from ts_core.device import Device
from ts_core.engine.blocks import needs_stack
from ts_core.engine.meta_loading import meta_tensors
from ts_core.engine.no_copies import refuses_copies
from ts_core.engine.optimizer_checks import check_trains, check_unscheduled
from ts_core.engine.session import ATTRIBUTE
from ts_core.errors import OptionError, StateError
from ts_core.optim import OffloadAdamW, check_convertible, checks
from ts_core.optim.data_parallel import several_processes
from ts_core.store import Leaf


def check_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, config: WrapOptions
) -> None:
    """Refuse a model, an optimizer, or options that do not go together."""
    if not isinstance(model, nn.Module):
        raise OptionError(f"model is a {type(model).__name__}. Pass a torch.nn.Module.")
    for module in model.modules():
        if hasattr(module, ATTRIBUTE) or refuses_copies(module):
            raise StateError(
                "the model, a part of it, or one that it is a part of, is already wrapped. Call "
                "unwrap() on that first."
            )
    empty = meta_tensors(model)
    if empty and config.loader is None:
        raise OptionError(
            f"{len(empty)} parameters or buffers are on the meta device and hold no values "
            f"({empty[0]}, ...). Pass loader=<function from such a name to its values>, which "
            f"wrap() calls for one at a time (loader=state_dict.__getitem__, say), or load the "
            f"weights first (trainstream.load_model())."
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise OptionError(
            f"optimizer is a {type(optimizer).__name__}. Pass torch.optim.AdamW, "
            f"torch.optim.Adam, OffloadAdamW or None."
        )
    if optimizer is not None and not isinstance(optimizer, OffloadAdamW):
        check_convertible(optimizer)
        check_unscheduled(optimizer)
    if config.eager and config.max_grad_norm is not None:
        raise OptionError(
            f"eager=True cannot be combined with max_grad_norm={config.max_grad_norm}: clipping "
            f"needs the whole gradient first. Use eager=None or False."
        )
    trained = [p for p in model.parameters() if p.requires_grad]
    if optimizer is not None:
        trained = [p for group in optimizer.param_groups for p in group["params"]]
    checks.memory(trained)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise OptionError(
            "the model has no parameter that requires a gradient, so there is nothing to train. "
            "Add adapters (PEFT) or unfreeze parameters before wrapping."
        )
    if optimizer is not None:
        check_trains(model, optimizer)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise OptionError(
            "the model is a DistributedDataParallel, which averages gradients after they have left "
            "the device. Pass the module inside (model.module): wrap() averages over the "
            "processes itself."
        )
    several = several_processes(config.distributed, config.optimizer_mode, config.eager)
    if several and isinstance(optimizer, OffloadAdamW) and optimizer.processes == 1:
        raise OptionError(
            "the OffloadAdamW was made with distributed=False, or before the process group, and "
            "trains alone. Make it after init_process_group(), or pass distributed=False to wrap() "
            "too."
        )


def check_blocks(
    model: nn.Module, blocks: Sequence[nn.Module], config: WrapOptions, device: Device
) -> None:
    """Refuse blocks that are not of the model, indices beyond them, and options that need some."""
    inside = {id(module) for module in model.modules()}
    for index, block in enumerate(blocks):
        if id(block) not in inside:
            raise OptionError(
                f"blocks[{index}] ({type(block).__name__}) is not a module of the model."
            )
    asked = config.param_offload
    if not blocks and (asked is True or asked not in ("auto", False, 0, [], ())):
        raise needs_stack(f"param_offload={asked!r}")
    if isinstance(asked, list | tuple):
        beyond = [index for index in asked if index >= len(blocks)]
        if beyond:
            raise OptionError(
                f"param_offload names blocks {beyond}, but the model has {len(blocks)}. Use "
                f"indices from 0 to {len(blocks) - 1}."
            )
    if config.disk_offload is not None:
        if not blocks:
            raise needs_stack(f"disk_offload={str(config.disk_offload)!r}")
        from ts_core.store.disk import usable_directory

        usable_directory(config.disk_offload)
    # On a GPU a limit bounds all memory, with blocks or without.
    if not blocks and config.vram_limit is not None and not device.separate_memory:
        raise needs_stack(f"vram_limit={config.vram_limit!r} on the host device")


def check_pageable(
    leaves: Sequence[Sequence[Leaf]], config: WrapOptions, left_out: Sequence[bool] = ()
) -> None:
    """Refuse to page blocks that hold nothing that can stream.

    Args:
        leaves: per block, what can.
        config: the options of wrap().
        left_out: per block, whether the optimizer lacks parameters of it that require a gradient.
    """
    asked = config.param_offload
    if asked in ("auto", False, 0) or asked == [] or asked == ():
        return
    named = asked if isinstance(asked, list | tuple) else range(len(leaves))
    empty = [index for index in named if not leaves[index]]
    if empty and (isinstance(asked, list | tuple) or len(empty) == len(leaves)):
        if left_out and any(left_out[index] for index in empty):
            raise OptionError(
                f"param_offload={asked!r} asks to page blocks {empty}, whose weights require a "
                f"gradient and are not in the optimizer, so that they cannot stream. Freeze them "
                f"(requires_grad_(False)) or give them to the optimizer."
            )
        raise OptionError(
            f"param_offload={asked!r} asks to page blocks {empty}, which hold no matrix that can "
            f"stream: adapters, norms, biases and weights that several modules share stay on the "
            f"device. Use param_offload=False, or name other blocks."
        )


def check_no_gradients(paged: Sequence[Leaf]) -> None:
    """A gradient cannot stay where its weight no longer is."""
    held = [leaf.name for leaf in paged if leaf.trained and leaf.owner.grad is not None]
    if held:
        raise StateError(
            f"{len(held)} trained weights of paged blocks hold gradients ({held[0]}, ...). Finish "
            f"the step, or call zero_grad(), before wrap()."
        )


def compiled_from_outside(model: nn.Module, blocks: Sequence[nn.Module]) -> bool:
    """Whether torch.compile was asked for in a way that does not reach into the blocks."""
    whole = getattr(model, "_orig_mod", None) is not None
    return bool(blocks) and (
        whole
        or getattr(model, "_compiled_call_impl", None) is not None
        or any(getattr(block, "_compiled_call_impl", None) is not None for block in blocks)
    )
