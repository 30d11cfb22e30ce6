"""The activations of a stack of blocks: kept, paged or recomputed, as decided and measured.

The first training forward is a probe: it measures what each block saves. The policy follows from
that, from the step's peak and from the RAM there is; then measured trials choose how many blocks
are recomputed rather than paged. Policies change between forwards only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from ts_core.device.base import Device
from ts_core.engine.activation_meter import (
    ActivationMeter,
    plain_tensors,
    stateful_argument,
    tensors_in,
)
from ts_core.engine.activation_options import ActivationOptions
from ts_core.engine.activation_pages import PageStore, Span
from ts_core.engine.host_buffers import HostBuffers
from ts_core.engine.saved_tensors import outer_checkpoint
from ts_core.engine.step_times import StepTimes
from ts_core.errors import OptionError, StateError
from ts_core.memory.arena import PinnedArena, default_arena
from ts_core.memory.ram import ram_available_bytes, ram_limit_bytes
from ts_core.memory.ram_floor import RamFloor
from ts_core.schedule.activation_policy import (
    ActivationLimits,
    ActivationPolicy,
    BlockActivations,
    decide,
    extra_device_bytes,
    halve_pages,
    offload_named,
    ram_floor,
    ram_room,
    recompute_named,
)
from ts_core.schedule.activation_tuner import Fixed, RecomputeTuner, SlowdownTuner, Tuner
from ts_core.schedule.plan import KEEP, OFFLOAD, RECOMPUTE, human
from ts_core.transfer import CopyEngine

# An input this much larger than the one that was measured is measured again.
_LARGER = 1.02
# Steps of a settled policy before its peak is looked at, and how often that may change it.
_STEPS_TO_PEAK = 2
_CORRECTIONS = 3
_USE_OF_SLACK = 0.9


class Activations:
    """Decides for each block, and keeps the pages.

    Args:
        blocks: the stack, in order.
        copies: the engine whose streams carry pages.
        options: what was asked for.
        say: takes decisions in plain words.
        arena: host memory; the process's own by default.
        read_ram: gives available RAM in bytes; that of the system by default.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        copies: CopyEngine,
        options: ActivationOptions,
        say: Callable[[str], None],
        *,
        arena: PinnedArena | None = None,
        read_ram: Callable[[], int] | None = None,
    ) -> None:
        self.options = options
        self.decision = "not decided yet: the first training step measures"
        self.measured: list[BlockActivations] = [BlockActivations(0, 0, 0)] * len(blocks)
        self.recomputed = 0
        self._blocks = list(blocks)
        self._copies = copies
        self._device: Device = copies.device
        self._say = say
        self._arena = arena or default_arena()
        self._read_ram = read_ram or ram_available_bytes
        self._buffers = HostBuffers(self._arena)
        self.store = PageStore(copies, self._buffers, options.min_bytes, options.prefetch_depth)
        self._floor = RamFloor(ram_floor(ram_limit_bytes()), self._ram_is_low, read=self._read_ram)
        self._low: int | None = None
        self._stateful: str | None = None
        self._meter: ActivationMeter | None = None
        self._limits: ActivationLimits | None = None
        self._tuner: Tuner = Fixed(ActivationPolicy((KEEP,) * len(blocks)))
        self._corrections = 0
        self._passes = 0
        self._times = StepTimes(self._device)
        self._modes: list[str] = []
        self._moves = False
        self._weights: list[torch.Tensor] = []
        self._probed_numel = 0
        self._sizes: list[list[int]] = [[] for _ in blocks]
        # Told what was measured, and the room there is beyond a step that recomputes every block;
        # returns the bytes of it that have a better use.
        self.share_room: Callable[[Sequence[BlockActivations], int], int] | None = None
        self._begin_probe()
        self._say_how_it_begins()

    # -- what was decided ---------------------------------------------------------------------

    @property
    def measuring(self) -> bool:
        """Whether a probe is under way, or has ended and the next forward decides by it."""
        return self._meter is not None

    @property
    def policy(self) -> list[str]:
        """Per block "keep", "offload" or "recompute", now."""
        return list(self._modes)

    @property
    def offloaded_blocks(self) -> list[int]:
        """Indices of the blocks whose activations are paged."""
        return [index for index, mode in enumerate(self._modes) if mode == OFFLOAD]

    @property
    def recompute_blocks(self) -> list[int]:
        """Indices of the blocks that are recomputed in backward."""
        return [index for index, mode in enumerate(self._modes) if mode == RECOMPUTE]

    @property
    def block_bytes(self) -> list[int]:
        """Per block, bytes that autograd holds when its activations stay; 0 until measured."""
        return [block.saved for block in self.measured]

    @property
    def adapting(self) -> bool:
        """Whether the policy may still change by itself."""
        if self._meter is not None:
            return self.options.searches and self._device.separate_memory
        return not self._tuner.settled or self._corrections > 0

    @property
    def stats(self) -> dict[str, int]:
        """Counters of pages and host buffers, in bytes and pieces."""
        return {
            **asdict(self.store.stats),
            "recomputed": self.recomputed,
            "host_bytes": self._buffers.held_bytes,
            "host_bytes_in_use": self._buffers.used_bytes,
            "host_allocations": self._buffers.allocations,
        }

    def report(self) -> dict[str, Any]:
        """memory_report()["activations"]."""
        return {
            "policy": self.policy,
            "offloaded_blocks": self.offloaded_blocks,
            "recompute_blocks": self.recompute_blocks,
            "decision": self.decision,
            "block_bytes": self.block_bytes,
            "adapting": self.adapting,
            **self.stats,
        }

    def keep_resident(self, count: int) -> None:
        """From the next forward on, `count` blocks keep their activations, the last ones first.

        Of the others those that stayed until now are paged.

        Raises:
            OptionError: not a number from 1 (the last block always stays) to that of the blocks.
            StateError: no training step has been measured yet.
        """
        total = len(self._modes)
        if not 1 <= count <= total:
            raise OptionError(f"{count} blocks cannot stay: use a number from 1 to {total}.")
        if self._meter is not None:
            raise StateError("nothing is measured yet: run a training step first.")
        modes = [mode if mode != KEEP else OFFLOAD for mode in self._modes]
        modes[total - count :] = [KEEP] * count
        self._tuner = Fixed(ActivationPolicy(tuple(modes)))
        self._corrections = 0
        self._decided(f"{count} of {total} blocks keep their activations, as asked")

    def close(self) -> None:
        """End the watch on RAM. Pages that graphs still hold stay readable."""
        self._floor.stop()

    # -- called by the runner -----------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether blocks run as if nothing were here."""
        return self._meter is None and not self._moves and not self.adapting

    def new_pass(self, args: Any = (), kwargs: Any = None) -> None:
        """A forward of the model begins, with these arguments, outside any backward."""
        training = torch.is_grad_enabled()
        if self._low is not None:
            self._give_ram_back(self._low)
        elif training:
            if self._meter is not None:
                self._finish_probe()
            self._time_steps()
            self._look_at_peak()
        if not training:
            self._times.skip()
        if tuple(self._modes) != self._tuner.current.modes and self._meter is None:
            self._adopt(self._tuner.current)
        if training:
            self._look_at_input(args, kwargs)
        if self._meter is not None:
            self._weights = plain_tensors(self._blocks)
            self._meter.begin(self._weights)
        self.store.new_pass(self._weights if self._moves else ())

    def begin(self, index: int, args: Any, kwargs: Any) -> Span:
        """A block is called in forward with gradients enabled."""
        mode = self._modes[index]
        checkpointed = outer_checkpoint()
        if checkpointed:
            mode = KEEP  # whoever checkpoints it frees its activations already
        if mode == RECOMPUTE:
            stateful = stateful_argument(args) or stateful_argument(kwargs)
            if stateful is not None:
                mode = self._cannot_recompute(index, stateful)
        meter = None if checkpointed else self._meter
        if self._meter is not None:
            self._meter.enter(index, args, kwargs)
        call = self.store.new_call(index)
        previous = call.previous
        self.recomputed += mode == RECOMPUTE
        return Span(
            mode,
            call,
            None if meter is None else meter.observer(index),
            mode != OFFLOAD and previous is not None and bool(previous.pages),
        )

    def end(self, index: int, failed: bool) -> None:
        """A block's forward has ended."""
        if self._meter is not None:
            self._meter.broken |= failed
            self._meter.finished.add(index)

    # -- the probe ----------------------------------------------------------------------------

    def _begin_probe(self) -> None:
        """Measure in the next training forward.

        Where something is left to decide, memory has not been shown to suffice, so on a device
        with memory of its own the probe recomputes every block: that needs the least memory, no
        host buffers of sizes unknown until then, and gives the peak that limits are counted from.
        """
        options, count = self.options, len(self._blocks)
        free = KEEP
        if self._device.separate_memory:
            if options.recompute == "auto":
                free = RECOMPUTE
            elif options.offload == "auto":
                free = OFFLOAD
        modes = [free] * count
        if count and free == OFFLOAD:
            modes[-1] = KEEP
        for index in offload_named(options.offload, count):
            modes[index] = OFFLOAD
        for index in recompute_named(options.recompute_asked, count):
            modes[index] = RECOMPUTE
        self._set_modes(modes)
        self._passes = 0
        self._buffers.limit_bytes = self._ram_room()
        if OFFLOAD in modes:
            self._floor.start()
        self._meter = ActivationMeter(count, self.store)
        if options.searches and self._device.separate_memory:
            self._device.reset_peak()

    def _say_how_it_begins(self) -> None:
        autos = self.options.autos_in_words()
        if not autos:
            return
        if self._device.separate_memory:
            counts = ", ".join(
                f"{self._modes.count(mode)} {word}"
                for mode, word in ((KEEP, "kept"), (OFFLOAD, "paged"), (RECOMPUTE, "recomputed"))
            )
            self._say(f"{autos}: the first training step measures ({counts}), then decides")
        else:
            self._say(f"{autos}: other activations stay, as this device's memory is the host's")

    def _finish_probe(self) -> None:
        """The forward before this one was the probe, if it ran to its end."""
        meter = self._meter
        assert meter is not None
        if not meter.finished:
            return
        self._passes += 1
        if meter.broken or (len(meter.finished) < len(self._blocks) and self._passes < 2):
            self._meter = ActivationMeter(len(self._blocks), self.store)
            return
        self.measured = meter.result()
        self._passes = 0
        self._meter = None
        room = self._device_room()
        if room is not None and self.share_room is not None:
            room -= self.share_room(self.measured, room)
        limits = ActivationLimits(
            room, self._ram_room(), self.options.prefetch_depth, self._inflight()
        )
        found = isinstance(self._tuner, RecomputeTuner) and self._tuner.settled
        self._search(limits, self._share() if found else None)
        self._sizes = meter.sizes
        self._decided(self._tuner.current.reasons[-1])

    def _search(self, limits: ActivationLimits, share: float | None) -> None:
        options = self.options
        self._limits = limits
        start = self._policy_for(share or 0.0)
        everything_fits = all(mode == KEEP for mode in start.modes)
        self._tuner = Fixed(start)
        if options.trials and self._device.separate_memory:
            if options.max_slowdown is not None and options.offload == "auto" and everything_fits:
                self._tuner = SlowdownTuner(
                    start, options.max_slowdown, options.tune_window, options.calibrate_steps
                )
            elif share is None and options.recompute == "auto":
                self._tuner = RecomputeTuner(self._policy_for, options.tune_window)
        watched = self._device.separate_memory and options.searches
        if isinstance(self._tuner, SlowdownTuner):
            watched = False  # its blocks stay away for their own reason
        self._corrections = _CORRECTIONS if watched else 0
        for reason in self._tuner.current.reasons[:-1]:
            self._say(f"activations: {reason}")

    def _share(self) -> float:
        return self._tuner.share if isinstance(self._tuner, RecomputeTuner) else 0.0

    def _policy_for(self, share: float) -> ActivationPolicy:
        assert self._limits is not None
        recompute = self.options.recompute_asked
        if self._stateful is not None and recompute == "auto":
            recompute = False
        return decide(self.measured, self._limits, self.options.offload, recompute, share)

    def _device_room(self) -> int | None:
        """Device memory beyond what the probe needed, less what its own policy took."""
        usable = self._device.usable_bytes()
        if not self._device.separate_memory or usable is None:
            return None
        target = int(usable * (1 - self.options.headroom))
        here = ActivationLimits(None, 0, self.options.prefetch_depth, self._inflight())
        taken = extra_device_bytes(self.measured, self._modes, here)
        return target - self._device.memory()["peak_allocated"] + taken

    def _ram_room(self) -> int:
        arena = self._arena.stats()
        locked_and_free = max(0, arena["arena_pinned"] - arena["arena_used"])
        mine = self._buffers.held_bytes + locked_and_free
        return ram_room(self._read_ram() + mine, ram_limit_bytes())

    def _inflight(self) -> int:
        return self._copies.max_inflight_bytes

    def _look_at_input(self, args: Any, kwargs: Any) -> None:
        """Measure (again) with the largest input so far."""
        now = max((tensor.numel() for tensor in tensors_in((args, kwargs))), default=0)
        if self._meter is not None:
            self._probed_numel = now
        elif (
            now > self._probed_numel * _LARGER
            and self.options.searches
            and self._device.separate_memory
        ):
            self._say(
                f"activations: an input of {now} values instead of {self._probed_numel}: measuring "
                f"again"
            )
            self._probed_numel = now
            self._begin_probe()

    def _cannot_recompute(self, index: int, stateful: str) -> str:
        if self._stateful is None:
            self._stateful = stateful
            self._say(
                f"recompute: blocks get a {stateful}, which a second forward would change, so "
                f"they are not recomputed. Pass use_cache=False to the model in training."
            )
        paged = self.options.offload is not False and index != len(self._blocks) - 1
        return OFFLOAD if paged else KEEP

    # -- changing the policy ------------------------------------------------------------------

    def _adopt(self, policy: ActivationPolicy, *, give_back: bool = False) -> None:
        """Let the next forward run under `policy`, its host buffers carved and page-locked now.

        Args:
            policy: the new one.
            give_back: host memory that it needs no more goes back to the system.
        """
        self._set_modes(policy.modes)
        least = self.options.min_bytes
        self._weights = [
            w for w in plain_tensors(self._blocks) if w.numel() * w.element_size() >= least
        ]
        self._passes = 0
        held = self._buffers.held_bytes
        if held:
            self._copies.synchronize()  # so that no copy keeps a buffer
            self._buffers.trim()
        if give_back:
            self._arena.trim()
        if OFFLOAD in self._modes:
            sizes = [size for index in self.offloaded_blocks for size in self._sizes[index]]
            # What was held already may be held again, however little RAM is left.
            self._buffers.limit_bytes = max(self._ram_room(), min(held, sum(sizes)))
            self._buffers.provide(sizes)
            self._floor.start()
        else:
            self._floor.stop()
        if self.adapting:
            self._device.reset_peak()

    def _set_modes(self, modes: Sequence[str]) -> None:
        self._modes = list(modes)
        self._moves = any(mode != KEEP for mode in modes)

    def _decided(self, text: str) -> None:
        self.decision = text
        self._say(f"activations: {text}" if not text.startswith("activations") else text)

    def _time_steps(self) -> None:
        """Give the tuner the times of finished steps; the device is never waited for."""
        if self._tuner.settled or self._meter is not None:
            self._times.clear()
            return
        for seconds, trial in self._times.finished():
            if trial == self._tuner.trial:
                self._tuner.observe(seconds)
        if self._tuner.settled:
            for reason in self._tuner.reasons:
                self._say(f"activations: {reason}")
            self._decided((self._tuner.current.reasons or self._tuner.reasons)[-1])
        self._times.begin(self._tuner.trial)

    def _look_at_peak(self) -> None:
        """Once settled: what the measured peak leaves beyond what was foreseen is room, too.

        So blocks return to the device, or leave it when the peak was higher.
        """
        if self._corrections == 0 or self._meter is not None or not self._tuner.settled:
            return
        self._passes += 1
        if self._passes <= _STEPS_TO_PEAK:
            return
        usable = self._device.usable_bytes()
        room = None if self._limits is None else self._limits.device_room
        if usable is None or room is None:
            self._corrections = 0
            return
        target = int(usable * (1 - self.options.headroom))
        before = self._tuner.current
        left = target - self._device.memory()["peak_allocated"]
        unforeseen = left - (room - before.device_bytes)
        self._corrections -= 1
        if left >= 0 >= unforeseen:
            self._corrections = 0  # within the target, and others use what was to spare
            return
        assert self._limits is not None
        self._limits = ActivationLimits(
            room + (int(unforeseen * _USE_OF_SLACK) if unforeseen > 0 else unforeseen),
            self._ram_room(),
            self._limits.prefetch_depth,
            self._limits.inflight,
        )
        policy = self._policy_for(self._share())
        if policy.modes == before.modes:
            self._corrections = 0
            return
        self._tuner.current = policy
        self._decided(f"{policy.reasons[-1]} (corrected by the measured peak)")

    # -- RAM ----------------------------------------------------------------------------------

    def _ram_is_low(self, available: int) -> None:
        self._low = available  # the next forward acts on it

    def _give_ram_back(self, available: int) -> None:
        self._low = None
        if self.offloaded_blocks:
            policy = halve_pages(ActivationPolicy(tuple(self._modes)))
            self._say(
                f"activations: available RAM ({human(available)}) is under the floor of "
                f"{human(self._floor.floor_bytes)}: half of the {len(self.offloaded_blocks)} paged "
                f"blocks are recomputed from now on"
            )
            self._meter = None
            self._corrections = 0
            self._tuner = Fixed(policy)
            self.decision = "half of the paged blocks recomputed, since RAM ran low"
            self._adopt(policy, give_back=True)
        self._floor.rearm()
