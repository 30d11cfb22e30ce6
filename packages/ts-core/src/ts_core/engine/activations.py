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

from ts_core.engine.activation_memory import ActivationMemory
from ts_core.engine.activation_meter import Range, plain_tensors, stateful_argument
from ts_core.engine.activation_options import ActivationOptions
from ts_core.engine.activation_pages import PageStore, Span
from ts_core.engine.activation_probe import ActivationProbe, numel_in
from ts_core.engine.activation_search import PolicySearch
from ts_core.engine.page_transfers import batches_of
from ts_core.engine.saved_tensors import outer_checkpoint
from ts_core.errors import OptionError, StateError
from ts_core.memory.arena import PinnedArena
from ts_core.schedule.activation_policy import (
    ActivationPolicy,
    BlockActivations,
    halve_pages,
)
from ts_core.schedule.plan import KEEP, OFFLOAD, RECOMPUTE, human
from ts_core.transfer import CopyEngine


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
        self.measured: list[BlockActivations] = [BlockActivations(0, 0, 0)] * len(blocks)
        self.recomputed = 0
        self.memory = ActivationMemory(copies, options, arena, read_ram)
        self._blocks = list(blocks)
        self._copies = copies
        self._device = copies.device
        self._say = say
        self._search = PolicySearch(options, self._device, self.memory, len(blocks), say)
        self.store = PageStore(
            copies, self.memory.buffers, options.min_bytes, options.prefetch_depth
        )
        self._probe = ActivationProbe(options, self._device, len(blocks), self.store)
        self._modes: list[str] = []
        self._moves = False
        self._weights: list[torch.Tensor] = []
        self._pages: list[list[tuple[Range, int]]] = [[] for _ in blocks]
        # Told what was measured, and the room there is beyond a step that recomputes every block;
        # returns the bytes of it that have a better use.
        self.share_room: Callable[[Sequence[BlockActivations], int], int] | None = None
        self.pledge: Callable[[Sequence[BlockActivations], int], int] | None = None
        # Told that a larger input will be measured, and how many times as large it is.
        self.before_larger: Callable[[float], None] | None = None
        # Whether weights of blocks stream.
        self.streams: Callable[[], bool] = lambda: False
        self._search.streams = lambda: self.streams()
        # Whether blocks may change place now, with their trained weights and gradients.
        self.may_move: Callable[[], bool] = lambda: True
        self._begin_probe()
        self._say_how_it_begins()

    # -- what was decided ---------------------------------------------------------------------

    @property
    def decision(self) -> str:
        """The last decision, in plain words."""
        return self._search.decision

    @property
    def device_type(self) -> str:
        """Of the device that the blocks compute on: "cuda" or "cpu"."""
        return self._device.torch_device.type

    @property
    def device_bytes(self) -> int:
        """Device memory that the policy takes beyond a step that recomputes every block."""
        return self._search.current.device_bytes

    @property
    def measuring(self) -> bool:
        """Whether a probe is under way, or has ended and the next forward decides by it."""
        return self._probe.meter is not None

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
        """Whether the policy is expected to change by itself."""
        if self._probe.meter is not None:
            return self.options.searches and self._device.separate_memory
        return self._search.adapting

    @property
    def stats(self) -> dict[str, int]:
        """Counters of pages and host buffers, in bytes and pieces."""
        return {
            **asdict(self.store.stats),
            "recomputed": self.recomputed,
            "host_bytes": self.memory.buffers.held_bytes,
            "host_bytes_in_use": self.memory.buffers.used_bytes,
            "host_allocations": self.memory.buffers.allocations,
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
        if self._probe.meter is not None:
            raise StateError("nothing is measured yet: run a training step first.")
        modes = [mode if mode != KEEP else OFFLOAD for mode in self._modes]
        modes[total - count :] = [KEEP] * count
        self._search.fix(
            ActivationPolicy(tuple(modes)),
            f"{count} of {total} blocks keep their activations, as asked",
        )

    def close(self) -> None:
        """End the watch on RAM. Pages that graphs still hold stay readable."""
        self.memory.floor.stop()

    # -- called by the runner -----------------------------------------------------------------

    @property
    def done(self) -> bool:
        """Whether blocks run as if nothing were here."""
        return (
            self._probe.meter is None
            and not self._moves
            and not self.adapting
            and not self._search.watching
        )

    def new_pass(self, args: Any = (), kwargs: Any = None) -> None:
        """A forward of the model begins, with these arguments, outside any backward."""
        training = torch.is_grad_enabled()
        if self.memory.low is not None:
            self._give_ram_back(self.memory.low)
        elif training:
            if self._probe.meter is not None:
                self._finish_probe()
            if self._probe.meter is not None:
                self._search.stop_timing()
            else:
                self._search.time_steps()
                self._search.look_at_peak()
        if not training:
            self._search.skip_step()
        if tuple(self._modes) != self._search.current.modes and self._probe.meter is None:
            self._adopt(self._search.current)
        if training:
            self._look_at_input(args, kwargs)
        if self._probe.meter is not None:
            self._weights = plain_tensors(self._blocks)
            self._probe.meter.begin(self._weights)
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
        meter = None if checkpointed else self._probe.meter
        if self._probe.meter is not None:
            self._probe.meter.enter(index, args, kwargs)
        call = self.store.new_call(index)
        previous = call.previous
        self.recomputed += mode == RECOMPUTE
        return Span(
            mode,
            call,
            None if meter is None else meter.observer(index),
            mode != OFFLOAD and previous is not None and bool(previous.pages),
        )

    def end(self, index: int, span: Span, failed: bool) -> None:
        """A block's forward has ended."""
        span.call.end(failed)
        if self._probe.meter is not None:
            self._probe.meter.broken |= failed
            self._probe.meter.finished.add(index)

    # -- the probe ----------------------------------------------------------------------------

    def _begin_probe(self) -> None:
        """Measure in the next training forward."""
        self._set_modes(self._probe.begin())
        self.memory.buffers.limit_bytes = self.memory.ram_room()
        if OFFLOAD in self._modes:
            self.memory.floor.start()

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
            which = "activations" if set(self._modes) == {KEEP} else "other activations"
            self._say(f"{autos}: {which} stay, as this device's memory is the host's")

    def _finish_probe(self) -> None:
        """The forward before this one was the probe, if it ran to its end."""
        meter = self._probe.finish(self.may_move)
        if meter is None:
            return
        self.measured = meter.result()
        self._pages = meter.pages()
        self.memory.set_apart(self.measured, max(map(_trained_bytes, self._blocks), default=0))
        room = self.memory.device_room(self.measured, self._modes)
        if room is not None and self.share_room is not None:
            room -= self.share_room(self.measured, room)
        if room is not None and self.pledge is not None:
            room -= self.pledge(self.measured, room)
        self._search.begin(self.measured, room)

    def _look_at_input(self, args: Any, kwargs: Any) -> None:
        """Measure (again) with the largest input so far."""
        if not self._probe.larger(args, kwargs):
            return
        before, now = self._probe.numel, numel_in(args, kwargs)
        self._say(f"activations: an input of {now} values instead of {before}: measuring again")
        if self.before_larger is not None:
            self.before_larger(now / max(1, before))
        self._probe.numel = now
        self._begin_probe()

    def _cannot_recompute(self, index: int, stateful: str) -> str:
        if self._search.recomputes:
            self._search.recomputes = False
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
        self.memory.carve(self._slices() if OFFLOAD in self._modes else None, give_back)
        if self.adapting or self._search.watching:
            self._device.reset_peak()
        self._search.adopted()

    def _set_modes(self, modes: Sequence[str]) -> None:
        self._modes = list(modes)
        self._moves = any(mode != KEEP for mode in modes)

    def _slices(self) -> list[int]:
        """Bytes of the host slices that a step takes: what several blocks save is paged once."""
        seen: set[Range] = set()
        found: list[int] = []
        for index in self.offloaded_blocks:
            new = [(key, size) for key, size in self._pages[index] if key not in seen]
            seen.update(key for key, _ in new)
            found += batches_of((size for _, size in new), self.store.transfers.batch_bytes)
        return found

    def _give_ram_back(self, available: int) -> None:
        """RAM has run low: half of the paged blocks are recomputed from now on."""
        self.memory.low = None
        if self.offloaded_blocks:
            policy = halve_pages(ActivationPolicy(tuple(self._modes)))
            self._say(
                f"activations: available RAM ({human(available)}) is under the floor of "
                f"{human(self.memory.floor.floor_bytes)}: half of the "
                f"{len(self.offloaded_blocks)} paged blocks are recomputed from now on"
            )
            self._probe.drop()
            text = "half of the paged blocks recomputed, since RAM ran low"
            self._search.fix(policy, text, silently=True)
            self._adopt(policy, give_back=True)
        self.memory.floor.rearm()


def _trained_bytes(block: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in block.parameters() if p.requires_grad)
