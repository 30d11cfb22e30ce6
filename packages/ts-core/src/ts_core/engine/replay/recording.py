"""One block recorded for one signature: forward and backward, and the memory they work on.

A replay copies the arguments in, runs, and copies the results out, so nothing that is handed out is
ever overwritten by a later replay.

- *keep*: the forward saves what backward needs in memory of this recording.
- *recompute*: the forward saves nothing; the backward computes it again first.
- without gradients there is a forward only.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ts_core.engine.replay.inspector import Inspector
from ts_core.engine.replay.memory import SavedMemory, Scratch, copy_all, fresh
from ts_core.engine.replay.recorder import Recorded, Recorder
from ts_core.engine.replay.signature import NotReplayable, Spec, own_memory
from ts_core.engine.replay.watch import Weights
from ts_core.engine.replay.work import BlockWork
from ts_core.schedule.plan import RECOMPUTE
from ts_core.store.pager import ParamPager


@dataclass
class Observed:
    """What an eager call showed.

    Attributes:
        spec: of (args, kwargs).
        random: whether it drew random numbers of the device.
        outside: constants that it reads, by storage.
        gradients: whether any result has a gradient.
    """

    spec: Spec
    random: bool
    outside: dict[int, torch.Tensor]
    gradients: bool


class Recording:
    """Makes the recordings; `run_forward` and `run_backward` replay them.

    Args:
        recorder: of the device.
        scratch: memory that all recordings share.
        block: the block.
        weights: of the block, bound as they will be in replays.
        forward: the block's own forward.
        tensors: the arguments of a call.
        observed: what an eager call with such arguments showed.
        mode: "keep" or "recompute".
        guard: the pager, when plain weights of the block stream.
        room: called with the bytes that are needed beside scratch; raises if there is no room.

    Raises:
        NotReplayable: why not.
        Exception: of the device, or of the block.
    """

    def __init__(
        self,
        recorder: Recorder,
        scratch: Scratch,
        block: nn.Module,
        weights: Weights,
        forward: Callable[..., Any],
        tensors: Sequence[torch.Tensor],
        observed: Observed,
        mode: str,
        guard: ParamPager | None,
        room: Callable[[int], None],
    ) -> None:
        self.observed = observed
        self.mode = mode
        self.addresses = weights.addresses()
        self.generation = 0
        self.live: weakref.ref[Any] | None = None
        self._recorder = recorder
        self._args = [
            scratch.get(f"argument {k}", t.shape, t.stride(), t.dtype)
            for k, t in enumerate(tensors)
        ]
        self._trained = [param for param in weights.params if param.requires_grad]
        self.saved = SavedMemory(
            weights,
            self._args,
            list(observed.outside.values()),
            guard,
            tensors[0].device,
            observed.random,
        )
        self._work = BlockWork(
            block,
            self._trained,
            forward,
            self._args,
            [tensor.requires_grad for tensor in tensors],
            observed.spec,
            self.saved,
            observed.gradients,
            mode == RECOMPUTE,
        )
        state = recorder.generator.get_state()
        try:
            self._make(scratch, weights, tensors, room)
        finally:
            self._work.let_go()
            recorder.generator.set_state(state)

    # -- used by calls ------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """Bytes that this recording holds alone."""
        return self.saved.size_bytes

    @property
    def out_spec(self) -> Spec:
        """Of the results."""
        return self._work.out_spec

    @property
    def passed(self) -> list[int | None]:
        """Of the results: which argument one is, if it is one."""
        return self._work.passed

    @property
    def differentiable(self) -> list[bool]:
        """Of the results that are not arguments: whether they have a gradient."""
        return list(self._work.out_wanted)

    @property
    def used_args(self) -> list[int]:
        """Arguments that get a gradient."""
        return [k for k in self._work.targets if k < len(self._args)]

    @property
    def used_params(self) -> list[nn.Parameter]:
        """Parameters that get a gradient."""
        first = len(self._args)
        return [self._trained[k - first] for k in self._work.targets if k >= first]

    def run_forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Replay the forward on these arguments; returns results in memory of their own."""
        with torch.no_grad():
            self._copy_in(tensors, range(len(tensors)))
            self.generation += 1
            self._forward_recorded.replay()
            return fresh(self._work.out)

    def fits(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Whether the backward was recorded for gradients like these."""
        wanted = [g for g, out in zip(gradients, self._work.out_wanted, strict=True) if out]
        return self._backward_recorded is not None and all(
            given is not None
            and given.stride() == kept.stride()
            and given.dtype == kept.dtype
            and given.device == kept.device
            and type(given) is torch.Tensor
            for given, kept in zip(wanted, self._work.grad_out, strict=True)
        )

    def run_backward(
        self, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Replay the backward; returns gradients of arguments and `used_params`, in own memory."""
        assert self._backward_recorded is not None
        wanted = [g for g, out in zip(gradients, self._work.out_wanted, strict=True) if out]
        with torch.no_grad():
            if self.mode == RECOMPUTE:
                self._copy_in(tensors, range(len(tensors)))
            else:
                self._copy_in(tensors, sorted(self.saved.used_inputs))
            copy_all(self._work.grad_out, [given for given in wanted if given is not None])
            self._backward_recorded.replay()
            return self.in_order(fresh(self._work.grad_in))

    def in_order(self, found: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients of the targets as those of all arguments and of `used_params`."""
        count = len(self._args)
        ordered: list[torch.Tensor | None] = [None] * count
        for target, gradient in zip(self._work.targets, found, strict=True):
            if target < count:
                ordered[target] = gradient
            else:
                ordered.append(gradient)
        return ordered

    # -- making it ----------------------------------------------------------------------------

    def _make(
        self,
        scratch: Scratch,
        weights: Weights,
        tensors: Sequence[torch.Tensor],
        room: Callable[[int], None],
    ) -> None:
        recorder, work, gradients = self._recorder, self._work, self.observed.gradients
        with torch.no_grad():
            self._copy_in(tensors, range(len(tensors)))
        self._backward_recorded: Recorded | None = None
        inspector = Inspector([*self._args, *self.observed.outside.values()], weights)

        def rehearse() -> None:
            with inspector:
                work.forward()
                if gradients:
                    work.backward()

        recorder.warm_up(rehearse)
        if inspector.reason is not None:
            raise NotReplayable(inspector.reason)
        if inspector.outside:
            raise NotReplayable("it reads a tensor from outside that is another one in each call")
        room(self.saved.size_bytes)
        self.saved.allocate()
        work.allocate(scratch)
        inspector = Inspector([*self._args, *work.out, *work.grad_out, *work.grad_in], weights)

        def once_more() -> None:
            with inspector:
                work.forward()
            if gradients and self.mode != RECOMPUTE:
                _check_let_go(inspector)
            if gradients:
                work.backward()

        recorder.warm_up(once_more)
        self._forward_recorded = recorder.record(lambda: work.forward(final=True))
        if gradients:
            self._backward_recorded = recorder.record(work.backward)

    def _copy_in(self, tensors: Sequence[torch.Tensor], which: Sequence[int]) -> None:
        copy_all(
            [own_memory(self._args[k]) for k in which], [own_memory(tensors[k]) for k in which]
        )


def _check_let_go(inspector: Inspector) -> None:
    if inspector.alive():
        gc.collect()
        if inspector.alive():
            raise NotReplayable(
                "something in it keeps a tensor aside for backward, not by save_for_backward"
            )
