"""StreamedModel: a list of blocks of any kind, few of which are on the device at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ts_core.device import Device, resolve_device
from ts_core.engine.streamed_autograd import BlockPass, Machinery
from ts_core.engine.streamed_batch import join, move, split
from ts_core.engine.streamed_grads import GradientLanding
from ts_core.engine.streamed_slots import BlockSlots, Residency
from ts_core.engine.streamed_state import BlockState, check_blocks
from ts_core.engine.turns import Turns, in_backward
from ts_core.errors import DataError, OptionError, OutOfBudgetError, StateError
from ts_core.memory.arena import default_arena
from ts_core.transfer import CopyEngine

# The rings bound what is in flight; a lower bound would make the host wait.
_NO_INFLIGHT_LIMIT = 1 << 62


class StreamedModel(nn.Module):
    """Runs blocks in order while at most `prefetch_ahead + 1` of them are on the device.

    A block is any module called as `block(hidden, *args, **kwargs)`; it returns the next hidden
    state, or a tuple whose first item that is. All of its parameters and buffers live in one
    (page-locked) host buffer and cross the link in one copy. Parameters stay ordinary CPU
    parameters: any optimizer may hold them, and after `backward()` their `.grad` is on the CPU.

    In training only the input of each block is kept. Backward brings blocks back in reverse order,
    runs each again with the same random numbers and autocast, and copies its gradients to the host
    while earlier blocks compute. Results are those of the same blocks run on the device, bit for
    bit. Between forward and backward, and in forward, nothing may write to the weights.

    With `microbatches=k` the batch (dimension 0 of the hidden state, and of every tensor argument
    of that size) is cut in k pieces that all cross a block before the next block is fetched, so
    the weights cross the link once for all of them. The pieces' results are joined again; the
    gradients are those of k backward passes.

    Args:
        blocks: the modules, on the CPU or elsewhere; their state moves to host memory.
        device: "cuda", "cuda:N", "cpu"/"host", a torch.device, or None for what there is.
        prefetch_ahead: blocks loaded ahead of the one that computes; 0 loads each on demand.
        dtype: floating point state is converted to it; None leaves it.
        buffer_budget_bytes: the most device memory for weights. Fewer blocks than
            `prefetch_ahead + 1` are resident when it holds only those.
        residency_observer: called with each `Residency` change.
        microbatches: pieces of a batch.

    Raises:
        OptionError: a value that is not accepted.
        DataError: a block whose state cannot stream.
        OutOfBudgetError: a block larger than the budget, or memory that cannot be had.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        device: str | torch.device | Device | None = None,
        prefetch_ahead: int = 1,
        dtype: torch.dtype | None = None,
        buffer_budget_bytes: int | None = None,
        residency_observer: Callable[[Residency], None] | None = None,
        microbatches: int = 1,
    ) -> None:
        super().__init__()
        _check_count("prefetch_ahead", prefetch_ahead, 0)
        _check_count("microbatches", microbatches, 1)
        if buffer_budget_bytes is not None:
            _check_count("buffer_budget_bytes", buffer_budget_bytes, 1)
        if dtype is not None and not dtype.is_floating_point:
            raise OptionError(f"dtype={dtype}: expected a floating point dtype or None.")
        blocks = list(blocks)
        check_blocks(blocks)
        self.blocks = nn.ModuleList(blocks)
        self.prefetch_ahead = prefetch_ahead
        self.microbatches = microbatches
        self.buffer_budget_bytes = buffer_budget_bytes
        self._observer = residency_observer
        self._forwards = 0
        self._machinery: Machinery | None = None
        self._open(_device(device), dtype)

    @property
    def device(self) -> torch.device:
        """Where the blocks compute, and where the output is."""
        return self._running().device.torch_device

    @property
    def resident(self) -> tuple[int, ...]:
        """Indices of the blocks that are on the device, or on their way there."""
        return self._running().slots.resident

    @property
    def residency_history(self) -> deque[Residency]:
        """The last 4,096 changes of what is on the device, oldest first."""
        return self._running().slots.history

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run every block.

        Args:
            hidden: input of the first block, any device; dimension 0 is the batch.
            *args: passed to every block, tensors moved to the device.
            **kwargs: passed to every block likewise.

        Returns:
            The whole result of the last block, on the device. With autograd history in training
            mode (`.train()`) under enabled gradients; without in `.eval()`.

        Raises:
            DataError: the input is no tensor, or a block returned none.
            StateError: the model is closed, or state was replaced or written to by a block.
        """
        machinery = self._running()
        if not isinstance(hidden, torch.Tensor):
            raise DataError(
                f"the input is a {type(hidden).__name__}. The first argument must be the hidden "
                f"state, a tensor; pass everything else as further arguments."
            )
        track = self.training and torch.is_grad_enabled()
        with machinery.turns.alone():
            return self._run(machinery, hidden, args, kwargs, track)

    def _run(
        self, machinery: Machinery, hidden: torch.Tensor, args: Any, kwargs: Any, track: bool
    ) -> Any:
        if not in_backward():
            machinery.landing.discard()
        machinery.slots.begin_pass()
        for state in machinery.states:
            state.take_writes()
        if track:
            machinery.landing.prepare(machinery.states)
        with torch.set_grad_enabled(track):
            hidden, args, kwargs = move((hidden, args, kwargs), machinery.device.torch_device)
            pieces = split(hidden, args, kwargs, self.microbatches)
            last = len(machinery.states) - 1
            results: list[Any] = [piece[0] for piece in pieces]
            for index in range(last + 1):
                arguments = [
                    ((value, *rest), named)
                    for value, (_, rest, named) in zip(results, pieces, strict=True)
                ]
                results = BlockPass(machinery, index, arguments, index == last).run(track)
            self._forwards += 1
            return join(results, [piece[0] for piece in pieces])

    def stats(self) -> dict[str, Any]:
        """Counters since the start or `reset_stats()`, and sizes in bytes."""
        machinery = self._running()
        slots = machinery.slots
        return {
            "forwards": self._forwards,
            "recomputes": machinery.recomputes,
            "loads": slots.loads,
            "load_bytes": slots.load_bytes,
            "demand_loads": slots.demand_loads,
            "gradient_bytes": machinery.landing.copied_bytes,
            "peak_resident": slots.peak_resident,
            "resident": slots.resident,
            "slots": len(slots.ring.slots),
            "slot_bytes": slots.ring.slot_bytes,
            "host_bytes": sum(state.size_bytes for state in machinery.states),
        }

    def reset_stats(self) -> None:
        """Start the counters and the history again."""
        machinery = self._running()
        slots = machinery.slots
        self._forwards = machinery.recomputes = machinery.landing.copied_bytes = 0
        slots.loads = slots.load_bytes = slots.demand_loads = 0
        slots.peak_resident = len(slots.resident)
        slots.history.clear()

    def close(self) -> None:
        """Wait for every copy and free the device memory; the blocks keep their CPU state.

        A second call does nothing. Backward passes not finished before raise.
        """
        machinery, self._machinery = self._machinery, None
        if machinery is not None:
            machinery.slots.close()
            machinery.landing.close()

    def __enter__(self) -> StreamedModel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def to(self, *args: Any, **kwargs: Any) -> StreamedModel:
        """Change the dtype of the state, the device that computes, or both.

        Accepts what `torch.nn.Module.to` does. Parameters stay on the CPU and stay the same
        objects; gradients there are converted with them.
        """
        device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is not None and not dtype.is_floating_point:
            raise OptionError(f"dtype={dtype}: expected a floating point dtype.")
        running = self._running()
        target = running.device if device is None else _device(device)
        self.close()
        self._open(target, dtype)
        return self

    def cpu(self) -> StreamedModel:
        """Compute on the host device."""
        return self.to("cpu")

    def cuda(self, device: int | torch.device | None = None) -> StreamedModel:
        """Compute on a GPU."""
        return self.to(
            torch.device("cuda", device) if isinstance(device, int) else device or "cuda"
        )

    def float(self) -> StreamedModel:
        """Convert the state to fp32."""
        return self.to(torch.float32)

    def double(self) -> StreamedModel:
        """Convert the state to fp64."""
        return self.to(torch.float64)

    def half(self) -> StreamedModel:
        """Convert the state to fp16."""
        return self.to(torch.float16)

    def bfloat16(self) -> StreamedModel:
        """Convert the state to bf16."""
        return self.to(torch.bfloat16)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        raise StateError(
            "the state of a StreamedModel lies in one host buffer per block and cannot be moved "
            "tensor by tensor. Use its own .to(); if it is part of a larger module, move the other "
            "parts one by one."
        )

    def __deepcopy__(self, memo: Any) -> Any:
        raise StateError(_NO_COPY)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise StateError(_NO_COPY)

    def _running(self) -> Machinery:
        if self._machinery is None:
            raise StateError("this StreamedModel is closed. Make a new one from its blocks.")
        return self._machinery

    def _open(self, device: Device, dtype: torch.dtype | None) -> None:
        arena = default_arena()
        states = [
            BlockState(index, block, dtype, arena, device.separate_memory)
            for index, block in enumerate(self.blocks)
        ]
        largest = max(states, key=lambda state: state.size_bytes)
        count = min(self.prefetch_ahead + 1, len(states))
        budget = self.buffer_budget_bytes
        if budget is not None and largest.size_bytes:
            if largest.size_bytes > budget:
                raise OutOfBudgetError(
                    f"block {largest.index} has {largest.size_bytes} bytes and "
                    f"buffer_budget_bytes is {budget}: short by {largest.size_bytes - budget}. "
                    f"Raise the budget, or split the block in two."
                )
            count = min(count, budget // largest.size_bytes)
        copies = CopyEngine(device, _NO_INFLIGHT_LIMIT)
        slots = BlockSlots(states, copies, count, self._observer)
        landing = GradientLanding(copies, arena)
        self._machinery = Machinery(device, states, slots, landing, Turns(device))


_NO_COPY = (
    "a StreamedModel cannot be copied or pickled, since it owns device memory and threads. Copy "
    "its blocks, or save its state_dict()."
)


def _device(device: str | torch.device | Device | None) -> Device:
    return device if isinstance(device, Device) else resolve_device(device)


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"{name}={value!r}: expected an int >= {least}.")
