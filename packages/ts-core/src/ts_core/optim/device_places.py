"""Optimizer state that the device updates.

- zero_copy: state in pinned RAM, read and written over the link by the update's kernel, both
  directions at once.
- resident: state in device memory.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import torch

from ts_core.device.base import Device, Event, Stream
from ts_core.errors import OutOfBudgetError
from ts_core.memory.arena import PinnedArena
from ts_core.optim.device_update import DeviceState, update_on_device
from ts_core.optim.gradients import Sealed
from ts_core.optim.places import Place, Update, pinned_zeros
from ts_core.transfer import PendingCopy, edges


class _Lane:
    """A stream of updates, and what must stay alive until those have run, in their order."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.kept: deque[tuple[Event, int, Sequence[Sealed]]] = deque()


class DeviceWork:
    """The streams that device updates run on, and what must stay alive until they have run.

    Updates over the link have a stream of their own: each takes long, and those in device memory,
    which are soon done, would wait behind them.

    Args:
        device: where the parameters are.
        max_inflight_bytes: of gradients kept for updates on their way.
    """

    def __init__(self, device: Device, max_inflight_bytes: int) -> None:
        self.device = device
        self._max_inflight_bytes = max_inflight_bytes
        self._near = _Lane(device.new_stream("optimizer"))
        self._link = _Lane(device.new_stream("optimizer over the link"))
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def stream(self, over_link: bool) -> Stream:
        """That updates of state in device memory, or over the link, are queued on."""
        return self._lane(over_link).stream

    def launch(self, work: Callable[[], None], after: Sequence[Event], over_link: bool) -> Event:
        """Queue `work` behind `after`; returns the event of its completion."""
        stream = self.stream(over_link)
        for event in after:
            edges.wait(self.device, stream, event)
        edges.pause(self.device, stream)
        self.device.launch(stream, work)
        edges.pause(self.device, stream)
        return stream.record()

    def keep(self, event: Event, gradients: Sequence[Sealed], over_link: bool) -> None:
        """Hold `gradients` until `event` of `launch`; beyond the limit wait for the oldest."""
        size = sum(each.flat.numel() * each.flat.element_size() for each in gradients)
        lane = self._lane(over_link)
        with self._lock:
            lane.kept.append((event, size, gradients))
            self._kept_bytes += size
            self._retire()
            while self._kept_bytes > self._max_inflight_bytes:
                oldest = lane if lane.kept else self._near if lane is self._link else self._link
                self.device.host_wait(oldest.kept[0][0])
                self._let_go(oldest)

    def let_go(self) -> None:
        """Hold nothing.

        The streams that gradients were made on wait for what reads them, and torch gives their
        memory to later work of those streams only.
        """
        with self._lock:
            self._retire()
            for lane in (self._near, self._link):
                # Of each stream the newest, which is behind the others.
                newest = {one.made_on: event for event, _, kept in lane.kept for one in kept}
                for stream, event in newest.items():
                    if stream is not None:
                        edges.wait(self.device, stream, event)
                while lane.kept:
                    self._let_go(lane)

    def synchronize(self) -> None:
        """Wait for what has been queued."""
        for lane in (self._near, self._link):
            lane.stream.synchronize()

    def _lane(self, over_link: bool) -> _Lane:
        return self._link if over_link else self._near

    def _retire(self) -> None:
        for lane in (self._near, self._link):
            while lane.kept and lane.kept[0][0].query():
                self._let_go(lane)

    def _let_go(self, lane: _Lane) -> None:
        self._kept_bytes -= lane.kept.popleft()[1]


