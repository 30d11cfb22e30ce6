"""What would make a plan fit that does not: every remedy named here has been tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ts_core.schedule.plan import MachineProfile, ModelProfile, Plan, PlanOptions, human

Fits = Callable[[ModelProfile, MachineProfile, PlanOptions], bool]
_STEP = 1 << 20
_MOST = 1 << 45
_LOW_HEADROOM = 0.03


@dataclass(frozen=True)
class Alternative:
    """Another way to run the same training.

    Attributes:
        words: how to ask for it, to stand after "To make it fit:".
        model: its profile.
    """

    words: str
    model: ModelProfile


def find_remedies(
    plan: Plan,
    model: ModelProfile,
    machine: MachineProfile,
    options: PlanOptions,
    alternatives: Sequence[Alternative],
    fits: Fits,
) -> list[str]:
    """Remedies, those that cost nothing first.

    Args:
        plan: what does not fit.
        model, machine, options: its inputs.
        alternatives: tried with the same machine and options.
        fits: whether inputs give a plan that fits.
    """
    found = []
    changes: list[tuple[str, dict[str, Any]]] = [
        ("page blocks as needed (param_offload='auto')", {"param_offload": "auto"}),
        ("recompute all blocks (recompute=True)", {"recompute": True}),
        ("keep activations as planned (activation_offload='auto')", {"activation_offload": "auto"}),
        (f"leave less free (vram_headroom={_LOW_HEADROOM})", {"headroom": _LOW_HEADROOM}),
        ("put weights on disk (disk_offload=DIRECTORY)", {"disk": True}),
    ]
    for words, change in changes:
        changed = replace(options, **change)
        if changed != options and fits(model, machine, changed):
            found.append(words)
    for other in alternatives:
        if fits(other.model, machine, options):
            found.append(other.words)
    device = _enough_device(model, machine, options, fits)
    host = _enough_host(model, machine, options, fits)
    if device is not None:
        found.append(f"give it {human(device, at_least=True)} of device memory (vram_limit)")
    if host is not None:
        found.append(f"free host memory until {human(host, at_least=True)} are available")
    if not found and machine.device_bytes is not None and machine.host_available is not None:
        device = _enough_device(model, replace(machine, host_available=None), options, fits)
        if device is not None:
            larger = replace(machine, device_bytes=device)
            host = _enough_host(model, larger, options, fits)
            if host is not None:
                found.append(
                    f"give it {human(device, at_least=True)} of device memory (vram_limit) and "
                    f"free host memory until {human(host, at_least=True)} are available"
                )
    return found


def _enough_device(
    model: ModelProfile, machine: MachineProfile, options: PlanOptions, fits: Fits
) -> int | None:
    if machine.device_bytes is None:
        return None
    return _least(
        machine.device_bytes,
        lambda size: fits(model, replace(machine, device_bytes=size), options),
    )


def _enough_host(
    model: ModelProfile, machine: MachineProfile, options: PlanOptions, fits: Fits
) -> int | None:
    if machine.host_available is None:
        return None
    return _least(
        machine.host_available,
        lambda size: fits(model, replace(machine, host_available=size), options),
    )


def _least(now: int, holds: Callable[[int], bool]) -> int | None:
    """The least size above `now` that holds, to about 1 %, rounded up; None when none does."""
    low, high = now, max(2 * now, now + _STEP)
    while not holds(high):
        low, high = high, 2 * high
        if high > _MOST:
            return None
    while high - low > max(_STEP, high // 128):
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    shown = _STEP if high < 1 << 30 else (1 << 30) // 100 + 1  # as `human` shows it, rounded up
    return -(-high // shown) * shown
