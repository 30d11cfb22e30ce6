"""The answer of `trainstream plan`: a plan, whether it fits, and what would make it fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ts_core.config import WrapOptions
from ts_core.engine.codec_choice import by_precision, plan_codec, stored_estimate
from ts_core.engine.planning import host_floor, plan_options
from ts_core.engine.quantize_options import bytes_per_weight
from ts_core.engine.residence import plan_with_state
from ts_core.errors import DataError
from ts_core.planning.estimate import Described, Training, describe
from ts_core.planning.remedies import Asked, changes_of
from ts_core.planning.updates import all_on_device, hint, split_updates
from ts_core.schedule import MachineProfile, Plan
from ts_core.schedule.plan import human
from ts_core.schedule.remedies import find_changes, find_sizes, size_words

# Share of RAM that loading a model may fill, as in `load_model`.
_LOADING_SHARE = 0.85
_PAGE_LOCK_SHARE = 0.4


@dataclass(frozen=True)
class Outcome:
    """The answer of `trainstream plan`.

    Attributes:
        model, training: what was asked.
        described, machine, plan: what came of it.
        codec: that frozen weights are stored in, or None.
        loading_bytes: RAM that the weights take while they are loaded.
        fits: whether loading and training fit.
        notes: in plain words.
        remedies: what makes loading and training fit, where they do not; each was tried.
    """

    model: str
    training: Training
    described: Described
    machine: MachineProfile
    plan: Plan
    codec: str | None
    loading_bytes: int
    fits: bool
    notes: tuple[str, ...]
    remedies: tuple[str, ...] = ()


def plan_training(
    source: str,
    training: Training,
    machine: MachineProfile,
    quantize: str = "auto",
    options: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> Outcome:
    """The plan for a model that is known by its config.

    Args:
        source, training, trust_remote_code: as for `describe`.
        machine: memory and rates.
        quantize: as wrap()'s; "auto" also takes a codec where loading would not fit without one.
        options: other options of wrap().

    Raises:
        OptionError: a value that is not accepted.
    """
    asked = Asked(training, machine, quantize, options or {})
    planner = _Planner(source, trust_remote_code)
    outcome = planner.plan(asked)
    if outcome.fits:
        return planner.with_updates(outcome, asked)
    return replace(outcome, remedies=tuple(_remedies(asked, planner)))


class _Planner:
    """Plans for one model; trainings that were described are remembered.

    Args:
        source, trust_remote_code: as for `describe`.
    """

    def __init__(self, source: str, trust_remote_code: bool) -> None:
        self._source = source
        self._trust_remote_code = trust_remote_code
        self._known: dict[Training, Described] = {}

    def plan(self, asked: Asked) -> Outcome:
        """The answer without remedies."""
        training, machine = asked.training, asked.machine
        config = _config(asked)
        if training not in self._known:
            self._known[training] = describe(
                self._source, training, self._trust_remote_code, config
            )
        described = self._known[training]
        notes = list(described.notes)
        plan, codec = _with_codec(described, training, machine, config)
        loading = _loading_bytes(described, codec, config)
        if asked.quantize == "auto" and not _loads(loading, machine):
            for name in by_precision() if _can_be_stored(described) else ():
                stored = _loading_bytes(described, name, config)
                if not _loads(stored, machine):
                    continue
                other, _ = _with_codec(described, training, machine, replace(config, quantize=name))
                if other.fits:
                    notes.append(
                        f"the weights are stored in {name}: loading them otherwise needs "
                        f"{human(loading)} of RAM"
                    )
                    plan, codec, loading = other, name, stored
                    break
        if codec is not None and not _can_be_stored(described):
            notes.append(f"--quantize {codec} changes nothing: no weight of the blocks is frozen")
            codec = None
        loads = _loads(loading, machine)
        if not loads and machine.host_available is not None:
            notes.append(
                f"loading needs {human(loading)} of RAM, more than {_LOADING_SHARE:.0%} of the "
                f"{human(machine.host_available)} there are"
            )
        fits = plan.fits and loads
        return Outcome(
            self._source, training, described, machine, plan, codec, loading, fits, tuple(notes)
        )

    def with_updates(self, outcome: Outcome, asked: Asked) -> Outcome:
        """The answer with the step of the optimizer mode that was asked for, or a word of it."""
        if asked.training.moments != "float32":  # which host threads alone keep
            return outcome
        config, described = _config(asked), outcome.described
        profile = stored_estimate(described.profile, described.weights, outcome.codec, config)
        mode = config.optimizer_mode
        known = (outcome.plan, described.trained, profile, asked.machine)
        found = all_on_device(*known) if config.offload == "auto" else None
        if found is None:
            split_as = "auto" if mode == "cpu" else mode
            found = split_updates(*known, plan_options(config), split_as)
            if mode == "cpu":
                words = hint(outcome.plan, found)
                return replace(outcome, notes=(*outcome.notes, words)) if words else outcome
        if found is None:
            return outcome
        return replace(outcome, plan=found.plan, notes=(*outcome.notes, found.words))

    def fits(self, asked: Asked) -> bool:
        """Whether loading and training fit; not where the model has nothing to adapt."""
        try:
            return self.plan(asked).fits
        except DataError:
            return False


def _config(asked: Asked) -> WrapOptions:
    return WrapOptions.from_keywords(
        {
            "quantize": asked.quantize,
            "moment_dtype": asked.training.moments,
            **asked.options,
            "check_memory": False,
        }
    )


def _with_codec(
    described: Described, training: Training, machine: MachineProfile, config: WrapOptions
) -> tuple[Plan, str | None]:
    plan, codec = plan_codec(
        described.profile, described.weights, machine, config, training.moments
    )
    if plan.fits and described.staying and config.offload == "auto":
        profile = stored_estimate(described.profile, described.weights, codec, config)
        _, plan, _ = plan_with_state(profile, machine, plan_options(config), described.staying)
    return plan, codec


def _can_be_stored(described: Described) -> bool:
    return any(count for count, _ in described.weights)


def _loads(loading_bytes: int, machine: MachineProfile) -> bool:
    available = machine.host_available
    return available is None or loading_bytes <= _LOADING_SHARE * available


def _loading_bytes(described: Described, codec: str | None, config: WrapOptions) -> int:
    """RAM that `load_model` fills with weights; frozen ones of blocks take none on a disk."""
    rest = described.total_bytes - sum(size for _, size in described.weights)
    if config.disk_offload is not None:
        return rest
    if codec is None:
        return described.total_bytes
    return rest + sum(
        int(count * bytes_per_weight(codec, config)) for count, _ in described.weights
    )


def machine_with_ram(machine: MachineProfile, ram_bytes: int) -> MachineProfile:
    """The machine with so much host memory for the run, of which a part is left free or unlocked.

    Args:
        machine: what else there is. What it leaves free is left free still.
        ram_bytes: host memory.
    """
    locked = machine.page_lock_bytes
    return replace(
        machine,
        host_available=ram_bytes,
        host_floor=max(machine.host_floor, host_floor(ram_bytes)),
        page_lock_bytes=None if locked is None else max(locked, int(_PAGE_LOCK_SHARE * ram_bytes)),
    )


def _remedies(asked: Asked, planner: _Planner) -> list[str]:
    """What makes it fit, changes of the training before a larger machine."""
    found = find_changes(asked, changes_of(asked), planner.fits)
    device, host, both = find_sizes(
        asked.machine,
        machine_with_ram,
        lambda machine: planner.fits(replace(asked, machine=machine)),
    )
    return found + size_words(
        device,
        host,
        None if found else both,
        "give it {} of device memory (--vram)",
        "free host memory until {} are available (--ram)",
    )
