"""A replayed call in autograd's graph: one node per block.

Its backward replays the recorded backward where that is valid; otherwise it computes the block's
forward again from the arguments, as eager code, and differentiates that. So a backward is right
whatever has happened since the forward, or it raises what torch would raise.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ts_core.engine.replay.recorder import Recorder
from ts_core.engine.replay.recording import Recording
from ts_core.engine.replay.signature import put_together, settings, take_apart
from ts_core.engine.replay.watch import ModuleWatch, StandIns, Weights, leaf_alias, view_alias
from ts_core.engine.saved_tensors import saved_tensor_hooks
from ts_core.errors import StateError
from ts_core.schedule.plan import RECOMPUTE
from ts_core.store.pager import ParamPager
from ts_core.store.saved_views import WRITTEN


class Call:
    """One training call of a block that was replayed.

    Args:
        recording: what was replayed.
        recorder: of the device.
        block: the block.
        weights: of the block.
        addresses: where they are now.
        watch: the Python state that the recording is valid for.
        forward: the block's own forward.
        guard: the pager, when plain weights of the block stream.
        enter: brings the block's weights to the device again, in backward.
        count: told how the backward went: None for a replay, else why not.
    """

    def __init__(
        self,
        recording: Recording,
        recorder: Recorder,
        block: nn.Module,
        weights: Weights,
        addresses: tuple[int, ...],
        watch: ModuleWatch,
        forward: Callable[..., Any],
        guard: ParamPager | None,
        enter: Callable[[], None],
        count: Callable[[str | None], None],
    ) -> None:
        self.recording = recording
        self.done = False
        self._recorder = recorder
        self._block = block
        self._weights = weights
        self._watch = watch
        self._forward = forward
        self._guard = guard
        self._enter = enter
        self._count = count
        self._place = recorder.place()
        self._addresses = addresses
        self._settings = settings()
        self._autocast = _autocast_now(recorder.generator.device.type)
        kept = recording.mode != RECOMPUTE  # else torch's checkpoint does not look either
        self._owners = list(recording.saved.owners.values()) if kept else []
        self._versions = _versions(self._owners)
        self._state = recorder.generator.get_state() if recording.observed.random else None
        self._generation = 0

    def run_forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Replay the forward; the saved memory of the recording is this call's from now on."""
        outputs = self.recording.run_forward(tensors)
        self._generation = self.recording.generation
        self.recording.live = weakref.ref(self)
        return outputs

    def run_backward(
        self, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """Gradients of the arguments and of the recording's `used_params`.

        Raises:
            RuntimeError: a weight that was saved has been changed since the forward.
            StateError: the block was changed since, and the backward needs its forward again.
        """
        self._check_versions()
        self._enter()
        self.done = True
        reason = self._why_not(gradients)
        self._count(reason)
        if reason is not None:
            return self._eagerly(tensors, gradients)
        with self._random_numbers_again(self.recording.mode == RECOMPUTE):
            return self.recording.run_backward(tensors, gradients)

    def _why_not(self, gradients: Sequence[torch.Tensor | None]) -> str | None:
        recording = self.recording
        if torch.is_grad_enabled():
            return "the backward itself is to be differentiated (create_graph=True)"
        if recording.mode != RECOMPUTE and recording.generation != self._generation:
            return "the block ran again before a second backward of the same graph"
        if not recording.fits(gradients):
            return "gradients of the results come in another layout, or not for all of them"
        if self._weights.addresses() != self._addresses:
            return "weights have moved between forward and backward"
        if self._recorder.place() != self._place:
            return "the backward runs on another stream or thread than the forward"
        if settings() != self._settings or _autocast_now(self._device)[0]:
            return "the backward runs under other settings (autocast, say) than the forward"
        return None

    @property
    def _device(self) -> str:
        return self._recorder.generator.device.type

    def _check_versions(self) -> None:
        for param, now, expected in zip(
            self._owners, _versions(self._owners), self._versions, strict=True
        ):
            if now != expected:
                raise RuntimeError(
                    f"one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: a weight of shape {tuple(param.shape)} is at version "
                    f"{now}; expected version {expected} instead. {WRITTEN}"
                )

    @contextlib.contextmanager
    def _random_numbers_again(self, wanted: bool) -> Iterator[None]:
        """The generator as it was before the forward, for the time being."""
        if self._state is None or not wanted:
            yield
            return
        generator = self._recorder.generator
        now = generator.get_state()
        generator.set_state(self._state)
        try:
            yield
        finally:
            generator.set_state(now)

    def _eagerly(
        self, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """By the block's forward, run again."""
        if not self._watch.unchanged():
            raise StateError(
                "a replayed block was changed (train() or eval(), adapters, hooks) between its "
                "forward and a backward that needs the forward again. Run backward first, or pass "
                "cuda_graphs=False."
            )
        recording = self.recording
        again = torch.is_grad_enabled()
        alias = view_alias if again else leaf_alias
        wanted = set(recording.used_args)
        args = [
            (view_alias(t) if again else t.detach().requires_grad_()) if k in wanted else t.detach()
            for k, t in enumerate(tensors)
        ]
        hooks: Any = contextlib.nullcontext()
        if self._guard is not None:
            hooks = saved_tensor_hooks(self._guard)
        with torch.enable_grad(), self._random_numbers_again(True):
            params = recording.used_params
            with StandIns(self._block, params, alias) as stand_ins, hooks:
                enabled, dtype, cache = self._autocast
                with torch.autocast(self._device, dtype, enabled, cache):
                    called, kwargs = put_together(recording.observed.spec, iter(args))
                    result = self._forward(*called, **kwargs)
                targets = [args[k] for k in recording.used_args] + list(stand_ins)
        found: list[torch.Tensor] = []
        take_apart(result, found)
        own = [t for t, at in zip(found, recording.passed, strict=True) if at is None]
        pairs = [(t, g) for t, g in zip(own, gradients, strict=True) if g is not None]
        if not pairs:
            return recording.in_order([None] * len(targets))
        grads = torch.autograd.grad(
            [t for t, _ in pairs],
            targets,
            [g for _, g in pairs],
            allow_unused=True,
            create_graph=again,
        )
        return recording.in_order(grads)


class ReplayedBlock(torch.autograd.Function):
    """The node of a call: apply(call, number of arguments, *arguments, *parameters)."""

    @staticmethod
    def forward(ctx: Any, call: Call, count: int, *tensors: torch.Tensor) -> Any:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors[:count])
        outputs = call.run_forward(tensors[:count])
        wanted = call.recording.differentiable
        ctx.mark_non_differentiable(
            *[tensor for tensor, asked in zip(outputs, wanted, strict=True) if not asked]
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        tensors = ctx.saved_tensors  # raises if this graph was gone through already
        call: Call = ctx.call
        return (None, None, *call.run_backward(tensors, gradients))


def replayed(call: Call, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results of the replay that are not arguments, with their history."""
    used = set(call.recording.used_args)
    args = [t if k in used or not t.requires_grad else t.detach() for k, t in enumerate(tensors)]
    params = call.recording.used_params
    found: Any = ReplayedBlock.apply(call, len(args), *args, *params)  # type: ignore[no-untyped-call]
    return list(found)


def _versions(params: Sequence[torch.Tensor]) -> list[int]:
    with torch._C.DisableTorchFunctionSubclass():
        return [param._version for param in params]


def _autocast_now(device: str) -> tuple[bool, torch.dtype, bool]:
    return (
        torch.is_autocast_enabled(device),
        torch.get_autocast_dtype(device),
        torch.is_autocast_cache_enabled(),
    )
