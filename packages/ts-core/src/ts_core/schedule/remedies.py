"""What would make a plan fit that does not: every remedy named here has been tried."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from ts_core.schedule.plan import MachineProfile, ModelProfile, PlanOptions, human

Fits = Callable[[ModelProfile, MachineProfile, PlanOptions], bool]
Inputs = tuple[ModelProfile, MachineProfile, PlanOptions]
Asked = TypeVar("Asked")
_STEP = 1 << 20
_MOST = 1 << 45
LOW_HEADROOM = 0.03


@dataclass(frozen=True)
class Alternative:
    """Another way to run the same training.

    Attributes:
        words: how to ask for it, to stand after "To make it fit:".
        model: its profile.
    """

    words: str
    model: ModelProfile


@dataclass(frozen=True)
class Change(Generic[Asked]):
    """One thing that could be asked for otherwise.

    Attributes:
        words: how to ask for it.
        kind: changes of one kind exclude each other.
        apply: what is asked for with the change; equal to what it was given where nothing changes.
    """

    words: str
    kind: str
    apply: Callable[[Asked], Asked]


def find_changes(
    asked: Asked, changes: Sequence[Change[Asked]], fits: Callable[[Asked], bool]
) -> list[str]:
    """The changes that make it fit; where none does alone, pairs of them.

    Args:
        asked: what does not fit.
        changes: those that cost least first.
        fits: whether it fits, by every check that there is.

    Returns:
        Words; of two kinds together only the first pair that fits.
    """
    found = []
    for change in changes:
        changed = change.apply(asked)
        if changed != asked and fits(changed):
            found.append(change.words)
    if found:
        return found
    done = set()
    for first, second in itertools.combinations(changes, 2):
        kinds = (first.kind, second.kind)
        if first.kind == second.kind or kinds in done:
            continue
        once = first.apply(asked)
        twice = second.apply(once)
        if once == asked or twice in (once, second.apply(asked)) or not fits(twice):
            continue
        done.add(kinds)
        found.append(f"{first.words} and {second.words}")
    return found


def find_remedies(
    model: ModelProfile,
    machine: MachineProfile,
    options: PlanOptions,
    alternatives: Sequence[Alternative],
    fits: Fits,
) -> list[str]:
    """Remedies, those that cost nothing first.

    Args:
        model, machine, options: inputs of a plan that does not fit.
        alternatives: tried with the same machine and options.
        fits: whether inputs give a plan that fits.
    """
    changes: list[tuple[str, dict[str, Any]]] = [
        ("page blocks as needed (param_offload='auto')", {"param_offload": "auto"}),
        ("recompute all blocks (recompute=True)", {"recompute": True}),
        ("keep activations as planned (activation_offload='auto')", {"activation_offload": "auto"}),
        (f"leave less free (vram_headroom={LOW_HEADROOM})", {"headroom": LOW_HEADROOM}),
        ("put weights on disk (disk_offload=DIRECTORY)", {"disk": True}),
    ]
    found = find_changes(
        (model, machine, options),
        [
            *(Change(words, next(iter(change)), _options(change)) for words, change in changes),
            *(Change(other.words, "model", _model(other.model)) for other in alternatives),
        ],
        lambda inputs: fits(*inputs),
    )
    device, host, both = find_sizes(machine, with_ram, lambda other: fits(model, other, options))
    device_words = "give it {} of device memory (vram_limit)"
    host_words = "free host memory until {} are available"
    return found + size_words(device, host, both if not found else None, device_words, host_words)


def _options(change: dict[str, Any]) -> Callable[[Inputs], Inputs]:
    return lambda inputs: (inputs[0], inputs[1], replace(inputs[2], **change))


def _model(model: ModelProfile) -> Callable[[Inputs], Inputs]:
    return lambda inputs: (model, inputs[1], inputs[2])


def with_ram(machine: MachineProfile, ram_bytes: int) -> MachineProfile:
    """The machine with so much free host memory."""
    return replace(machine, host_available=ram_bytes)


def find_sizes(
    machine: MachineProfile,
    grown: Callable[[MachineProfile, int], MachineProfile],
    fits: Callable[[MachineProfile], bool],
) -> tuple[int | None, int | None, tuple[int, int] | None]:
    """The least memory with which it fits, in bytes.

    Args:
        machine: with which it does not.
        grown: the machine with so much free host memory.
        fits: whether it fits on a machine.

    Returns:
        Of the device alone, of the host alone, and of both where neither does alone; each None
        where there is none or no size is known.
    """

    def enough_device(here: MachineProfile) -> int | None:
        if here.device_bytes is None:
            return None
        return _least(here.device_bytes, lambda size: fits(replace(here, device_bytes=size)))

    def enough_host(here: MachineProfile) -> int | None:
        if here.host_available is None:
            return None
        return _least(here.host_available, lambda size: fits(grown(here, size)))

    device, host = enough_device(machine), enough_host(machine)
    if device is not None or host is not None:
        return device, host, None
    if machine.device_bytes is None or machine.host_available is None:
        return None, None, None
    device = enough_device(grown(machine, _MOST))
    if device is None:
        return None, None, None
    host = enough_host(replace(machine, device_bytes=device))
    return None, None, None if host is None else (device, host)


def size_words(
    device: int | None,
    host: int | None,
    both: tuple[int, int] | None,
    device_words: str,
    host_words: str,
) -> list[str]:
    """What `find_sizes` found, in words with a place for the size."""
    found = []
    if device is not None:
        found.append(device_words.format(human(device, at_least=True)))
    if host is not None:
        found.append(host_words.format(human(host, at_least=True)))
    if both is not None:
        sizes = [human(size, at_least=True) for size in both]
        found.append(f"{device_words.format(sizes[0])} and {host_words.format(sizes[1])}")
    return found


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
