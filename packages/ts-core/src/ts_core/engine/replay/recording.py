"""One block recorded for one signature: forward and backward, and the memory they work on.

A replay copies the arguments in, runs, and copies the results out, so nothing that is handed out is
ever overwritten by a later replay.

- *keep*: the forward saves what backward needs in memory of this recording.
- *recompute*: the forward saves nothing; the backward computes it again first.
- without gradients there is a forward only.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ts_core.engine.replay.inspector import Inspector
from ts_core.engine.replay.memory import SavedMemory, Scratch
from ts_core.engine.replay.recorder import Recorded, Recorder
from ts_core.engine.replay.signature import (
    NotReplayable,
    Spec,
    overlaps,
    own_memory,
    put_together,
    take_apart,
)
from ts_core.engine.replay.watch import StandIns, Weights, leaf_alias
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
    """Makes the recordings; `forward` and `backward` run them.

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
        device = tensors[0].device
        self.observed = observed
        self.mode = mode
        self.addresses = weights.addresses()
        self.generation = 0
        self.live: weakref.ref[Any] | None = None
        self._recorder = recorder
        self._device = device
        self._block = block
        self._forward = forward
        self._gradients = observed.gradients
        self._wanted = [tensor.requires_grad for tensor in tensors]
        self._args = [
            scratch.get(f"argument {k}", t.shape, t.stride(), t.dtype)
            for k, t in enumerate(tensors)
        ]
        self._trained = [param for param in weights.params if param.requires_grad]
        self.saved = SavedMemory(
            weights, self._args, list(observed.outside.values()), guard, device, observed.random
        )
        self.out_spec: Spec = ()
        self.passed: list[int | None] = []  # which argument a result is, if it is one
        self._out: list[torch.Tensor] = []
        self._out_wanted: list[bool] = []
        self._targets: list[int] = []  # of arguments, then trained parameters
        self._grad_out: list[torch.Tensor] = []
        self._grad_in: list[torch.Tensor] = []
        self._edges: list[Any] = []
        self._leaves: list[torch.Tensor] = []
        self._first = True
        state = recorder.generator.get_state()
        try:
            self._make(scratch, weights, tensors, room)
        finally:
            self._edges, self._leaves = [], []
            recorder.generator.set_state(state)

    # -- used by calls ------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """Bytes that this recording holds alone."""
        return self.saved.size_bytes

    @property
    def differentiable(self) -> list[bool]:
        """Of the results that are not arguments: whether they have a gradient."""
        return list(self._out_wanted)

    @property
    def used_args(self) -> list[int]:
        """Arguments that get a gradient."""
        return [k for k in self._targets if k < len(self._args)]

    @property
    def used_params(self) -> list[nn.Parameter]:
        """Parameters that get a gradient."""
        first = len(self._args)
        return [self._trained[k - first] for k in self._targets if k >= first]

    def run_forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Replay the forward on these arguments; returns results in memory of their own."""
        with torch.no_grad():
            self._copy_in(tensors, range(len(tensors)))
            self.generation += 1
            self._forward_recorded.replay()
            return _fresh(self._out)

    def fits(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Whether the backward was recorded for gradients like these."""
        wanted = [g for g, out in zip(gradients, self._out_wanted, strict=True) if out]
        return self._backward_recorded is not None and all(
            given is not None
            and given.stride() == kept.stride()
            and given.dtype == kept.dtype
            and given.device == kept.device
            and type(given) is torch.Tensor
            for given, kept in zip(wanted, self._grad_out, strict=True)
        )

    def run_backward(
        self, tensors: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Replay the backward; returns gradients of arguments and `used_params`, in own memory."""
        assert self._backward_recorded is not None
        wanted = [g for g, out in zip(gradients, self._out_wanted, strict=True) if out]
        with torch.no_grad():
            if self.mode == RECOMPUTE:
                self._copy_in(tensors, range(len(tensors)))
            else:
                self._copy_in(tensors, sorted(self.saved.used_inputs))
            copy_all(self._grad_out, [given for given in wanted if given is not None])
            self._backward_recorded.replay()
            return self.in_order(_fresh(self._grad_in))

    def in_order(self, found: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients of the targets as those of all arguments and of `used_params`."""
        count = len(self._args)
        ordered: list[torch.Tensor | None] = [None] * count
        for target, gradient in zip(self._targets, found, strict=True):
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
        recorder = self._recorder
        with torch.no_grad():
            self._copy_in(tensors, range(len(tensors)))
        self._backward_recorded: Recorded | None = None
        inspector = Inspector([*self._args, *self.observed.outside.values()], weights)

        def rehearse() -> None:
            with inspector:
                self._work_forward()
                if self._gradients:
                    self._work_backward()

        recorder.warm_up(rehearse)
        if inspector.reason is not None:
            raise NotReplayable(inspector.reason)
        if inspector.outside:
            raise NotReplayable("it reads a tensor from outside that is another one in each call")
        room(self.saved.size_bytes)
        self.saved.allocate()
        self._allocate(scratch)
        self._first = False
        inspector = Inspector([*self._args, *self._out, *self._grad_out, *self._grad_in], weights)

        def once_more() -> None:
            with inspector:
                self._work_forward()
            if self._gradients and self.mode != RECOMPUTE:
                _check_let_go(inspector)
            if self._gradients:
                self._work_backward()

        recorder.warm_up(once_more)
        self._forward_recorded = recorder.record(lambda: self._work_forward(final=True))
        if self._gradients:
            self._backward_recorded = recorder.record(self._work_backward)

    def _allocate(self, scratch: Scratch) -> None:
        out, self._out = self._out, []
        for k, tensor in enumerate(out):
            self._out.append(
                scratch.get(f"result {k}", tensor.shape, tensor.stride(), tensor.dtype)
            )
        wanted = [tensor for tensor, asked in zip(out, self._out_wanted, strict=True) if asked]
        self._grad_out = [
            scratch.get(f"gradient of result {k}", t.shape, t.stride(), t.dtype)
            for k, t in enumerate(wanted)
        ]
        grads, self._grad_in = self._grad_in, []
        for k, tensor in enumerate(grads):
            stride = tensor.stride()
            if own_memory(tensor) is not tensor or overlaps(tensor.shape, stride):
                stride = torch.empty(tensor.shape, device="meta").stride()
            self._grad_in.append(scratch.get(f"gradient {k}", tensor.shape, stride, tensor.dtype))

    def _copy_in(self, tensors: Sequence[torch.Tensor], which: Sequence[int]) -> None:
        copy_all(
            [own_memory(self._args[k]) for k in which], [own_memory(tensors[k]) for k in which]
        )

    def _work_forward(self, final: bool = False) -> None:
        if not self._gradients or self.mode == RECOMPUTE:
            with torch.no_grad(), _casts_anew(self._device):
                result = self._call([tensor.detach() for tensor in self._args])
            self._note(result)
            return
        self.saved.begin(final)
        hooks = torch.autograd.graph.saved_tensors_hooks(self.saved.pack, self.saved.unpack)
        with self._ready_for_gradients() as leaves:
            with hooks:
                result = self._call(leaves)
            self._note(result)
        self.saved.end()

    def _work_backward(self) -> None:
        if self.mode == RECOMPUTE:
            with self._ready_for_gradients() as leaves:
                self._note(self._call(leaves), results=False)
        edges, self._edges = self._edges, []
        leaves, self._leaves = self._leaves, []
        device = self._device.type
        with torch.autocast(device, enabled=False):
            if self._first:
                targets = leaves
                grads: Sequence[torch.Tensor] = [torch.zeros_like(t) for t in self._wanted_out()]
            else:
                targets = [leaves[k] for k in self._leaf_numbers]
                grads = self._grad_out
            found = torch.autograd.grad(edges, targets, grads, allow_unused=self._first)
        if self._first:
            self._choose_targets(found)
            return
        with torch.no_grad():
            copy_all(self._grad_in, found)

    @contextlib.contextmanager
    def _ready_for_gradients(self) -> Iterator[list[torch.Tensor]]:
        """Leaves over the arguments, and others in place of the trained parameters."""
        args = [
            tensor.detach().requires_grad_(wanted)
            for tensor, wanted in zip(self._args, self._wanted, strict=True)
        ]
        with (
            torch.enable_grad(),
            _casts_anew(self._device),
            StandIns(self._block, self._trained, leaf_alias) as stand_ins,
        ):
            self._leaves = [tensor for tensor in args if tensor.requires_grad] + stand_ins
            yield args

    def _call(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, Sequence[torch.Tensor]]:
        args, kwargs = put_together(self.observed.spec, iter(tensors))
        return self._forward(*args, **kwargs), tensors

    def _note(self, called: tuple[Any, Sequence[torch.Tensor]], results: bool = True) -> None:
        """Copy results to their place, and keep where their backward begins."""
        result, args = called
        tensors: list[torch.Tensor] = []
        spec = take_apart(result, tensors)
        passed = [_position(tensor, args) for tensor in tensors]
        own = [tensor for tensor, where in zip(tensors, passed, strict=True) if where is None]
        if self._first and results:
            self.out_spec, self.passed = spec, passed
            _check_results(own, [*args, *self._trained])
            self._out = [torch.empty_like(tensor.detach()) for tensor in own]
            if not self._gradients:
                self._out_wanted = [False] * len(own)
        elif results and (spec, passed) != (self.out_spec, self.passed):
            raise NotReplayable("it returns something else each time")
        if torch.is_grad_enabled():
            self._out_wanted = [tensor.requires_grad for tensor in own]
            edge = torch.autograd.graph.get_gradient_edge
            self._edges = [edge(tensor) for tensor in own if tensor.requires_grad]
        if not self._first and results:
            with torch.no_grad():
                copy_all(self._out, own)

    def _wanted_out(self) -> list[torch.Tensor]:
        return [t for t, asked in zip(self._out, self._out_wanted, strict=True) if asked]

    def _choose_targets(self, found: Sequence[torch.Tensor | None]) -> None:
        numbers = [k for k, wanted in enumerate(self._wanted) if wanted]
        numbers += [len(self._args) + k for k in range(len(self._trained))]
        used = [k for k, gradient in enumerate(found) if gradient is not None]
        self._leaf_numbers = used
        self._targets = [numbers[k] for k in used]
        self._grad_in = [torch.empty_like(g) for g in found if g is not None]


def _position(tensor: torch.Tensor, args: Sequence[torch.Tensor]) -> int | None:
    for k, arg in enumerate(args):
        if tensor is arg:
            return k
    return None


def _check_results(own: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    storages = {tensor.untyped_storage()._cdata for tensor in others}
    for tensor in own:
        key = tensor.untyped_storage()._cdata
        if key in storages:
            raise NotReplayable("results share memory with each other, an argument or a weight")
        storages.add(key)
        if torch.empty_like(tensor).stride() != tensor.stride():
            raise NotReplayable("a result is not dense in memory")


def _check_let_go(inspector: Inspector) -> None:
    if inspector.alive():
        gc.collect()
        if inspector.alive():
            raise NotReplayable(
                "something in it keeps a tensor aside for backward, not by save_for_backward"
            )


@contextlib.contextmanager
def _casts_anew(device: torch.device) -> Iterator[None]:
    """Autocast's copies of weights are made inside, and do not stay for others."""
    if not (torch.is_autocast_enabled(device.type) and torch.is_autocast_cache_enabled()):
        yield
        return
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def _fresh(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies in memory of their own, with the same strides."""
    found = [
        torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        for tensor in tensors
    ]
    copy_all(found, tensors)
    return found


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its target; one launch for all of a dtype."""
    if len(targets) == 1:
        targets[0].copy_(sources[0])
        return
    groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[torch.Tensor], list[torch.Tensor]]]
    groups = {}
    for target, source in zip(targets, sources, strict=True):
        into, of = groups.setdefault((target.dtype, source.dtype), ([], []))
        into.append(target)
        of.append(source)
    for into, of in groups.values():
        torch._foreach_copy_(into, of)
