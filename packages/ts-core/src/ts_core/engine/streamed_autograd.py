"""One pass of some microbatches through one block, as a node of the autograd graph.

Forward keeps only the block's inputs. Backward brings the block back, runs it again with the same
random numbers and the same autocast, and differentiates that.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ts_core.device import Device
from ts_core.engine.streamed_grads import GradientLanding
from ts_core.engine.streamed_slots import BlockSlots
from ts_core.engine.streamed_state import BlockState
from ts_core.engine.turns import Turns, graph_task
from ts_core.errors import DataError, StateError


@dataclass(frozen=True)
class Hole:
    """The place of tensor number `position` in a structure."""

    position: int


def take_tensors(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with its tensors moved to `tensors` and holes in their places.

    Tuples, named tuples, lists and dicts are opened; any other object is kept as it is.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return Hole(len(tensors) - 1)
    return _rebuild(value, lambda item: take_tensors(item, tensors))


def fill_tensors(structure: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The inverse of `take_tensors`."""
    if isinstance(structure, Hole):
        return tensors[structure.position]
    return _rebuild(structure, lambda item: fill_tensors(item, tensors))


def _rebuild(value: Any, change: Any) -> Any:
    if isinstance(value, tuple):
        items = [change(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [change(item) for item in value]
    if isinstance(value, dict):
        new = copy.copy(value)
        for key, item in value.items():
            new[key] = change(item)
        return new
    return value


class Replay:
    """The random state and the autocast of the moment it is made, to compute again under them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        kinds = dict.fromkeys((device.type, "cpu"))
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
        ]
        self._cache = torch.is_autocast_cache_enabled()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Compute under that state; the present one is untouched."""
        devices = [self._device] if self._cuda is not None else []
        with ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(devices, device_type="cuda"))
            torch.set_rng_state(self._cpu)
            if self._cuda is not None:
                torch.cuda.set_rng_state(self._cuda, self._device)
            for kind, enabled, dtype in self._autocast:
                stack.enter_context(
                    torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=self._cache)
                )
            yield


@contextmanager
def own_autocast_cache() -> Iterator[None]:
    """Autocast's cache of low-precision weights lives for one call of a block.

    Within the call it makes a weight that is used twice add its gradients as it does resident; kept
    longer it would hold a copy of every block's weights, without their gradient history.
    """
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


@dataclass
class Machinery:
    """What a block needs to run."""

    device: Device
    states: Sequence[BlockState]
    slots: BlockSlots
    landing: GradientLanding
    turns: Turns
    recomputes: int = 0


