"""Flat groups of parameters that are transferred and updated as one piece.

A bucket holds parameters of one param group, dtype and device: either one large parameter, or
many small ones whose device memory is moved into one flat buffer (their values and shapes stay).
Its host side is flat as well, so a bucket costs one copy each way and one pass of the update
however many tensors are in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ts_core import _native
from ts_core.device.base import Device, Event
from ts_core.errors import StateError
from ts_core.memory.arena import PinnedArena
from ts_core.transfer import CopyEngine

SMALL_BYTES = 1 << 20
BUCKET_BYTES = 16 << 20
_PAD = 16
_DTYPE_NAMES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of one update, as torch.optim.AdamW names them."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def partition(params: Sequence[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Split a param group into buckets: large parameters alone, small ones together in order."""
    buckets: list[list[torch.nn.Parameter]] = []
    open_buckets: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    sizes: dict[int, int] = {}
    for param in params:
        size_bytes = param.numel() * param.element_size()
        key = (param.dtype, param.device)
        if size_bytes > SMALL_BYTES:
            buckets.append([param])
            continue
        bucket = open_buckets.get(key)
        if bucket is None or sizes[id(bucket)] + size_bytes > BUCKET_BYTES:
            bucket = []
            open_buckets[key] = bucket
            buckets.append(bucket)
            sizes[id(bucket)] = 0
        bucket.append(param)
        sizes[id(bucket)] += size_bytes
    return buckets


