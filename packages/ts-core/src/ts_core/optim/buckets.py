"""A bucket: parameters that are transferred and updated as one piece.

It holds parameters of one param group, dtype and device, either one large parameter or many small
ones (`layout`). It counts their gradients, and turns a complete step into one update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from ts_core import _native
from ts_core.device.base import Event
from ts_core.errors import StateError
from ts_core.memory.arena import PinnedArena
from ts_core.optim.data_parallel import Ranks
from ts_core.optim.device_update import DTYPE_NAMES
from ts_core.optim.gradients import Gradients, Sealed
from ts_core.optim.homed import HomedLayout
from ts_core.optim.layout import FlatLayout, Hyper, local
from ts_core.optim.parts import PartSums
from ts_core.optim.places import Place, Segment, Update
from ts_core.optim.read_guard import Flight
from ts_core.optim.refusals import IN_TIME
from ts_core.transfer import CopyEngine


@dataclass(frozen=True)
class Point:
    """A point of a compute stream.

    Attributes:
        event: recorded there.
        stream: `Device.compute_key` of the stream.
    """

    event: Event
    stream: int | None


@dataclass(frozen=True)
class Measured:
    """What the host found in gradients: per parameter the sum of squares (fp64), and how many
    values are not finite."""

    squares: tuple[float, ...]
    nonfinite: int


class Bucket:
    """Gradients and AdamW state of some parameters.

    Args:
        layout: the parameters in flat memory.
        group_index: their param group.
        copies: engine of the link to their device.
        arena: where host buffers that cross the link come from.
        parts: adds gradients of several passes in host memory.
        place: where their state lives.

    Attributes:
        steps: updates so far, per parameter.
        counts: gradients of the step so far, per parameter.
        order: of its last gradient among all buckets' (the update order is the reverse).
        closed: all gradients of the step are here.
        home: of the only parameter, when it lives in the image of a paged block.
        flight: the last update while it is (or may be) on its way.
    """

    def __init__(
        self,
        layout: FlatLayout,
        group_index: int,
        copies: CopyEngine,
        arena: PinnedArena,
        parts: PartSums,
        place: Place,
    ) -> None:
        self.layout = layout
        self.params = layout.params
        self.group_index = group_index
        self.steps = [0] * len(self.params)
        self.counts = [0] * len(self.params)
        self.order = 0
        self.closed = False
        self.used: Hyper | None = None
        self.flight: Flight | None = None
        self.place = place
        self.home = layout.home if isinstance(layout, HomedLayout) else None
        self._task = -1
        self._copies = copies
        self._arena = arena
        self._parts = parts
        self._sealed: Sealed | None = None
        self._pending: dict[int, torch.Tensor] = {}
        self._gradients = self._new_gradients()
        self._flat = layout.flat()

    def _new_gradients(self) -> Gradients:
        return Gradients(
            self.layout, self._copies, self._arena, self._parts, not self.gradients_stay
        )

    def host_bytes(self) -> int:
        """Host memory of state, gradients and what crosses the link."""
        return self.place.host_bytes() + self._gradients.host_bytes()

    # -- gradients -------------------------------------------------------------------------

    def collect(self, position: int, grad: torch.Tensor, expected: int, order: int) -> None:
        """Take one parameter's gradient of one backward.

        Args:
            position: of the parameter in the bucket.
            grad: its gradient; owned by the bucket from now on.
            expected: backward passes per step.
            order: rises with every gradient of the optimizer.

        Raises:
            StateError: more passes than expected.
        """
        task = torch._C._current_graph_task_id()
        another_part = self.home is not None and task != -1 and task == self._task
        if self.closed:
            raise StateError(
                f"a parameter of shape {tuple(grad.shape)} received a gradient after the step's "
                f"last one: its {self.counts[position]} backward passes were complete. {IN_TIME}"
            )
        if self.counts[position] >= expected and not another_part:
            raise StateError(
                f"a parameter of shape {tuple(grad.shape)} received gradient number "
                f"{self.counts[position] + 1} before step(), but accumulation_steps={expected}. "
                f"{IN_TIME} zero_grad() drops an unfinished step."
            )
        self.finish()  # the last update still reads the memory that gradients come into
        if position in self._pending:
            self._absorb()
        self._task = task
        self._gradients.several = expected > 1 or (self.home is not None and self.home.in_parts)
        self.counts[position] += not another_part
        self.order = order
        grad = local(grad.detach())
        if grad.dtype is not self.layout.dtype:
            grad = grad.to(self.layout.dtype)
        self._pending[position] = grad
        if len(self._pending) == len(self.params):
            self._absorb(not another_part)

    @property
    def gradient_bytes(self) -> int:
        """Of one step."""
        return self.layout.numel * self.layout.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Of fp32 state."""
        return self.layout.numel * (12 if self.has_master else 8)

    @property
    def near_share(self) -> float:
        """Of the values of a state in several places, those whose state is in device memory."""
        if self.place.name != "shared":
            return 0.0
        return self.place.device_bytes() / self.state_bytes

    @property
    def gradients_stay(self) -> bool:
        """Whether gradients wait on the device for an update there."""
        return self.place.on_device and self.home is None

    def complete(self, expected: int) -> bool:
        """Whether every parameter is known to have all its gradients of the step."""
        if self.home is not None and self.home.in_parts:
            return False
        return all(count == expected for count in self.counts)

    def started(self) -> bool:
        """Whether any gradient of the step has come."""
        return any(self.counts)

    def _absorb(self, new: bool = True) -> None:
        pending, self._pending = self._pending, {}
        self._gradients.absorb(pending, self.counts, new)

    def close(self, measure: bool) -> torch.Tensor | None:
        """All gradients of the step are here.

        Args:
            measure: their norms are wanted.

        Returns:
            Their 2-norms (1-D fp64, on the device) where they leave it now. Where they wait there,
            they are measured together with others (`waiting_gradients`), else by `measuring`.
        """
        self._absorb()
        self.closed = True
        self.take_foreign_values()
        self._sealed, norms = self._gradients.seal(self.counts, measure and not self.measured_late)
        return norms

    def take_foreign_values(self) -> None:
        """Values the user wrote since the last update count from now on."""
        found = self.layout.foreign_writes()
        if found:  # the memory may be another
            self._flat = self.layout.flat()
        for position in found:
            offset, size = self.layout.offsets[position], self.layout.sizes[position]
            self.place.take_values(offset, self._flat[offset : offset + size])

    def measuring(self, threads: int) -> Callable[[], Measured]:
        """Work for a host thread: wait for the gradients and measure them."""
        assert self._sealed is not None
        sealed, device = self._sealed, self._copies.device
        runs = self._runs()

        def work() -> Measured:
            return _measure(sealed.land(device), runs, threads)

        return work

    @property
    def measured_late(self) -> bool:
        """Whether the device measures gradients once all have come, as they wait there."""
        return self.gradients_stay and self._copies.device.separate_memory

    def waiting_gradients(self) -> list[torch.Tensor]:
        """Each closed gradient, where it waits."""
        assert self._sealed is not None
        flat = self._sealed.flat
        return self.layout.split(flat) if self.layout.many else [flat]

    def averaging(self, ranks: Ranks, measure: bool, threads: int) -> Callable[[], Measured]:
        """Work for a host thread: make the gradients their mean over `ranks`, and measure that."""
        assert self._sealed is not None
        sealed, device, runs = self._sealed, self._copies.device, self._runs()

        def work() -> Measured:
            if sealed.behind is not None:
                device.host_wait(sealed.behind)
            mean_h = ranks.average_(sealed.land(device))
            return _measure(mean_h, runs, threads) if measure else Measured((), 0)

        return work

    def _runs(self) -> list[tuple[int, int]]:
        """(offset, size) of the parameters that have a gradient."""
        return [
            (self.layout.offsets[position], self.layout.sizes[position])
            for position, count in enumerate(self.counts)
            if count
        ]

    def trained(self) -> list[torch.nn.Parameter]:
        """The parameters that have a gradient."""
        return [p for p, count in zip(self.params, self.counts, strict=True) if count]

    def note_versions(self) -> None:
        """The versions of those that have a gradient, just counted up, are ours."""
        self.layout.note_versions([p for p, count in enumerate(self.counts) if count])

    def reset(self) -> None:
        """Forget the step's gradients and counts."""
        self._pending.clear()
        self._gradients.reset()
        self._sealed = None
        self._task = -1
        self.counts = [0] * len(self.params)
        self.closed = False
        self.used = None

    # -- update ----------------------------------------------------------------------------

    @property
    def closed_at(self) -> Point:
        """Where its last gradient had come, of an update that is still to be taken."""
        assert self._sealed is not None and self._sealed.closed is not None
        return Point(self._sealed.closed, self._sealed.stream)

    def take_update(self, hyper: Hyper, point: Point) -> Update:
        """This step's update, to be queued; counts it in `steps`.

        On the calling thread, before reads of the parameters are guarded. The update alone keeps
        the gradients from here on, which may be long before step().

        Args:
            hyper: of the update.
            point: behind the last reads of the old values, and behind `close`.
        """
        sealed, self._sealed = self._sealed, None
        assert sealed is not None
        if sealed.stream == point.stream and sealed.behind is not None:
            sealed.behind = point.event  # not before it: one wait for both
        readers = self.layout.begin_update()
        update = Update(
            target=self._flat,
            gradients=sealed,
            segments=list(self._segments()),
            hyper=hyper,
            behind=[point.event] if readers is None else readers,
        )
        for position, count in enumerate(self.counts):
            if count:
                self.steps[position] += 1
        return update

    def uncount(self, update: Update) -> None:
        """The update was skipped: it does not count in `steps` (before anyone reads them)."""
        for position, offset in enumerate(self.layout.offsets):
            for segment in update.segments:
                if segment.offset <= offset < segment.offset + max(segment.size, 1):
                    self.steps[position] = segment.step - 1

    def flight_of(self, job: Future[Event | None], guards: bool) -> Flight:
        """`job` runs the update; `guards`: reads wait for it by themselves."""
        return Flight(job, self._copies, guards, self.home is not None)

    def flew(self, flight: Flight) -> None:
        """The update is on its way."""
        self.flight = flight
        if self.home is not None:
            self.home.writer = flight

    def finish(self) -> None:
        """Make the calling thread and its compute stream wait for the last update, if any."""
        if self.flight is not None:
            self.flight.wait()
            self.flight = None

    def move(self, place: Place) -> None:
        """Keep the state in another place from now on (between steps, after `finish`)."""
        before, after = self.place.live(), place.live()
        for name in self.state_names:
            if name in after and after[name] is before.get(name):
                continue  # the same memory
            values = torch.empty(self.layout.numel)
            self.place.read(name, 0, values)
            place.write(name, 0, values)
        self.place = place
        self._gradients = self._new_gradients()

    @property
    def state_names(self) -> tuple[str, ...]:
        """Of the values kept per parameter value."""
        return ("exp_avg", "exp_avg_sq", *(("master",) if self.has_master else ()))

    @property
    def has_master(self) -> bool:
        """Whether there is an fp32 copy of low-precision parameters."""
        return self.layout.dtype is not torch.float32

    def _segments(self) -> Iterator[Segment]:
        """Runs of neighbouring parameters that have a gradient and the same step count."""
        if not self.layout.many and self.counts[0]:
            yield Segment(0, self.layout.numel, self.steps[0] + 1, self.layout.bases[0])
            return
        start = 0
        while start < len(self.params):
            if not self.counts[start]:
                start += 1
                continue
            end = start + 1
            while end < len(self.params) and self._continues(start, end):
                end += 1
            offset = self.layout.offsets[start]
            stop = self.layout.offsets[end - 1] + self.layout.sizes[end - 1]
            base = self.layout.bases[start]
            yield Segment(offset, stop - offset, self.steps[start] + 1, base)
            start = end

    def _continues(self, start: int, end: int) -> bool:
        """Whether the parameter `end` belongs to the run of neighbours from `start` on."""
        if not self.counts[end] or self.steps[end] != self.steps[start]:
            return False
        offsets, bases = self.layout.offsets, self.layout.bases
        one_run = bases[end] - bases[start] == offsets[end] - offsets[start]
        return one_run or not self.place.rounds_at_random

    def master_loaded(self, position: int) -> None:
        """The master copy was loaded: at the next update it counts where it rounds to the
        parameter's value of then, however the model was loaded, before this or after."""
        self.layout.doubt_values(position)