class DevicePlace(Place):
    """State that a device kernel updates where it is: pinned RAM (zero copy) or device memory.

    Args:
        target: the parameters' flat memory, for their present values.
        work: streams of the updates.
        arena: where pinned state comes from.
        name: "resident" (state in device memory) or "zero_copy" (in pinned RAM).
        in_place: the parameters' memory is the host's, and the device updates them there.

    Raises:
        OutOfBudgetError: no room in device memory; or "zero_copy" on a GPU, and no more memory can
            be page-locked.
    """

    on_device = True

    def __init__(
        self,
        target: torch.Tensor,
        work: DeviceWork,
        arena: PinnedArena,
        name: str,
        in_place: bool = False,
    ) -> None:
        self.name = name
        resident = name == "resident"
        self.over_link = not resident
        self._work = work
        where = work.device.torch_device if resident else None
        make = (lambda n, d: torch.zeros(n, dtype=d, device=where)) if resident else None
        try:
            self.state = _state(target, make or pinned_zeros(arena))
        except torch.OutOfMemoryError as error:
            raise OutOfBudgetError(
                f"device memory has no room for the state of {target.numel()} values: {error}"
            ) from error
        self._written = self._record() if resident else None
        if work.device.kind == "cuda":
            linked = self.state.tensors() if name == "zero_copy" else []
            _require_pinned([*linked, *([target] if in_place else [])], arena)

    def update(self, update: Update, scale: float) -> Event | None:
        return update_together([(self, update)], scale)

    @property
    def work(self) -> DeviceWork:
        """The streams of its updates."""
        return self._work

    def after(self, update: Update) -> list[Event]:
        """What the update waits for (worker thread)."""
        after = [*_queued(update.behind), *update.gradients.ready(self._work.device)]
        if self._written is not None:  # a paged weight's gradient may have left before that
            after.append(self._written)
            self._written = None
        return after

    def run(self, update: Update, scale: float) -> None:
        """The kernels of the update, on the current stream."""
        target, gradient = update.target, update.gradients.flat
        for segment in update.segments:
            values, grads, state = target, gradient, self.state
            start, end = segment.offset, segment.offset + segment.size
            if segment.size < target.numel():  # a view takes as long as a launch's tenth
                values, grads, state = (
                    target[start:end],
                    gradient[start:end],
                    state.slice(start, end),
                )
            update_on_device(
                values,
                grads,
                state,
                update.hyper,
                segment.step,
                scale,
                over_link=self.over_link,
                device=self._work.device.torch_device,
            )

    def live(self) -> dict[str, torch.Tensor]:
        found = {"exp_avg": self.state.exp_avg, "exp_avg_sq": self.state.exp_avg_sq}
        if self.state.master is not None:
            found["master"] = self.state.master
        return found

    def read(self, name: str, offset: int, out: torch.Tensor) -> None:
        out.copy_(self.live()[name][offset : offset + out.numel()])

    def write(self, name: str, offset: int, values: torch.Tensor) -> None:
        if self.name == "resident":
            edges.pause(self._work.device, self._work.device.compute_stream())
        self.live()[name][offset : offset + values.numel()].copy_(values)
        if self.name == "resident":
            self._written = self._record()

    def _record(self) -> Event:
        """An event after what this thread has written into state in device memory."""
        return self._work.device.compute_stream().record()

    def host_bytes(self) -> int:
        return 0 if self.name == "resident" else self._bytes()

    def device_bytes(self) -> int:
        return self._bytes() if self.name == "resident" else 0

    def _bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.state.tensors())


def update_together(updates: Sequence[tuple[Place, Update]], scale: float) -> Event:
    """Updates of one stream as one piece of work, whose waits and whose end are queued once.

    For the host each of these takes as long as a kernel's launch.

    Args:
        updates: of `DevicePlace`s of one `DeviceWork`, all over the link or all not.
        scale: as for `Place.update`, from the worker thread too.
    """
    parts = [(place, update) for place, update in updates if isinstance(place, DevicePlace)]
    assert parts and len(parts) == len(updates)
    first = parts[0][0]
    work, over_link = first.work, first.over_link
    # (most wait for the same event; the dictionary leaves each in once)
    after = {id(event): event for place, update in parts for event in place.after(update)}

    def run() -> None:
        for place, update in parts:
            place.run(update, scale)

    try:
        event = work.launch(run, list(after.values()), over_link)
    except BaseException:
        work.stream(over_link).synchronize()  # the first of them may be reading their gradients
        raise
    kept = [update.gradients for _, update in parts if not update.held]
    if kept:
        work.keep(event, kept, over_link)
    return event


def _queued(readers: Sequence[Event]) -> list[Event]:
    """Events that a stream can wait for; those of copies that never started are left out."""
    events = [r.started() if isinstance(r, PendingCopy) else r for r in readers]
    return [event for event in events if event is not None]


def _require_pinned(tensors: Sequence[torch.Tensor], arena: PinnedArena) -> None:
    """A GPU faults on memory that is not page-locked."""
    if not all(tensor.is_pinned() for tensor in tensors if tensor.numel()):
        raise OutOfBudgetError(
            f"optimizer state for a device kernel must be page-locked, and no more memory could "
            f"be: {arena.refusal or 'the limit is reached'}. Raise the limit (`ulimit -l`, see "
            f"`trainstream doctor`), or use optimizer_mode='cpu'."
        )


def _state(target: torch.Tensor, make: Callable[[int, torch.dtype], torch.Tensor]) -> DeviceState:
    numel = target.numel()
    master = None
    if target.dtype is not torch.float32:
        master = make(numel, torch.float32)
        master.copy_(target)
    return DeviceState(make(numel, torch.float32), make(numel, torch.float32), master)