class Bucket:
    """Parameters, gradients and AdamW state of one flat piece.

    Args:
        params: of one dtype (fp32, bf16 or fp16) and device.
        group_index: their param group.
        device: where the parameters are.
        copies: engine of the link to that device.
        arena: where host buffers that cross the link come from.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        group_index: int,
        device: Device,
        copies: CopyEngine,
        arena: PinnedArena,
    ) -> None:
        self.params = list(params)
        self.group_index = group_index
        self.dtype = params[0].dtype
        self.steps = [0] * len(params)
        self.counts = [0] * len(params)
        self.closed = False
        self.sum_of_squares = 0.0
        self.nonfinite = 0
        self.written: Event | None = None
        self.used: Hyper | None = None
        self._device = device
        self._copies = copies
        self._arena = arena
        self._offsets: list[int] = []
        offset = 0
        for param in params:
            self._offsets.append(offset)
            offset += -(-param.numel() // _PAD) * _PAD if len(params) > 1 else param.numel()
        self.numel = offset
        self._pending: dict[int, torch.Tensor] = {}
        self._arrived: Event | None = None
        self._gradient: torch.Tensor | None = None
        self._extra: list[tuple[Event, torch.Tensor]] = []
        self._allocate()

    # -- memory ----------------------------------------------------------------------------

    def _allocate(self) -> None:
        low_precision = self.dtype is not torch.float32
        separate = self._device.separate_memory
        self._flat = self._rehome() if self._must_rehome() else None
        self.exp_avg = torch.zeros(self.numel, dtype=torch.float32)
        self.exp_avg_sq = torch.zeros(self.numel, dtype=torch.float32)
        self.master = torch.zeros(self.numel, dtype=torch.float32) if low_precision else None
        self._param_h = (
            self._arena.empty((self.numel,), self.dtype, tag="parameters") if separate else None
        )
        many = len(self.params) > 1
        self._grad_h = (
            self._arena.empty((self.numel,), self.dtype, tag="gradients")
            if separate or many
            else None
        )
        if self._grad_h is not None:
            self._grad_h.zero_()
        self._grad_d = (
            torch.zeros(self.numel, dtype=self.dtype, device=self._device.torch_device)
            if separate and many
            else None
        )
        stage = self._grad_d if self._grad_d is not None else self._grad_h
        self._grad_views = self._split(stage) if many and stage is not None else []
        self._seen = [(-1, -1)] * len(self.params)
        if self._flat is not None:
            for copy in (self.master, self._param_h):
                if copy is not None:
                    copy.copy_(self._flat)
            self._seen = [(param._version, param.data_ptr()) for param in self.params]

    def _must_rehome(self) -> bool:
        return len(self.params) > 1 or not self.params[0].is_contiguous()

    def _rehome(self) -> torch.Tensor:
        flat = torch.zeros(self.numel, dtype=self.dtype, device=self._device.torch_device)
        for param, view in zip(self.params, self._split(flat), strict=True):
            view.copy_(param.data)
            param.data = view
        return flat

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [
            flat[offset : offset + param.numel()].view(param.shape)
            for offset, param in zip(self._offsets, self.params, strict=True)
        ]

    def state_views(self) -> Iterator[tuple[int, torch.nn.Parameter, dict[str, torch.Tensor]]]:
        """For each parameter: its position, itself, and views of its state in host memory."""
        views = {"exp_avg": self._split(self.exp_avg), "exp_avg_sq": self._split(self.exp_avg_sq)}
        if self.master is not None:
            views["master"] = self._split(self.master)
        for position, param in enumerate(self.params):
            yield position, param, {name: tensors[position] for name, tensors in views.items()}

    def host_bytes(self) -> int:
        """Bytes of host memory that the bucket holds."""
        tensors = (self.exp_avg, self.exp_avg_sq, self.master, self._param_h, self._grad_h)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    # -- gradients -------------------------------------------------------------------------

    def collect(self, position: int, grad: torch.Tensor, expected: int) -> None:
        """Take one parameter's gradient of one backward.

        Args:
            position: of the parameter in the bucket.
            grad: its gradient; owned by the bucket from now on.
            expected: backward passes per step.

        Raises:
            StateError: more passes than expected.
        """
        if self.closed:
            raise StateError(
                f"a parameter of shape {tuple(grad.shape)} received a gradient after the step's "
                f"last one: its {self.counts[position]} backward passes were complete. Set "
                f"accumulation_steps before the first backward of a step, and call step() in time."
            )
        if self.counts[position] >= expected:
            raise StateError(
                f"a parameter of shape {tuple(grad.shape)} received gradient number "
                f"{self.counts[position] + 1} before step(), but accumulation_steps={expected}. "
                f"Pass accumulation_steps=<backward passes per step>, call step() in time, or "
                f"zero_grad() to drop an unfinished step."
            )
        if position in self._pending:
            self._absorb()
        self.counts[position] += 1
        grad = grad.detach()
        if grad.dtype is not self.dtype:
            grad = grad.to(self.dtype)
        self._pending[position] = grad
        if len(self._pending) == len(self.params):
            self._absorb()

    def complete(self, expected: int) -> bool:
        """Whether every parameter has all its gradients of the step."""
        return all(count == expected for count in self.counts)

    def started(self) -> bool:
        """Whether any gradient of the step has come."""
        return any(self.counts)

    @torch.no_grad()
    def _absorb(self) -> None:
        pending, self._pending = self._pending, {}
        if not pending:
            return
        if len(self.params) > 1:
            items = pending.items()
            first = [(self._grad_views[p], g) for p, g in items if self.counts[p] == 1]
            more = [(self._grad_views[p], g) for p, g in items if self.counts[p] > 1]
            if first:
                torch._foreach_copy_([v for v, _ in first], [g for _, g in first])
            if more:
                torch._foreach_add_([v for v, _ in more], [g for _, g in more])
            return
        flat = pending[0].contiguous().view(-1)
        if not self._device.separate_memory:
            if self._gradient is None:
                self._gradient = flat
            else:
                self._gradient = self._gradient.add_(flat)
            return
        assert self._grad_h is not None
        behind = self._copies.record_compute()
        if self.counts[0] == 1:
            self._arrived = self._copies.d2h(self._grad_h, flat, after=behind)
        else:
            extra = self._arena.empty((self.numel,), self.dtype, tag="gradients", grow=False)
            self._extra.append((self._copies.d2h(extra, flat, after=behind), extra))

    def close(self) -> None:
        """All gradients of the step are here: send what is still on the device to the host."""
        self._absorb()
        self.closed = True
        self._refresh_master()
        if self._grad_d is not None:
            assert self._grad_h is not None
            behind = self._copies.record_compute()
            self._arrived = self._copies.d2h(self._grad_h, self._grad_d, after=behind)

    def mark_written(self) -> None:
        """Tell autograd that the values change, as an in-place operation would.

        A graph that still needs the old values then raises, as after torch's own optimizers.
        """
        written = [param for param, count in zip(self.params, self.counts, strict=True) if count]
        torch.autograd.graph.increment_version(written)
        for position, param in enumerate(self.params):
            self._seen[position] = (param._version, param.data_ptr())

    def reset(self) -> None:
        """Forget the step's gradients and counts."""
        self._pending.clear()
        self._extra.clear()
        self._gradient = None
        self._arrived = None
        self.counts = [0] * len(self.params)
        self.closed = False
        self.used = None
        self.sum_of_squares = 0.0
        self.nonfinite = 0

    def land(self) -> None:
        """Wait for the gradients in host memory and sum what came in pieces (worker thread)."""
        if self._arrived is not None:
            self._device.host_wait(self._arrived)
            self._arrived = None
        for event, extra in self._extra:
            self._device.host_wait(event)
            assert self._grad_h is not None
            self._grad_h.add_(extra)
        self._extra.clear()

    def measure(self, threads: int) -> None:
        """Sum of squares (fp64) and number of non-finite values of the landed gradients."""
        total, bad = 0.0, 0
        for offset, size in self._runs_with_gradient():
            squares, nonfinite = _native.grad_stats(
                self._host_gradient(offset), _DTYPE_NAMES[self.dtype], size, threads=threads
            )
            total += squares
            bad += nonfinite
        self.sum_of_squares, self.nonfinite = total, bad

    # -- update ----------------------------------------------------------------------------

    def update(self, hyper: Hyper, scale: float, threads: int, after: Event | None) -> None:
        """AdamW on every parameter that has a gradient, and its way back to the device.

        Args:
            hyper: hyper-parameters of the param group.
            scale: factor on the gradients (clipping).
            threads: host threads.
            after: event the device copy of the parameters may only be written behind.
        """
        for start, end in self._segments():
            offset = self._offsets[start]
            size = self._offsets[end - 1] + self.params[end - 1].numel() - offset
            step = self.steps[start] + 1
            self._native_update(offset, size, step, hyper, scale, threads)
        for position, count in enumerate(self.counts):
            if count:
                self.steps[position] += 1
        if self._param_h is not None:
            self.written = self._copies.h2d(self._device_flat(), self._param_h, after=after)

    def _native_update(
        self, offset: int, size: int, step: int, hyper: Hyper, scale: float, threads: int
    ) -> None:
        target = self._param_h if self._param_h is not None else self._device_flat()
        _native.adamw_step(
            target.data_ptr() + offset * target.element_size(),
            _DTYPE_NAMES[self.dtype],
            self._host_gradient(offset),
            _DTYPE_NAMES[self.dtype],
            self.exp_avg.data_ptr() + offset * 4,
            self.exp_avg_sq.data_ptr() + offset * 4,
            0 if self.master is None else self.master.data_ptr() + offset * 4,
            size,
            lr=hyper.lr,
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            step=step,
            grad_scale=scale,
            threads=threads,
        )

    def _host_gradient(self, offset: int) -> int:
        gradient = self._grad_h if self._grad_h is not None else self._gradient
        assert gradient is not None
        return gradient.data_ptr() + offset * gradient.element_size()

    def _device_flat(self) -> torch.Tensor:
        return self._flat if self._flat is not None else self.params[0].data.view(-1)

    def _runs_with_gradient(self) -> Iterator[tuple[int, int]]:
        for start, end in self._segments():
            for position in range(start, end):
                yield self._offsets[position], self.params[position].numel()

    def _segments(self) -> Iterator[tuple[int, int]]:
        """Runs of neighbouring parameters that have a gradient and the same step count."""
        start = 0
        while start < len(self.params):
            if not self.counts[start]:
                start += 1
                continue
            end = start + 1
            while (
                end < len(self.params) and self.counts[end] and self.steps[end] == self.steps[start]
            ):
                end += 1
            yield start, end
            start = end

    @torch.no_grad()
    def _refresh_master(self) -> None:
        """Take over values the user wrote into a parameter since the last update."""
        for position, param in enumerate(self.params):
            now = (param._version, param.data_ptr())
            if now == self._seen[position]:
                continue
            if self._flat is not None:
                view = self._split_one(self._flat, position)
                if view.data_ptr() != param.data_ptr():
                    view.copy_(param.data)
                    param.data = view
            if self.master is not None:
                self._split_one(self.master, position).copy_(param.data)
            if self._param_h is not None:
                self._split_one(self._param_h, position).copy_(param.data)
            self._seen[position] = (param._version, param.data_ptr())

    def _split_one(self, flat: torch.Tensor, position: int) -> torch.Tensor:
        param, offset = self.params[position], self._offsets[position]
        return flat[offset : offset + param.numel()].view(param.shape)

    def keep_master(self, position: int) -> None:
        """The master copy was loaded: do not overwrite it from the parameter at the next update."""
        param = self.params[position]
        if self._param_h is not None:
            self._split_one(self._param_h, position).copy_(param.data)
        self._seen[position] = (param._version, param.data_ptr())