def carry_state(olds: Sequence[Bucket], news: Sequence[Bucket]) -> None:
    """Give `news` the steps and state that `olds` have for the same parameters, bit for bit.

    Values that the user has written since the last update count, as before any update.
    """
    where = {param: (bucket, p) for bucket in olds for p, param in enumerate(bucket.params)}
    for bucket in news:
        for position, param in enumerate(bucket.params):
            old, old_position = where[param]
            bucket.steps[position] = old.steps[old_position]
            size = bucket.layout.sizes[position]
            for name in bucket.state_names:
                values = torch.empty(size)
                old.place.read(name, old.layout.offsets[old_position], values)
                bucket.place.write(name, bucket.layout.offsets[position], values)
            if bucket.has_master:
                offset = bucket.layout.offsets[position]
                bucket.place.take_values(offset, bucket.layout.flat()[offset : offset + size])


def _measure(flat: torch.Tensor, runs: Sequence[tuple[int, int]], threads: int) -> Measured:
    found = [
        _native.grad_stats(
            flat.data_ptr() + offset * flat.element_size(),
            DTYPE_NAMES[flat.dtype],
            size,
            threads=threads,
        )
        for offset, size in runs
    ]
    return Measured(tuple(s for s, _ in found), sum(bad for _, bad in found))
