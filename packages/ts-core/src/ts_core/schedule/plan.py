"""Plain data of planning. Sizes in bytes, times in seconds, rates per second."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ts_core.config import default_inflight_bytes
from ts_core.schedule.rates import HardwareProfile

KEEP, OFFLOAD, RECOMPUTE = "keep", "offload", "recompute"

# What recordings of blocks hold for temporary tensors, in activations and weight gradients of one
# block: those of a recomputed block where they come up, and as much again to copy in and out of,
# for gradients of activations and decoded weights. What they keep for backward is what would be
# kept without.
RECORDED_BLOCKS = 2


@dataclass(frozen=True)
class Work:
    """What a step does besides holding memory, for the prediction of its time.

    Attributes:
        block_flops: per block, floating-point operations of one forward.
        other_flops: of one forward of everything else (the head, mostly).
        backward: backward's operations over forward's: 1 when only the gradients of inputs are
            needed (a frozen base), 2 when those of the weights are too.
        updates: values that host threads update per step.
        gradient_bytes: gradients that leave the device per step.
        updated_bytes: new values that go back to the device per step.
        low_precision: whether products run in bf16 or fp16.
        forward_speed, backward_speed: how fast the blocks' products run, over plain ones of their
            precision: less than 1 where stored weights are decoded first, more on tensor cores of
            the weights' format.
    """

    block_flops: tuple[float, ...] = ()
    other_flops: float = 0.0
    backward: float = 1.0
    updates: int = 0
    gradient_bytes: int = 0
    updated_bytes: int = 0
    low_precision: bool = True
    forward_speed: float = 1.0
    backward_speed: float = 1.0


@dataclass(frozen=True)
class ModelProfile:
    """What a model asks of memory.

    Attributes:
        pageable: per block, bytes of its weights that can be paged, frozen and trained (one image).
        fixed_device: bytes that always stay on the device: everything outside the blocks, and
            the small tensors inside them.
        trained: bytes of gradients of trained parameters that lie on the device at once, while
            nothing is paged.
        host_state: bytes of host memory for optimizer state and gradients.
        in_host: bytes of pageable weights that lie in host memory already, and so are no longer
            part of what is available there.
        trained_values: values that are trained.
        activations: per block, bytes that autograd keeps for backward; empty when unknown.
        inputs: per block, bytes that a recomputed block keeps instead (its input).
        transient: bytes of temporary tensors of one block's backward.
        head: bytes outside the blocks at the peak of the loss (logits and their gradient).
        work: for the predicted step time; None when unknown.
        trained_pageable: per block, bytes of the trained weights in `pageable` (their gradients
            take as many); empty for none.
        gradients_wait: whether gradients wait on the device until the step's updates. Those of
            paged weights never do.
        gradients_leaving: the most bytes of gradients on their way off the device at once.
        leaving: bytes of all gradients and of the largest, where those on their way follow from the
            device's memory (`on_device`); None where their number was asked for.
        host_copies: bytes of trained weights that have a copy in host memory while they are on a
            device of its own (host threads write new values there).
        to_load: bytes of weights that have no values yet (meta device), and so no memory.
        tables: of `fixed_device`, bytes of frozen tables of which a step reads few rows (input
            embeddings), so that they may lie in host memory.
        host_tables: bytes of such tables that are in host memory, and not in `fixed_device`.
    """

    pageable: tuple[int, ...]
    fixed_device: int = 0
    trained: int = 0
    host_state: int = 0
    in_host: int = 0
    trained_values: int = 0
    activations: tuple[int, ...] = ()
    inputs: tuple[int, ...] = ()
    transient: int = 0
    head: int = 0
    work: Work | None = None
    trained_pageable: tuple[int, ...] = ()
    gradients_wait: bool = False
    gradients_leaving: int = 0
    leaving: tuple[int, int] | None = None
    host_copies: int = 0
    to_load: int = 0
    tables: int = 0
    host_tables: int = 0

    def on_device(self, device_bytes: int | None) -> ModelProfile:
        """The profile on a device of so many bytes; None: without memory of its own."""
        if self.leaving is None:
            return self
        total, largest = self.leaving
        most = min(total, 2 * default_inflight_bytes(device_bytes) + largest)
        trained = self.trained if self.gradients_wait else most
        return replace(self, gradients_leaving=most, trained=trained)

    def with_host_tables(self) -> ModelProfile:
        """The profile with its tables in host memory."""
        return replace(
            self,
            fixed_device=self.fixed_device - self.tables,
            tables=0,
            host_tables=self.host_tables + self.tables,
        )

    def gradients(self, paged: Sequence[int]) -> int:
        """Bytes of gradients that lie on the device at once while these blocks are paged."""
        if not (self.gradients_wait and self.trained_pageable):
            return self.trained
        leave = sum(self.trained_pageable[index] for index in paged)
        return self.trained - leave + min(leave, self.gradients_leaving)

    def optimizer_bytes(self, paged: Sequence[int], separate_memory: bool) -> int:
        """Host memory of the optimizer while these blocks are paged, whose images are the copy."""
        if not (separate_memory and self.host_copies):
            return self.host_state
        leave = sum(self.trained_pageable[index] for index in paged if self.trained_pageable)
        return self.host_state + self.host_copies - leave


@dataclass(frozen=True)
class MachineProfile:
    """What a machine offers.

    Attributes:
        device_bytes: device memory the process may use; None when unbounded.
        host_available: free host memory; None when unknown.
        counts_fixed: whether more than blocks and slots counts against `device_bytes` (not so on
            the host device).
        host_floor: host memory that must stay free.
        page_lock_bytes: host memory that may be page-locked; None when unbounded.
        rates: how fast it is; None leaves step times out.
        in_use: of `device_bytes`, what other tensors of the process hold, and torch's workspaces.
    """

    device_bytes: int | None
    host_available: int | None = None
    counts_fixed: bool = True
    host_floor: int = 0
    page_lock_bytes: int | None = None
    rates: HardwareProfile | None = None
    in_use: int = 0


@dataclass(frozen=True)
class PlanOptions:
    """What the user asked for.

    Attributes:
        param_offload: "auto", True, False, a fraction of the blocks, or block indices.
        headroom: share of the device memory to leave free.
        activation_share: share of the device memory that others do not use, kept for activations
            while they are unknown (nothing on the host device).
        reserve: bytes measured instead: everything on the device but blocks and slots.
        reserved_with: blocks that were paged when `reserve` was measured. Where gradients wait on
            the device, those of more resident blocks come on top.
        slot_count: slots of the streaming ring; one is used when two do not fit.
        activation_offload, recompute: "auto", True, False, a fraction, or block indices (these
            for recompute only). They matter where the model's activations are known.
        inflight: the most bytes of paged activations still crossing the link at once.
        disk: whether weights beyond the page-lock budget may lie on disk.
        replayed: blocks are recorded and replayed, where the device has room for it and their
            activations are not paged.
        avoid_pages: "auto" pages activations only where nothing else fits (blocks are replayed).
    """

    param_offload: str | bool | float | tuple[int, ...] = "auto"
    headroom: float = 0.10
    activation_share: float = 0.30
    reserve: int | None = None
    reserved_with: tuple[int, ...] = ()
    slot_count: int = 2
    activation_offload: str | bool | float = "auto"
    recompute: str | bool | float | tuple[int, ...] = "auto"
    inflight: int = 1 << 30
    disk: bool = False
    replayed: bool = False
    avoid_pages: bool = False


@dataclass(frozen=True)
class Plan:
    """Where each block lives.

    Attributes:
        paged: indices of the blocks that stream.
        slot_count, slot_bytes: the ring they stream through.
        fits: whether the plan stays within the budgets.
        predicted: bytes of device memory by use, their "total", and the "budget".
        host: bytes of host memory by use, their "total", and the "budget".
        seconds: predicted times of a step: "compute", "to_device", "to_host", "updates", those of
            the passes "forward" and "backward", and the "step" itself, in which all but the two
            passes overlap; empty when rates or work are unknown.
        activations: per block "keep", "offload" or "recompute"; empty when unknown.
        shortfall: bytes over the budget that failed (0 when it fits).
        failed: the budget that failed, "device" or "host"; empty when it fits.
        reasons: the decisions in plain words; the failure and its remedies when it does not fit.
        remedies: what would make it fit, each tried.
        host_tables: bytes of tables that lie in host memory.
    """

    paged: tuple[int, ...]
    slot_count: int
    slot_bytes: int
    fits: bool
    predicted: dict[str, int] = field(default_factory=dict)
    shortfall: int = 0
    reasons: tuple[str, ...] = ()
    host: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    activations: tuple[str, ...] = ()
    failed: str = ""
    remedies: tuple[str, ...] = ()
    host_tables: int = 0


def human(size_bytes: int, *, at_least: bool = False) -> str:
    """Bytes for a person: '1.50 GiB'; with `at_least` rounded up, as a size that is enough."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{_shown(size, at_least)} {unit}"
        size /= 1024
    return f"{_shown(size, at_least)} GiB"


def in_slots(count: int) -> str:
    """ "1 slot" or "2 slots"."""
    return "1 slot" if count == 1 else f"{count} slots"


def _shown(size: float, up: bool) -> str:
    return f"{math.ceil(size * 100) / 100 if up else size:.2f}"
