"""Plain data of planning. All sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ModelProfile:
    """What a model asks of memory.

    Attributes:
        pageable: per block, bytes of its frozen weights that can be paged (one image).
        fixed_device: bytes that always stay on the device: everything outside the blocks, and
            the small or trained tensors inside them.
        trained: bytes of gradients of trained parameters that lie on the device at once.
        host_state: bytes of host memory for optimizer state and gradients.
    """

    pageable: tuple[int, ...]
    fixed_device: int = 0
    trained: int = 0
    host_state: int = 0


@dataclass(frozen=True)
class MachineProfile:
    """What a machine offers.

    Attributes:
        device_bytes: device memory the process may use; None when unbounded.
        host_available: free host memory; None when unknown.
        counts_fixed: whether `fixed_device` counts against `device_bytes` (on the host device
            only resident blocks and slots do).
    """

    device_bytes: int | None
    host_available: int | None = None
    counts_fixed: bool = True


@dataclass(frozen=True)
class PlanOptions:
    """What the user asked for.

    Attributes:
        param_offload: "auto", True, False, a fraction of the blocks, or block indices.
        headroom: share of the device memory to leave free.
        activation_share: share of the device memory kept for activations and workspaces until
            they have been measured (nothing on the host device).
        slot_count: slots of the streaming ring.
    """

    param_offload: str | bool | float | tuple[int, ...] = "auto"
    headroom: float = 0.10
    activation_share: float = 0.30
    slot_count: int = 2


@dataclass(frozen=True)
class Plan:
    """Where each block lives.

    Attributes:
        paged: indices of the blocks that stream.
        slot_count, slot_bytes: the ring they stream through.
        fits: whether the plan stays within the budgets.
        predicted: bytes by use, and "budget" for the device.
        shortfall: bytes over the budget that failed (0 when it fits).
        reasons: the decisions in plain words; the failure and its remedies when it does not fit.
    """

    paged: tuple[int, ...]
    slot_count: int
    slot_bytes: int
    fits: bool
    predicted: dict[str, int] = field(default_factory=dict)
    shortfall: int = 0
    reasons: tuple[str, ...] = ()


def human(size_bytes: int) -> str:
    """Bytes for a person: '1.50 GiB'."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
