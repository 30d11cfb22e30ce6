"""Running updates behind the caller's back, in order, with reads guarded until they are done."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from ts_core.device.base import Device, Event
from ts_core.memory.arena import PinnedArena
from ts_core.optim import norms, read_guard
from ts_core.optim.buckets import Bucket, Measured
from ts_core.optim.data_parallel import Ranks
from ts_core.optim.held import HeldGradients
from ts_core.optim.layout import Hyper
from ts_core.optim.newest_first import NewestFirst
from ts_core.optim.norms import NormParts, Verdict
from ts_core.optim.options import StepOptions
from ts_core.optim.places import Update
from ts_core.transfer import CopyEngine

T = TypeVar("T")


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
        self._on_device: set[int] = set()
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

    def close(
        self,
        bucket: Bucket,
        index: int,
        step: int,
        measure: bool,
        threads: int,
    ) -> None:
        """All gradients of a bucket are here; start measuring them if the norm is wanted."""
        part = None
        if measure and self._parts is not None:
            part = self._parts.part(step, index)
        if bucket.close(part):
            self._on_device.add(index)
        elif measure:
            self._measured[index] = self._host.submit(bucket.measuring(threads))

    def measure_late(self, bucket: Bucket, index: int, step: int, threads: int) -> None:
        """The norm is wanted only now: measure a closed bucket, if that has not been done."""
        if index in self._measured or index in self._on_device:
            return
        part = None if self._parts is None else self._parts.part(step, index)
        if part is not None and bucket.measure_on_device(part):
            self._on_device.add(index)
        else:
            self._measured[index] = self._host.submit(bucket.measuring(threads))

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
        indices, self._on_device = sorted(self._on_device), set()
        fetched = None
        if indices:
            assert self._parts is not None
            fetched = self._parts.fetch(step)

        parts = self._parts

        def device_norms() -> dict[int, list[float]]:
            if fetched is None:
                return {}
            assert parts is not None
            arrived = parts.arrived(*fetched)
            return {index: parts.of(arrived, index).tolist() for index in indices}

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
        """`launch`; gradients on the device take at most `limit_bytes` until they are read.

        Host threads take the newest gradients first, whose weights the next forward reads first.
        The device's updates are then what bounds the step, so a backward that waits for them loses
        nothing.
        """
        if not bucket.gradients_stay:
            self.launch(bucket, hyper, None, newest_first=True)
            return
        if self._held is None:
            self._held = HeldGradients(device)
        self._held.make_room(bucket.gradient_bytes, limit_bytes)
        self.launch(bucket, hyper, None, self._held)

    def let_go(self) -> None:
        """Hold no gradients: later work waits for the updates that read them."""
        if self._held is not None:
            self._held.clear()

    def launch(
        self,
        bucket: Bucket,
        hyper: Hyper,
        verdict: Future[Verdict] | None,
        held: HeldGradients | None = None,
        newest_first: bool = False,
    ) -> read_guard.Flight:
        """Queue a closed bucket's update; reads of its parameters wait from here on.

        Args:
            bucket, hyper: which, and how.
            verdict: what the update waits for; None for nothing.
            held: keeps its gradients; None: the place of its state does.
            newest_first: a host update goes before others whose gradients came earlier.
        """
        trained = [p for p, count in zip(bucket.params, bucket.counts, strict=True) if count]
        if bucket.used is None:  # not during backward: what was written since the close counts
            bucket.take_foreign_values()
        guards = self.guards(trained)
        with bucket.layout.writing():
            bucket.mark_written()
            update = bucket.take_update(hyper)
            update.held = held is not None
            job = self._queue(bucket, update, verdict, newest_first)
            if held is not None:
                held.add(job, update.gradients.flat, bucket.place.over_link)
            flight = bucket.flew(job, guards)
        if guards:
            read_guard.guard(trained, flight)
        return flight

    def _queue(
        self,
        bucket: Bucket,
        update: Update,
        verdict: Future[Verdict] | None,
        newest_first: bool,
    ) -> Future[Event | None]:
        place = bucket.place
        averaged = self._averaged.pop(bucket, None)

        def work() -> Event | None:
            scale = 1.0
            if averaged is not None:
                averaged.result()
            if verdict is not None:
                found = verdict.result()
                if found.skip:
                    bucket.uncount(update)
                    return None
                scale = found.scale
            return place.update(update, scale)

        if newest_first and not place.on_device:
            return self._newest_first.submit(work, functools.partial(place.ready, update))
        worker = self._device if place.on_device else self._host
        return worker.submit(work)

    def guards(self, params: Sequence[torch.nn.Parameter]) -> bool:
        """Whether reads of these wait by themselves; else step() waits, or the caller does."""
        return (
            self.guard_reads
            and read_guard.can_guard(params)
            and not read_guard.compiled_code_in_use()
        )

    def drop_measures(self) -> None:
        """The step's gradients are dropped."""
        for job in self._measured.values():
            job.result()
        self._measured.clear()
        self._on_device.clear()


def _bad_parts(by_index: dict[int, list[float]], count: int, buckets: Sequence[Bucket]) -> str:
    """Where the values that are not finite are, in words."""
    found = [f"{count} gradient values are"] if count else []
    for index, each in by_index.items():
        for param, norm in zip(buckets[index].params, each, strict=True):
            if norm - norm != 0:
                shape = "x".join(map(str, param.shape)) or "scalar"
                found.append(f"the gradient of a {shape} parameter is")
    return ", ".join(found[:3])