class BlockPass:
    """Some microbatches through one block.

    Args:
        machinery: of the model.
        index: of the block.
        arguments: positional and keyword arguments of each microbatch.
        last: keep the block's whole result, instead of the next hidden state only.
    """

    def __init__(
        self,
        machinery: Machinery,
        index: int,
        arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
        last: bool,
    ) -> None:
        self._machinery = machinery
        self._index = index
        self._state = machinery.states[index]
        self._last = last
        self._inputs: list[Any] = []
        self._spans: list[slice] = []
        self.tensors: list[torch.Tensor] = []
        for args_kwargs in arguments:
            mine: list[torch.Tensor] = []
            self._inputs.append(take_tensors(args_kwargs, mine))
            self._spans.append(slice(len(self.tensors), len(self.tensors) + len(mine)))
            self.tensors.extend(mine)
        self._outputs: list[Any] = []
        self._output_spans: list[slice] = []
        self._replays: list[Replay] = []
        self._versions: list[int] = []

    def run(self, track: bool) -> list[Any]:
        """The result of each microbatch, part of the autograd graph if `track`."""
        tensors = self.tensors
        if track and (any(t.requires_grad for t in tensors) or self._state.trained()):
            anchor = torch.empty(0, requires_grad=True)
            apply: Any = _BlockFunction.apply
            outputs = apply(self, anchor, *tensors)
        else:
            with torch.no_grad():
                outputs = self.forward(tensors, keep=False)
        return [
            fill_tensors(structure, outputs[span])
            for structure, span in zip(self._outputs, self._output_spans, strict=True)
        ]

    def forward(self, tensors: Sequence[torch.Tensor], *, keep: bool) -> tuple[torch.Tensor, ...]:
        """Run the block once per microbatch; `keep` what backward needs to run it again."""
        machinery, index = self._machinery, self._index
        outputs: list[torch.Tensor] = []
        machinery.slots.enter(index, 1)
        try:
            self._versions = self._state.versions()
            inputs_before = [_version(tensor) for tensor in tensors]
            for structure, span in zip(self._inputs, self._spans, strict=True):
                if keep:
                    self._replays.append(Replay(machinery.device.torch_device))
                result = self._call(structure, tensors[span])
                mine: list[torch.Tensor] = []
                self._outputs.append(take_tensors(result, mine))
                self._output_spans.append(slice(len(outputs), len(outputs) + len(mine)))
                outputs.extend(mine)
            self._check_writes(tensors, inputs_before)
            return tuple(self._own(outputs))
        finally:
            machinery.slots.leave(index)

    def backward(
        self,
        tensors: Sequence[torch.Tensor],
        needed: Sequence[bool],
        gradients: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        """Gradients of the inputs; those of the parameters go to the host."""
        machinery, index, landing = self._machinery, self._index, self._machinery.landing
        found: list[torch.Tensor | None] = [None] * len(tensors)
        task = graph_task()
        machinery.slots.enter(index, -1)
        try:
            if self._state.versions() != self._versions:
                raise StateError(
                    f"weights of block {index} were changed in place between its forward and its "
                    f"backward (an optimizer step, or load_state_dict). Run backward first."
                )
            landing.open()
            places = landing.places(index)
            parameters = [place.parameter for place in places]
            # Last microbatch first, as autograd itself would reach them.
            for k in reversed(range(len(self._inputs))):
                span = self._spans[k]
                inputs = [
                    tensor.detach().requires_grad_(need)
                    for tensor, need in zip(tensors[span], needed[span], strict=True)
                ]
                with torch.enable_grad(), self._replays[k].again():
                    machinery.recomputes += 1
                    result: list[torch.Tensor] = []
                    take_tensors(self._call(self._inputs[k], inputs), result)
                pairs = [
                    (output, gradient)
                    for output, gradient in zip(
                        result, gradients[self._output_spans[k]], strict=True
                    )
                    if gradient is not None and output.requires_grad
                ]
                wanted = [tensor for tensor in inputs if tensor.requires_grad]
                if not pairs or not (wanted or parameters):
                    continue
                values = torch.autograd.grad(
                    [output for output, _ in pairs],
                    [*wanted, *parameters],
                    [gradient for _, gradient in pairs],
                    allow_unused=True,
                )
                landing.add(index, values[len(wanted) :])
                these = iter(values[: len(wanted)])
                for position, tensor in zip(range(span.start, span.stop), inputs, strict=True):
                    if tensor.requires_grad:
                        found[position] = next(these)
                del result, pairs, values
            landing.send(index, task)
        except BaseException:
            landing.discard()
            raise
        finally:
            machinery.slots.leave(index)
        landing.collect(task)
        return found

    def begin_backward(self, task: int) -> None:
        """In backward `task`, before the gradients of the block."""
        landing = self._machinery.landing
        self._machinery.turns.backward(lambda: landing.finish(task))

    def _call(self, structure: Any, tensors: Sequence[torch.Tensor]) -> Any:
        args, kwargs = fill_tensors(structure, tensors)
        with own_autocast_cache():
            result = self._state.block(*args, **kwargs)
        if self._last:
            return result
        hidden = result[0] if isinstance(result, tuple) and result else result
        if not isinstance(hidden, torch.Tensor):
            raise DataError(
                f"block {self._index} returned {type(result).__name__}. A block must return a "
                f"tensor, or a tuple whose first item is one: the next block's input."
            )
        return hidden

    def _check_writes(self, tensors: Sequence[torch.Tensor], before: Sequence[int | None]) -> None:
        try:
            self._state.check_unchanged(self._versions)
        except StateError:
            self._machinery.slots.leave(self._index)
            self._machinery.slots.drop(self._index)
            raise
        for tensor, version in zip(tensors, before, strict=True):
            if _version(tensor) != version:
                raise StateError(
                    f"block {self._index} changed an input of shape {tuple(tensor.shape)} in "
                    f"place. Its backward needs that input as it was: use the out-of-place "
                    f"operation (inplace=False, x = x + y) or clone the input first."
                )

    def _own(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs that view the block's weights, or repeat another output, become copies."""
        ring = self._machinery.slots.ring
        seen: set[int] = set()
        owned = []
        for output in outputs:
            plain = type(output) in (torch.Tensor, torch.nn.Parameter)
            if id(output) in seen or (plain and ring.slot_of(output) is not None):
                output = output.clone()
            seen.add(id(output))
            owned.append(output)
        return owned


class _BlockFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block_pass: BlockPass, anchor: torch.Tensor, *tensors: Any) -> Any:
        outputs = block_pass.forward(tensors, keep=True)
        ctx.block_pass = block_pass
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(
            *(t for t in outputs if not (t.is_floating_point() or t.is_complex()))
        )
        block_pass.tensors = []
        return outputs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        block_pass: BlockPass = ctx.block_pass
        block_pass.begin_backward(graph_task())
        found = block_pass.backward(ctx.saved_tensors, ctx.needs_input_grad[2:], gradients)
        return (None, None, *found)


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version
