"""Which calls of blocks are replayed, which are recorded, and which stay eager, and why.

A call whose signature comes for the second time, once placement and activations have settled, is
watched while it runs eagerly; the next one is recorded and replayed. Whatever stands against it is
said once, in plain words, and the call runs as it would without any of this.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ts_core.engine.activation_meter import tensors_in
from ts_core.engine.replay.calls import Call, replayed
from ts_core.engine.replay.inspector import Before, Inspector, foreign_leaves
from ts_core.engine.replay.memory import Scratch
from ts_core.engine.replay.recorder import Recorder
from ts_core.engine.replay.recording import Observed, Recording
from ts_core.engine.replay.signature import (
    NotReplayable,
    blocked_by_context,
    forward_settings,
    layouts,
    put_together,
    settings,
    take_apart,
)
from ts_core.engine.replay.watch import ModuleWatch, Weights
from ts_core.schedule.plan import human
from ts_core.store.leaves import is_wrapper
from ts_core.store.pager import ParamPager

# Signatures (shapes, arguments, settings, states of the block) that one block keeps recordings of.
SIGNATURES = 4
# Places of its weights (slots) for which one signature keeps recordings.
PLACES = 4
# Recordings that one block may ask for in all: shapes that never repeat are not worth more.
RECORDINGS = 24
_SEEN = 64
# Shapes of one block's arguments, seen once or more often, above which most cannot be kept.
_FEW = 2 * SIGNATURES


@dataclass
class Entry:
    """One signature of one block, in one Python state."""

    key: Any
    watch: ModuleWatch | None
    refused: bool = False
    observed: Observed | None = None
    recordings: OrderedDict[tuple[int, ...], Recording] = field(default_factory=OrderedDict)


class _Block:
    def __init__(self, block: nn.Module) -> None:
        self.reference = weakref.ref(block)
        self.weights: Weights | None = None
        self.seen: OrderedDict[Any, int] = OrderedDict()
        self.entries: list[Entry] = []  # the last used first
        self.recordings = 0


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
        self._blocks = [_Block(block) for block in blocks]
        self._recorder = recorder
        self._device = device
        self._say = say
        self._settled = settled
        self._room_bytes = room_bytes
        self._shared = shared
        self._give_up = give_up
        self._scratch = Scratch(device)
        self._place: Any = None
        self._off: str | None = None
        self._reasons: dict[str, int] = {}
        self._counts = {"forward": 0, "backward": 0, "recorded": 0, "dropped": 0}
        self._seconds = 0.0
        self._shapes_told = False

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
        if self._off is not None or block is None or here.recordings < 0:
            return eager()
        tensors: list[torch.Tensor] = []
        try:
            self._check_context()
            spec = take_apart((args, kwargs), tensors)
            key = self._key(spec, tensors, mode, here, block)
        except NotReplayable as why:
            return self._eagerly(str(why), eager)
        entry = self._find(here, key)
        if entry is None:
            comes_again = _comes_again(here, key)
            self._tell_of_shapes(here)
            if not comes_again or not self._settled():
                return eager()
            return self._observe(here, block, key, spec, tensors, args, kwargs, eager)
        if entry.refused or entry.observed is None or entry.watch is None:
            return eager()
        try:
            recording = self._recording(here, block, entry, forward, tensors, mode, guard)
        except NotReplayable as why:
            return self._eagerly(str(why), eager)
        if recording is None:
            return eager()
        self._counts["forward"] += 1
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
                    self._count_backward,
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
        if self._off is None and self._settled():
            self._note("activations of a block are paged to host memory")
        return eager()

    def report(self) -> dict[str, Any]:
        """memory_report()["replay"]: counts, bytes, seconds, and what stayed eager and why."""
        return {
            "on": self._off is None,
            "recorded": self._counts["recorded"],
            "dropped": self._counts["dropped"],
            "replayed_forwards": self._counts["forward"],
            "replayed_backwards": self._counts["backward"],
            "eager": dict(self._reasons),
            "saved_bytes": self._saved_bytes(),
            "scratch_bytes": self._scratch.size_bytes(),
            "pool_bytes": self.pool_bytes(),
            "seconds_recording": self._seconds,
        }

    def size_bytes(self) -> int:
        """Device memory that recordings hold."""
        return self._saved_bytes() + self.beside_bytes()

    def beside_bytes(self) -> int:
        """Device memory that recordings hold but for what backward needs: beside activations."""
        return self._scratch.size_bytes() + self.pool_bytes()

    def pool_bytes(self) -> int:
        """Device memory of the recordings' pool, which torch counts as free between replays."""
        return self._recorder.pool_bytes()

    def forget(self) -> None:
        """Drop every recording, and what it holds; what comes again is recorded anew.

        Calls whose backward is still to come keep theirs.
        """
        for block in self._blocks:
            self._counts["dropped"] += sum(len(entry.recordings) for entry in block.entries)
            block.entries.clear()
            block.seen.clear()
            block.recordings = min(block.recordings, 0)
        self._recorder.forget()

    def close(self) -> None:
        """`forget`, for good."""
        self._off = "the model was unwrapped"
        self.forget()

    # -- what is known of a call --------------------------------------------------------------

    def _check_context(self) -> None:
        why = blocked_by_context(self._device)
        if why is not None:
            raise NotReplayable(why)
        place = self._recorder.place()
        if self._place is not None and place != self._place:
            raise NotReplayable("a block runs on another stream or thread than the first recording")

    def _key(
        self,
        spec: Any,
        tensors: Sequence[torch.Tensor],
        mode: str,
        here: _Block,
        block: nn.Module,
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

    def _find(self, here: _Block, key: Any) -> Entry | None:
        for number, entry in enumerate(here.entries):
            if entry.key == key and (entry.watch is None or entry.watch.unchanged()):
                if number:
                    here.entries.insert(0, here.entries.pop(number))
                return entry
        return None

    def _observe(
        self,
        here: _Block,
        block: nn.Module,
        key: Any,
        spec: Any,
        tensors: Sequence[torch.Tensor],
        args: Any,
        kwargs: Any,
        eager: Callable[[], Any],
    ) -> Any:
        """The caller's own eager call, watched."""
        if here.weights is None or not _same_weights(here.weights, block):
            here.weights = Weights(block)
        weights = here.weights
        key = (*key[:3], weights.trained(), *key[4:])
        entry = Entry(key, None)
        here.entries.insert(0, entry)
        self._drop_entries(here)
        try:
            entry.watch = ModuleWatch(block)
            self._check_weights(weights)
        except NotReplayable as why:
            here.recordings = -1
            return self._eagerly(str(why), eager)
        generator = self._recorder.generator
        state, before = generator.get_state(), Before(block, self._device)
        inspector = Inspector(tensors, weights)
        entry.refused = True  # until it has turned out otherwise
        with inspector:
            result = eager()
        try:
            outputs: list[torch.Tensor] = []
            take_apart(result, outputs)
            found = inspector.reason or before.broken()
            after: list[torch.Tensor] = []
            if found is None and not entry.watch.unchanged():
                found = "it changes modules or their attributes in forward"
            if found is None and (
                take_apart((args, kwargs), after) != spec
                or any(a is not b for a, b in zip(after, tensors, strict=True))
            ):
                found = "it changes the containers that it is given"
            if found is None and foreign_leaves(outputs, tensors, weights.params):
                found = "gradients go to something that is neither an argument nor its parameter"
            if found is not None:
                raise NotReplayable(found)
        except NotReplayable as error:
            self._note(str(error))
            return result
        gradients = torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(result))
        random = not torch.equal(state, generator.get_state())
        entry.observed = Observed(spec, random, inspector.outside, gradients)
        entry.refused = False
        return result

    def _check_weights(self, weights: Weights) -> None:
        for param in weights.params:
            if param.requires_grad and is_wrapper(param):
                raise NotReplayable(f"a {type(param).__name__} is trained")
            if param.requires_grad and id(param) in self._shared:
                raise NotReplayable("a trained parameter is used by other modules too")
        for tensor in (*weights.params, *weights.buffers):
            if not is_wrapper(tensor) and tensor.layout is not torch.strided:
                raise NotReplayable("a weight is no ordinary strided tensor")

    # -- recording ----------------------------------------------------------------------------

    def _recording(
        self,
        here: _Block,
        block: nn.Module,
        entry: Entry,
        forward: Callable[..., Any],
        tensors: Sequence[torch.Tensor],
        mode: str,
        guard: ParamPager | None,
    ) -> Recording | None:
        """That of the weights where they are now; None for a call that is to be eager."""
        assert here.weights is not None and entry.observed is not None
        addresses = here.weights.addresses()
        found = entry.recordings.get(addresses)
        if found is not None:
            entry.recordings.move_to_end(addresses)
            if found.saved.size_bytes and _in_use(found):
                raise NotReplayable("a block runs again before the backward of its last call")
            return found
        if not self._settled():
            return None
        if not self.beside_bytes():
            self._off = self._give_up()
            if self._off is not None:
                self._say(f"cuda_graphs: off, since {self._off}")
                return None
        if here.recordings >= RECORDINGS:
            raise NotReplayable(
                f"a block was recorded {RECORDINGS} times already, since shapes or places of its "
                f"weights keep changing"
            )
        while len(entry.recordings) >= PLACES:
            entry.recordings.popitem(last=False)
            self._counts["dropped"] += 1
        here.recordings += 1
        begin = time.perf_counter()
        try:
            made = Recording(
                self._recorder,
                self._scratch,
                block,
                here.weights,
                forward,
                tensors,
                entry.observed,
                mode,
                guard,
                lambda needed: self._check_room(here, entry, needed),
            )
        except Exception as error:
            entry.refused = True
            if self._recorder.broken:
                self._off = "a recording failed"
            if isinstance(error, NotReplayable):
                raise
            text = str(error).strip().split("\n")[0]
            raise NotReplayable(f"recording failed: {type(error).__name__}: {text}") from error
        finally:
            self._seconds += time.perf_counter() - begin
        if not self._counts["recorded"]:
            self._place = self._recorder.place()
            self._say("cuda_graphs: blocks are recorded from here on, and replayed")
        self._counts["recorded"] += 1
        entry.recordings[addresses] = made
        return made

    def _check_room(self, here: _Block, entry: Entry, needed: int) -> None:
        room = self._room_bytes()
        if room is None or needed <= room:
            return
        others = [other for other in reversed(here.entries) if other is not entry]
        for other in others:  # the least recently used first
            for recording in other.recordings.values():
                room += recording.size_bytes
            self._counts["dropped"] += len(other.recordings)
            other.recordings.clear()
            if needed <= room:
                return
        raise NotReplayable(
            f"the device has no room for what backward needs of a block at a fixed place "
            f"({human(needed)}, {human(max(room, 0))} are free)"
        )

    def _drop_entries(self, here: _Block) -> None:
        while len(here.entries) > SIGNATURES:
            self._counts["dropped"] += len(here.entries.pop().recordings)

    # -- counting -----------------------------------------------------------------------------

    def _saved_bytes(self) -> int:
        return sum(
            recording.size_bytes
            for block in self._blocks
            for entry in block.entries
            for recording in entry.recordings.values()
        )

    def _count_backward(self, why: str | None) -> None:
        if why is None:
            self._counts["backward"] += 1
        else:
            self._note(why)

    def _eagerly(self, why: str, eager: Callable[[], Any]) -> Any:
        if self._settled():
            self._note(why)
        return eager()

    def _tell_of_shapes(self, here: _Block) -> None:
        """Say once when so many shapes come that few can be kept, and what helps."""
        if self._shapes_told or len(here.seen) <= SIGNATURES:
            return
        counts: Counter[tuple[torch.Size, ...]] = Counter()
        for key, count in here.seen.items():
            counts[tuple(layout[0] for layout in key[1])] += count
        again = sum(count > 1 for count in counts.values())
        if again <= SIGNATURES and len(counts) <= _FEW:
            return
        self._shapes_told = True
        self._say(
            f"cuda_graphs: batches of {len(counts)} shapes have come, and a block keeps recordings "
            f"of {SIGNATURES}: the others run eagerly, or are recorded anew in place of one of "
            f"those. Let few lengths come: pad batches to a multiple (pad_to_multiple_of= of "
            f"TrainStreamTrainer), or pack rows of one length (packing=)"
        )

    def _note(self, why: str) -> None:
        if why not in self._reasons:
            self._say(f"cuda_graphs: blocks run eagerly where {why}")
        self._reasons[why] = self._reasons.get(why, 0) + 1


def _in_use(recording: Recording) -> bool:
    call = None if recording.live is None else recording.live()
    return call is not None and not call.done


def _comes_again(here: _Block, key: Any) -> bool:
    """Whether a signature has come before; counts it."""
    count = here.seen.pop(key, 0) + 1
    here.seen[key] = count
    while len(here.seen) > _SEEN:
        here.seen.popitem(last=False)
    return count > 1


def _same_weights(weights: Weights, block: nn.Module) -> bool:
    now = list(block.parameters())
    return len(now) == len(weights.params) and all(
        a is b for a, b in zip(now, weights.params, strict=True)
    )
