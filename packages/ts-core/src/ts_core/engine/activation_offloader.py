"""ActivationOffloader: the activations of any stack of blocks, without the rest of wrap()."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ts_core.config import check_option
from ts_core.device import Device, resolve_device
from ts_core.engine.activation_options import ActivationOptions, check_activation_options
from ts_core.engine.activations import Activations
from ts_core.engine.casts import Casts
from ts_core.engine.runner import BlockRunner
from ts_core.engine.session import ATTRIBUTE, EventLog
from ts_core.errors import OptionError, StateError
from ts_core.transfer import CopyEngine

OFFLOADER = "_trainstream_activations"


class ActivationOffloader:
    """Keeps, pages or recomputes the activations of a model's blocks.

    Weights, gradients and the optimizer are left alone: train as before. Results are those of
    training without it, bit for bit (under autocast see `recompute` in docs/options.md).

    Args:
        model: the model; its forward begins a pass.
        blocks: its layer stack, in order.
        offload: "auto", True (all blocks but the last), False, or a share of the blocks. "auto",
            on a GPU: after a first step that measures, what does not fit in the GPU's memory is
            paged, as far as RAM allows; where everything fits, as many blocks are paged as cost
            at most `max_slowdown`. On the host everything stays, as there is no other memory.
        min_bytes: smaller tensors stay.
        prefetch_depth: paged blocks fetched ahead in backward.
        calibrate_steps: steps whose median time `max_slowdown` is counted from.
        profile: False takes no step times: what fits stays, nothing more is tried.
        max_slowdown: share of the step time that paging may add, for "auto".
        tune_window: steps that count in each trial.
        max_inflight_bytes: the most bytes of pages on their way at once, each direction.
        recompute: "auto", True, False, a share or a list of blocks: computed again in backward.
            "auto": what RAM cannot hold, and more where trials show that to be faster.
        device: None for that of the blocks' parameters.
        headroom: share of the GPU's memory to leave free.
        verbose: print decisions.

    Raises:
        OptionError: a value that is not accepted, or a block that is not part of the model.
        StateError: the model is wrapped (give wrap() the options instead), or has an offloader.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        offload: Any = "auto",
        *,
        min_bytes: int = 1 << 20,
        prefetch_depth: int = 1,
        calibrate_steps: int = 3,
        profile: bool = True,
        max_slowdown: float = 0.15,
        tune_window: int = 3,
        max_inflight_bytes: int = 1 << 30,
        recompute: Any = "auto",
        device: str | torch.device | Device | None = None,
        headroom: float = 0.10,
        verbose: bool = False,
    ) -> None:
        check_option("activation_offload", offload, "offload")
        check_option("min_offload_bytes", min_bytes, "min_bytes")
        check_option("prefetch_depth", prefetch_depth)
        check_option("accumulation_steps", calibrate_steps, "calibrate_steps")
        check_option("profile", profile)
        check_option("max_activation_slowdown", max_slowdown, "max_slowdown")
        check_option("accumulation_steps", tune_window, "tune_window")
        check_option("max_inflight_bytes", max_inflight_bytes)
        check_option("recompute", recompute)
        check_option("vram_headroom", headroom, "headroom")
        stack = _checked_blocks(model, blocks)
        check_activation_options(offload, recompute, len(stack))
        where = device if isinstance(device, Device) else resolve_device(_place(stack, device))
        self._log = EventLog(verbose)
        segments = where.grow_segments()
        if segments is not None:
            self._log(segments)
        self._adjustable = "auto" in (offload, recompute)
        self._activations = Activations(
            stack,
            CopyEngine(where, max_inflight_bytes),
            ActivationOptions(
                offload,
                recompute,
                min_bytes,
                prefetch_depth,
                headroom,
                max_slowdown,
                calibrate_steps,
                tune_window,
                profile,
            ),
            self._log,
        )
        self._runner = BlockRunner(stack, None, self._activations, casts=Casts(stack, model))
        runner = self._runner

        def begin(_: nn.Module, args: Any, kwargs: Any) -> None:
            runner.new_pass(args, kwargs)

        self._handle = model.register_forward_pre_hook(begin, with_kwargs=True)
        self._model = model
        setattr(model, OFFLOADER, True)

    @property
    def policy(self) -> list[str]:
        """Per block "keep", "offload" or "recompute", now."""
        return self._activations.policy

    @property
    def decision(self) -> str:
        """The last decision, in plain words."""
        return self._activations.decision

    @property
    def stats(self) -> dict[str, int]:
        """Counters of pages and host buffers, in bytes and pieces."""
        return self._activations.stats

    @property
    def events(self) -> list[str]:
        """Decisions so far, in plain words."""
        return self._log.lines

    @property
    def block_bytes(self) -> list[int]:
        """Per block, bytes of activations that autograd holds when they stay; 0 until measured."""
        return self._activations.block_bytes

    @property
    def adjustable(self) -> bool:
        """Whether something was left to "auto", so that `keep_resident` may change it."""
        return self._adjustable

    def keep_resident(self, k: int) -> None:
        """Let the activations of `k` blocks stay from the next forward on, the last ones first.

        Raises:
            OptionError: not a number from 1 to that of the blocks.
            StateError: the policy is not adjustable, or nothing is measured yet.
        """
        if not self._adjustable:
            raise StateError(
                "offload and recompute were given as fixed values. Use 'auto' for one of them to "
                "adjust how many blocks stay."
            )
        self._activations.keep_resident(k)

    def remove(self) -> None:
        """Take the hooks off. Graphs that exist can still run backward."""
        self._handle.remove()
        self._runner.remove()
        self._activations.close()
        self._model.__dict__.pop(OFFLOADER, None)


def _checked_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    for module in model.modules():
        if hasattr(module, ATTRIBUTE):
            raise StateError(
                "the model is wrapped: give activation_offload= and recompute= to wrap() instead."
            )
        if OFFLOADER in module.__dict__:
            raise StateError("the model has an ActivationOffloader: remove() it first.")
    stack = list(blocks)
    inside = {id(module) for module in model.modules()}
    for index, block in enumerate(stack):
        if id(block) not in inside:
            raise OptionError(
                f"blocks[{index}] ({type(block).__name__}) is not a module of the model."
            )
    if not stack:
        raise OptionError("blocks is empty. Pass the model's layer stack, as find_blocks() does.")
    return stack


def _place(
    blocks: Sequence[nn.Module], device: str | torch.device | None
) -> str | torch.device | None:
    if device is not None:
        return device
    for block in blocks:
        for parameter in block.parameters():
            return parameter.device
    return None
