"""What is recorded of a block: its forward and backward over memory at fixed addresses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ts_core.engine.casts import casts_anew
from ts_core.engine.replay.memory import SavedMemory, Scratch, copy_all
from ts_core.engine.replay.signature import (
    NotReplayable,
    Spec,
    overlaps,
    own_memory,
    put_together,
    take_apart,
)
from ts_core.engine.replay.watch import StandIns, leaf_alias


class BlockWork:
    """A block's own computation between fixed arguments and fixed results.

    The first pass finds out what the results and gradients are; `allocate` then makes memory for
    them, and every later pass must give the same and writes there.

    Args:
        block: the block.
        trained: its parameters that ask for a gradient.
        run: the block's own forward.
        args: memory of the arguments.
        wanted: which arguments ask for a gradient.
        spec: of (args, kwargs).
        saved: keeps what autograd saves.
        gradients: whether there is a backward.
        recomputes: whether the backward computes the forward again, which saves nothing then.

    Attributes:
        out: results that are not arguments.
        out_spec: of the results.
        out_wanted: of `out`: whether they have a gradient.
        passed: which argument a result is, if it is one.
        grad_out: gradients of those of `out` that have one.
        grad_in: gradients of the targets.
        targets: arguments, then trained parameters, that get a gradient.
    """

    def __init__(
        self,
        block: nn.Module,
        trained: list[nn.Parameter],
        run: Callable[..., Any],
        args: Sequence[torch.Tensor],
        wanted: Sequence[bool],
        spec: Spec,
        saved: SavedMemory,
        gradients: bool,
        recomputes: bool,
    ) -> None:
        self.args = args
        self.out: list[torch.Tensor] = []
        self.out_spec: Spec = ()
        self.out_wanted: list[bool] = []
        self.passed: list[int | None] = []
        self.grad_out: list[torch.Tensor] = []
        self.grad_in: list[torch.Tensor] = []
        self.targets: list[int] = []
        self._device = args[0].device
        self._block = block
        self._trained = trained
        self._run = run
        self._wanted = wanted
        self._spec = spec
        self._saved = saved
        self._gradients = gradients
        self._recomputes = recomputes
        self._edges: list[Any] = []
        self._leaves: list[torch.Tensor] = []
        self._leaf_numbers: list[int] = []
        self._first = True

    def allocate(self, scratch: Scratch) -> None:
        """After the first pass: fixed memory for results and gradients."""
        out, self.out = self.out, []
        for k, tensor in enumerate(out):
            self.out.append(scratch.get(f"result {k}", tensor.shape, tensor.stride(), tensor.dtype))
        wanted = [tensor for tensor, asked in zip(out, self.out_wanted, strict=True) if asked]
        self.grad_out = [
            scratch.get(f"gradient of result {k}", t.shape, t.stride(), t.dtype)
            for k, t in enumerate(wanted)
        ]
        grads, self.grad_in = self.grad_in, []
        for k, tensor in enumerate(grads):
            stride = tensor.stride()
            if own_memory(tensor) is not tensor or overlaps(tensor.shape, stride):
                stride = torch.empty(tensor.shape, device="meta").stride()
            self.grad_in.append(scratch.get(f"gradient {k}", tensor.shape, stride, tensor.dtype))
        self._first = False

    def forward(self, final: bool = False) -> None:
        """Compute results into `out`; the `final` pass is recorded."""
        if not self._gradients or self._recomputes:
            with torch.no_grad(), casts_anew():
                result = self._call([tensor.detach() for tensor in self.args])
            self._note(result)
            return
        self._saved.begin(final)
        hooks = torch.autograd.graph.saved_tensors_hooks(self._saved.pack, self._saved.unpack)
        with self._ready_for_gradients() as leaves:
            with hooks:
                result = self._call(leaves)
            self._note(result)
        self._saved.end()

    def backward(self) -> None:
        """Compute gradients into `grad_in`, from those in `grad_out`; after a forward."""
        if self._recomputes:
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
                grads = self.grad_out
            found = torch.autograd.grad(edges, targets, grads, allow_unused=self._first)
        if self._first:
            self._choose_targets(found)
            return
        with torch.no_grad():
            copy_all(self.grad_in, found)

    def let_go(self) -> None:
        """Drop the graph of the last pass."""
        self._edges, self._leaves = [], []

    @contextlib.contextmanager
    def _ready_for_gradients(self) -> Iterator[list[torch.Tensor]]:
        """Leaves over the arguments, and others in place of the trained parameters."""
        args = [
            tensor.detach().requires_grad_(wanted)
            for tensor, wanted in zip(self.args, self._wanted, strict=True)
        ]
        with (
            torch.enable_grad(),
            casts_anew(),
            StandIns(self._block, self._trained, leaf_alias) as stand_ins,
        ):
            self._leaves = [tensor for tensor in args if tensor.requires_grad] + stand_ins
            yield args

    def _call(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, Sequence[torch.Tensor]]:
        args, kwargs = put_together(self._spec, iter(tensors))
        return self._run(*args, **kwargs), tensors

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
            self.out = [torch.empty_like(tensor.detach()) for tensor in own]
            if not self._gradients:
                self.out_wanted = [False] * len(own)
        elif results and (spec, passed) != (self.out_spec, self.passed):
            raise NotReplayable("it returns something else each time")
        if torch.is_grad_enabled():
            self.out_wanted = [tensor.requires_grad for tensor in own]
            edge = torch.autograd.graph.get_gradient_edge
            self._edges = [edge(tensor) for tensor in own if tensor.requires_grad]
        if not self._first and results:
            with torch.no_grad():
                copy_all(self.out, own)

    def _wanted_out(self) -> list[torch.Tensor]:
        return [t for t, asked in zip(self.out, self.out_wanted, strict=True) if asked]

    def _choose_targets(self, found: Sequence[torch.Tensor | None]) -> None:
        numbers = [k for k, wanted in enumerate(self._wanted) if wanted]
        numbers += [len(self.args) + k for k in range(len(self._trained))]
        used = [k for k, gradient in enumerate(found) if gradient is not None]
        self._leaf_numbers = used
        self.targets = [numbers[k] for k in used]
        self.grad_in = [torch.empty_like(g) for g in found if g is not None]


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
