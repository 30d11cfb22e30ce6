"""Running updates behind the caller's back, in order, with reads guarded until they are done."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from ts_core.device.base import Device, Event
from ts_core.memory.arena import PinnedArena
from ts_core.optim import norms, read_guard
from ts_core.optim.buckets import Bucket, Measured, Point
from ts_core.optim.data_parallel import Ranks
from ts_core.optim.device_places import update_together
from ts_core.optim.held import HeldGradients
from ts_core.optim.launch_order import together
from ts_core.optim.layout import Hyper
from ts_core.optim.newest_first import NewestFirst
from ts_core.optim.norms import NormParts, Verdict
from ts_core.optim.options import StepOptions
from ts_core.optim.places import Update
from ts_core.transfer import CopyEngine

T = TypeVar("T")

_LONGEST_HOLD_S = 0.1


class UpdatePipeline:
    """One thread for host updates and norms, one that queues device updates.

    Both sleep while there is no work, and take it in order but for host updates during backward, of
    which the newest comes first. A norm is queued on the host thread before the updates that need
    its verdict, so waiting for it cannot lock up.

    Args:
        guard_reads: change the class of parameters in flight, so that every read waits.
    """

    def __init__(self, guard_reads: bool = True) -> None:
        self.guard_reads = guard_reads
        self._host = ThreadPoolExecutor(1, thread_name_prefix="trainstream-adamw")
        self._device = ThreadPoolExecutor(1, thread_name_prefix="trainstream-adamw-device")
        self._newest_first = NewestFirst["Event | None"](self._host)
        self._measured: dict[int, Future[Measured]] = {}
        self._averaged: dict[Bucket, Future[Measured]] = {}
        self._held: HeldGradients | None = None
        self._parts: NormParts | None = None

    def on_host(self, work: Callable[[], T]) -> Future[T]:
        """Queue work on the host thread, in order with measurements and updates there."""
        return self._host.submit(work)

    def on_host_newest(
        self, work: Callable[[], Event | None], ready: Callable[[], bool]
    ) -> Future[Event | None]:
        """Queue work on the host thread as host updates during backward are, the newest first."""
        return self._newest_first.submit(work, ready)

    def close(self, bucket: Bucket, index: int, measure: bool, threads: int) -> None:
        """All gradients of a bucket are here; start measuring them if the norm is wanted.

        Those that wait on the device are measured later, all together (`measure_rest`): one by
        one, the launches would cost the host more than the rest of a backward.
        """
        norms = bucket.close(measure)
        if norms is not None:
            assert self._parts is not None
            self._parts.add(index, norms)
        elif measure and not bucket.measured_late:
            self._measured[index] = self._host.submit(bucket.measuring(threads))

    def measure_rest(self, buckets: Mapping[int, Bucket], threads: int) -> None:
        """Measure what has not been measured of closed buckets, given by index."""
        if self._parts is None:
            return  # there has been no gradient yet
        late: dict[int, list[torch.Tensor]] = {}
        for index, bucket in buckets.items():
            if index in self._measured or index in self._parts:
                continue
            if bucket.measured_late:
                late[index] = bucket.waiting_gradients()
            else:
                self._measured[index] = self._host.submit(bucket.measuring(threads))
        if late:
            self._parts.measure(late)

    def average(self, bucket: Bucket, index: int, ranks: Ranks, options: StepOptions) -> None:
        """Queue the average of a closed bucket's gradients, and its measurement if wanted."""
        job = self._host.submit(bucket.averaging(ranks, options.needs_norm, options.threads))
        self._averaged[bucket] = job
        if options.needs_norm:
            self._measured[index] = job

    def prepare_norms(
        self, buckets: Sequence[Bucket], copies: CopyEngine, arena: PinnedArena
    ) -> None:
        """Room for the norms of all parameters."""
        sizes = [len(bucket.params) for bucket in buckets]
        if self._parts is None or sizes != self._parts.sizes:
            before, self._parts = self._parts, NormParts(sizes, copies, arena)
            if before is not None:
                self._parts.take_over(before)

    def verdict(
        self,
        buckets: Sequence[Bucket],
        step: int,
        max_grad_norm: float | None,
        skip_nonfinite: bool,
        say: Callable[[str], None],
    ) -> Future[Verdict]:
        """Queue the norm of the closed buckets and what follows from it.

        Waits for it at once if parameters are sharded over processes, since the sum over those is a
        collective, which belongs on the calling thread.
        """
        measured, self._measured = self._measured, {}
        fetched = None if self._parts is None else self._parts.fetch()

        def device_norms() -> dict[int, list[float]]:
            return {} if fetched is None else fetched.by_bucket()

        def decide(total: float, bad: str) -> Verdict:
            norm = total**0.5 if total == total else total
            return norms.judge(norm, bad, max_grad_norm, skip_nonfinite, step + 1, say)

        def work() -> Verdict:
            by_index = device_norms()
            on_device = [norm for each in by_index.values() for norm in each]
            total, count = norms.total_squares(on_device, list(measured.values()))
            return decide(total, _bad_parts(by_index, count, buckets))

        if not norms.any_sharded(buckets):
            return self._host.submit(work)
        future: Future[Verdict] = Future()
        by_index = device_norms()
        squares = {index: sum(norm * norm for norm in each) for index, each in by_index.items()}
        squares.update((index, sum(job.result().squares)) for index, job in measured.items())
        sharded = [i for i, bucket in enumerate(buckets) if norms.any_sharded([bucket])]
        total = norms.sharded_squares(
            [buckets[i] for i in sharded], [squares.pop(i, 0.0) for i in sharded]
        )
        future.set_result(decide(total + sum(squares.values()), ""))
        return future

    def launch_during_backward(
        self, bucket: Bucket, hyper: Hyper, device: Device, limit_bytes: int
    ) -> None:
        """Queue a bucket's update as it closes; reads of its parameters wait from here on.

        Gradients on the device take at most `limit_bytes` until they are read.

        Host threads take the newest gradients first, whose weights the next forward reads first.
        The device's updates are then what bounds the step, so a backward that waits for them loses
        nothing.
        """
        point, may_guard = bucket.closed_at, self.may_guard()
        if not bucket.gradients_stay:
            self._launch([bucket], [hyper], None, point, may_guard, newest_first=True)
            return
        if self._held is None:
            self._held = HeldGradients(device)
        self._held.make_room(bucket.gradient_bytes, limit_bytes)
        self._launch([bucket], [hyper], None, point, may_guard, self._held)

    def let_go(self) -> None:
        """Hold no gradients: later work waits for the updates that read them."""
        if self._held is not None:
            self._held.clear()

    def launch(
        self,
        buckets: Sequence[Bucket],
        hypers: Mapping[Bucket, Hyper],
        verdict: Future[Verdict] | None,
        copies: CopyEngine,
        together_bytes: int,
    ) -> None:
        """Queue the updates of closed buckets; reads of their parameters wait from here on.

        The buckets are ready for the next step then.

        Args:
            buckets: in the order of their updates.
            hypers: how to update each.
            verdict: what the updates wait for; None for nothing.
            copies: the link.
            together_bytes: of gradients whose updates are queued for the device as one, at most.
        """
        if not buckets:
            return
        for bucket in buckets:  # what was written since they closed counts
            bucket.take_foreign_values()
        point = Point(copies.record_compute(), copies.device.compute_key())
        may_guard = self.may_guard()
        with self._workers_held():
            for group in together(buckets, together_bytes):
                self._launch(group, [hypers[b] for b in group], verdict, point, may_guard)
            for bucket in buckets:
                bucket.reset()

    @contextmanager
    def _workers_held(self) -> Iterator[None]:
        """Neither worker begins while this is open, but for what they have already.

        Their Python would take turns with the caller's, which queues the more slowly for it. It is
        no lock: they begin after a while in any case, as a thread that the caller waits for may
        itself wait for an update (a forward in another thread, say).
        """
        begin = threading.Event()
        try:
            for worker in (self._host, self._device):
                worker.submit(begin.wait, _LONGEST_HOLD_S)
            yield
        finally:
            begin.set()

    def _launch(
        self,
        buckets: Sequence[Bucket],
        hypers: Sequence[Hyper],
        verdict: Future[Verdict] | None,
        point: Point,
        may_guard: bool,
        held: HeldGradients | None = None,
        newest_first: bool = False,
    ) -> None:
        """Queue the updates of buckets as one.

        Args:
            buckets, hypers: which, and how.
            verdict: what the updates wait for; None for nothing.
            point: of the compute stream, behind the last reads of the old values.
            may_guard: whether reads of plain parameters may wait by themselves.
            held: keeps their gradients; None: the place of their state does.
            newest_first: a host update goes before others whose gradients came earlier.
        """
        trained = [param for bucket in buckets for param in bucket.trained()]
        guards = may_guard and read_guard.can_guard(trained)
        first = buckets[0]
        with first.layout.writing():  # (a paged weight is by itself)
            # Tell autograd that the values change, as an in-place operation would: a graph that
            # still needs the old ones then raises, as after torch's own optimizers.
            torch.autograd.graph.increment_version(trained)
            updates: list[tuple[Bucket, Update]] = []
            for bucket, hyper in zip(buckets, hypers, strict=True):
                bucket.note_versions()
                update = bucket.take_update(hyper, point)
                update.held = held is not None
                updates.append((bucket, update))
            job = self._queue(updates, verdict, newest_first)
            flight = first.flight_of(job, guards)
            for bucket, update in updates:
                if held is not None:
                    held.add(job, update.gradients.flat, bucket.place.over_link)
                bucket.flew(flight)
        if guards:
            read_guard.guard(trained, flight)

    def _queue(
        self,
        updates: Sequence[tuple[Bucket, Update]],
        verdict: Future[Verdict] | None,
        newest_first: bool,
    ) -> Future[Event | None]:
        averaged = [self._averaged.pop(b) for b, _ in updates if b in self._averaged]
        placed = [(bucket.place, update) for bucket, update in updates]
        place, first = placed[0]

        def work() -> Event | None:
            scale = 1.0
            for average in averaged:
                average.result()
            if verdict is not None:
                found = verdict.result()
                if found.skip:
                    for bucket, skipped in updates:
                        bucket.uncount(skipped)
                    return None
                scale = found.scale
            if len(placed) == 1:
                return place.update(first, scale)
            return update_together(placed, scale)

        if newest_first and not place.on_device:
            return self._newest_first.submit(work, functools.partial(place.ready, first))
        worker = self._device if place.on_device else self._host
        return worker.submit(work)

    def may_guard(self) -> bool:
        """Whether reads of plain parameters may wait by themselves at present; else step() waits,
        or the caller does."""
        return self.guard_reads and not read_guard.compiled_code_in_use()

    def drop_measures(self) -> None:
        """The step's gradients are dropped."""
        measured, self._measured = self._measured, {}
        for job in measured.values():
            job.exception()  # waits: it reads the gradients; an error is told to who needs them
        if self._parts is not None:
            self._parts.drop()


def _bad_parts(by_index: dict[int, list[float]], count: int, buckets: Sequence[Bucket]) -> str:
    """Where the values that are not finite are, in words."""
    found = [f"{count} gradient values are"] if count else []
    for index, each in by_index.items():
        for param, norm in zip(buckets[index].params, each, strict=True):
            if norm - norm != 0:
                shape = "x".join(map(str, param.shape)) or "scalar"
                found.append(f"the gradient of a {shape} parameter is")
    return ", ".join(found[:3])
