"""Which calls of blocks are replayed, which are recorded, and which stay eager, and why.

A call whose signature comes for the second time, once placement and activations have settled, is
watched while it runs eagerly; the next one is recorded and replayed. Whatever stands against it is
said once, in plain words, and the call runs as it would without any of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ts_core.engine.replay.calls import Call, replayed
from ts_core.engine.replay.keeper import Keeper
from ts_core.engine.replay.known import Entry, KnownBlock
from ts_core.engine.replay.notes import Notes
from ts_core.engine.replay.observing import check_weights, observe
from ts_core.engine.replay.recorder import Recorder
from ts_core.engine.replay.signature import (
    NotReplayable,
    Spec,
    blocked_by_context,
    forward_settings,
    layouts,
    put_together,
    settings,
    take_apart,
)
from ts_core.engine.replay.watch import ModuleWatch
from ts_core.store.pager import ParamPager


class BlockReplay:
    """Replays the blocks of one model.

    Args:
        blocks: the stack, in order.
        recorder: of the device.
        device: the blocks compute on.
        say: takes decisions in plain words.
        settled: whether placement and activations have stopped changing.
        room_bytes: device memory that is left for recordings; None for any.
        give_up: asked before the first recording; says why there is to be none, or None.
        shared: `id`s of parameters that other modules outside their block use too.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        recorder: Recorder,
        device: torch.device,
        say: Callable[[str], None],
        settled: Callable[[], bool],
        room_bytes: Callable[[], int | None],
        shared: frozenset[int] = frozenset(),
        give_up: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._blocks = [KnownBlock(block) for block in blocks]
        self._recorder = recorder
        self._device = device
        self._settled = settled
        self._shared = shared
        self._notes = Notes(say)
        self._keeper = Keeper(recorder, device, self._notes, room_bytes, give_up)

    def call(
        self,
        index: int,
        mode: str,
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
        eager: Callable[[], Any],
        enter: Callable[[], None],
        guard: ParamPager | None,
    ) -> Any:
        """Run a block, whose weights are on the device, by replay or else by `eager`.

        Args:
            index: its position in the stack.
            mode: "keep" or "recompute", for its activations.
            forward: its own forward.
            args, kwargs: of the call.
            eager: runs it as without replay.
            enter: brings its weights to the device, in backward.
            guard: the pager, when plain weights of the block stream.
        """
        here = self._blocks[index]
        block = here.reference()
        if self._keeper.off is not None or block is None or here.recordings < 0:
            return eager()
        tensors: list[torch.Tensor] = []
        try:
            self._check_context()
            spec = take_apart((args, kwargs), tensors)
            key = self._key(spec, tensors, mode, here)
        except NotReplayable as why:
            return self._eagerly(str(why), eager)
        entry = here.find(key)
        if entry is None:
            comes_again = here.comes_again(key)
            self._notes.shapes(here)
            if not comes_again or not self._settled():
                return eager()
            return self._observe(here, block, key, spec, tensors, (args, kwargs), eager)
        if entry.refused or entry.observed is None or entry.watch is None:
            return eager()
        try:
            recording = self._keeper.find(here, entry)
            if recording is None and self._settled():
                recording = self._keeper.make(here, block, entry, forward, tensors, mode, guard)
        except NotReplayable as why:
            return self._eagerly(str(why), eager)
        if recording is None:
            return eager()
        self._notes.forwards += 1
        if not recording.observed.gradients:
            own = recording.run_forward(tensors)
        else:
            assert here.weights is not None
            own = replayed(
                Call(
                    recording,
                    self._recorder,
                    block,
                    here.weights,
                    recording.addresses,
                    entry.watch,
                    forward,
                    guard,
                    enter,
                    self._notes.backward,
                ),
                tensors,
            )
        results = iter(own)
        return put_together(
            recording.out_spec,
            iter([next(results) if at is None else tensors[at] for at in recording.passed]),
        )

    def paged(self, eager: Callable[[], Any]) -> Any:
        """Run a block whose activations are paged."""
        if self._keeper.off is None and self._settled():
            self._notes.eager("activations of a block are paged to host memory")
        return eager()

    def report(self) -> dict[str, Any]:
        """memory_report()["replay"]: counts, bytes, seconds, and what stayed eager and why."""
        notes = self._notes
        return {
            "on": self._keeper.off is None,
            "recorded": notes.recorded,
            "dropped": notes.dropped,
            "replayed_forwards": notes.forwards,
            "replayed_backwards": notes.backwards,
            "eager": dict(notes.reasons),
            "saved_bytes": self._saved_bytes(),
            "scratch_bytes": self._keeper.scratch_bytes(),
            "pool_bytes": self.pool_bytes(),
            "seconds_recording": notes.seconds,
        }

    def complete(self) -> bool:
        """Whether every block has been recorded, or cannot be, or is to be no more.

        Other places of weights, and smaller inputs, use the same pool of memory.
        """
        return self._keeper.off is not None or all(block.recordings for block in self._blocks)

    def size_bytes(self) -> int:
        """Device memory that recordings hold."""
        return self._saved_bytes() + self.beside_bytes()

    def beside_bytes(self) -> int:
        """Device memory that recordings hold but for what backward needs: beside activations."""
        return self._keeper.beside_bytes()

    def pool_bytes(self) -> int:
        """Device memory of the recordings' pool, which torch counts as free between replays."""
        return self._keeper.pool_bytes()

    def forget(self) -> None:
        """Drop every recording, and what it holds; what comes again is recorded anew.

        Calls whose backward is still to come keep theirs.
        """
        self._recorder.forget()
        for block in self._blocks:
            self._notes.dropped += block.forget()

    def close(self) -> None:
        """`forget`, for good."""
        self._keeper.off = "the model was unwrapped"
        self.forget()

    # -- what is known of a call --------------------------------------------------------------

    def _check_context(self) -> None:
        why = blocked_by_context(self._device)
        if why is not None:
            raise NotReplayable(why)
        self._keeper.check_place()

    def _key(
        self,
        spec: Spec,
        tensors: Sequence[torch.Tensor],
        mode: str,
        here: KnownBlock,
    ) -> Any:
        if not tensors:
            raise NotReplayable("a block gets no tensor")
        asked = [id(tensor) for tensor in tensors if tensor.requires_grad]
        if len(set(asked)) < len(asked):
            raise NotReplayable("one tensor that has a gradient is passed twice")
        found = layouts(tensors, self._device)
        weights = here.weights
        trained = () if weights is None else weights.trained()
        return (spec, found, mode, trained, forward_settings(self._device), settings())

    def _observe(
        self,
        here: KnownBlock,
        block: nn.Module,
        key: Any,
        spec: Spec,
        tensors: Sequence[torch.Tensor],
        called: tuple[Any, Any],
        eager: Callable[[], Any],
    ) -> Any:
        """The caller's own eager call, watched."""
        weights = here.weights_of(block)
        entry = Entry((*key[:3], weights.trained(), *key[4:]), None)
        self._notes.dropped += here.add(entry)
        try:
            entry.watch = ModuleWatch(block)
            check_weights(weights, self._shared)
        except NotReplayable as why:
            here.recordings = -1
            return self._eagerly(str(why), eager)
        entry.refused = True  # until it has turned out otherwise
        generator = self._recorder.generator
        result, shown = observe(
            block, weights, entry.watch, generator, called, spec, tensors, eager
        )
        if isinstance(shown, str):
            self._notes.eager(shown)
        else:
            entry.observed, entry.refused = shown, False
        return result

    def _eagerly(self, why: str, eager: Callable[[], Any]) -> Any:
        if self._settled():
            self._notes.eager(why)
        return eager()

    def _saved_bytes(self) -> int:
        return sum(block.saved_bytes() for block in self._blocks)
