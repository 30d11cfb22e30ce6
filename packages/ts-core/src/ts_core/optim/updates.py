"""What happens to an optimizer in a step: gradients come, buckets close, updates go."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from ts_core.errors import OptionError, StateError
from ts_core.optim import checks
from ts_core.optim.backwards import BackwardWatch
from ts_core.optim.buckets import Bucket, carry_state
from ts_core.optim.data_parallel import Ranks
from ts_core.optim.group_table import GroupTable
from ts_core.optim.hybrid import HybridSplit
from ts_core.optim.launch_order import in_order
from ts_core.optim.norms import Verdict
from ts_core.optim.options import StepOptions
from ts_core.optim.pieces import Bytes
from ts_core.optim.pipeline import UpdatePipeline
from ts_core.optim.rates import Rates, measure_rates
from ts_core.optim.read_guard import can_guard
from ts_core.optim.storage import Storage
from ts_core.store.homes import TrainedHome


class Updates:
    """The buckets of one optimizer and their way through a step.

    Args:
        storage: makes buckets, holds link and memory.
        options: of a step; read anew at each use.
        groups: returns the optimizer's param groups.
        say: told of decisions.

    Attributes:
        buckets: in the order of the groups.
        steps: steps done.
        norm: of the last step, when it was needed.
        split: moves state after steps, in mode "hybrid".
        apart: gives device memory that no peak shows yet and that is for others.
        arrivals: gradients so far.
        ranks: the processes whose gradients are averaged in step(); None when training alone.
    """

    def __init__(
        self,
        storage: Storage,
        options: StepOptions,
        groups: Callable[[], list[dict[str, Any]]],
        say: Callable[[str], None],
    ) -> None:
        self.storage = storage
        self.options = options
        self.buckets: list[Bucket] = []
        self.where: dict[torch.nn.Parameter, tuple[int, int]] = {}
        self.pipeline = UpdatePipeline()
        storage.submit = self.pipeline.on_host
        storage.submit_newest = self.pipeline.on_host_newest
        self.steps = 0
        self.norm: Future[Verdict] | None = None
        self.split: HybridSplit | None = None
        self.apart: Callable[[], int] = lambda: 0
        self.forward_s: Callable[[], float] = lambda: 0.0
        self.ranks: Ranks | None = None
        self._groups = groups
        self._table = GroupTable(groups)
        self._say = say
        self.arrivals = 0
        self._backwards = BackwardWatch()
        self._warned_late: set[str] = set()
        self._process = os.getpid()

    def build(self) -> Iterator[Bucket]:
        """Make buckets and state for parameters that have none; yields the new ones."""
        groups = self._groups()
        params = [param for group in groups for param in group["params"]]
        if len(self.where) == len(params):
            return
        checks.memory(params)
        first = len(self.buckets)
        for group_index, group in enumerate(groups):
            new = [param for param in group["params"] if param not in self.where]
            for bucket in self.storage.buckets(new, group_index):
                index = len(self.buckets)
                self.buckets.append(bucket)
                for position, param in enumerate(bucket.params):
                    self.where[param] = (index, position)
        self._prepare()
        yield from self.buckets[first:]

    def _prepare(self) -> None:
        """What depends on the buckets there are."""
        storage = self.storage
        assert storage.copies is not None
        self.pipeline.prepare_norms(self.buckets, storage.copies, storage.arena)
        if self.split is None and storage.splits():
            self.split = HybridSplit(
                storage.copies.device,
                self._measure_rates,
                self.room_bytes,
                self._say,
                lambda: self.options.gradients_wait,
                self._copied,
                lambda: self.options.accumulation,
                lambda: self.forward_s(),
            )

    def _copied(self) -> Bytes:
        """What has gone over the link by copies so far, whoever asked for them."""
        assert self.storage.copies is not None
        totals = self.storage.copies.stats()
        return Bytes(totals["h2d"].bytes, totals["d2h"].bytes)

    def _measure_rates(self) -> Rates:
        """Of an idle link: updates by the device may still be reading and writing over it."""
        assert self.storage.copies is not None
        self.settle()
        return measure_rates(self.storage.copies, self.storage.arena, self.options.threads)

    def rehome(self, homes: Mapping[torch.nn.Parameter, TrainedHome]) -> list[Bucket]:
        """Trained weights have moved into images of paged blocks, or out of them.

        Buckets that hold such weights are made anew; their state is kept bit for bit. Between
        steps; waits for updates in flight.

        Args:
            homes: of all weights that live in images now.

        Returns:
            The new buckets.
        """
        if not (homes or self.storage.homes):
            return []
        self.refuse_mid_step("moving weights")
        self.settle()
        before, self.storage.homes = self.storage.homes, dict(homes)
        moved = {p for p in (*before, *homes) if before.get(p) is not homes.get(p)}
        old = [bucket for bucket in self.buckets if moved.intersection(bucket.params)]
        if not old:
            return []
        kept = [bucket for bucket in self.buckets if bucket not in old]
        new: list[Bucket] = []
        for group_index in sorted({bucket.group_index for bucket in old}):
            olds = [bucket for bucket in old if bucket.group_index == group_index]
            found = list(
                self.storage.buckets([p for bucket in olds for p in bucket.params], group_index)
            )
            carry_state(olds, found)
            new += found
        self.buckets[:] = kept + new
        self.where = {
            param: (index, position)
            for index, bucket in enumerate(self.buckets)
            for position, param in enumerate(bucket.params)
        }
        self._prepare()
        if self.split is not None:
            self.split.start_again()
        return new

    def room_bytes(self) -> int:
        """Device memory that state may take: what a step's peak leaves below the headroom."""
        assert self.storage.copies is not None
        device = self.storage.copies.device
        usable = device.usable_bytes()
        if usable is None:
            return 0
        target = int(usable * (1.0 - self.options.headroom))
        leaving = [bucket for bucket in self.buckets if not bucket.gradients_stay] or self.buckets
        size = sum(bucket.gradient_bytes for bucket in leaving)
        unseen = self.storage.copies.unseen_bytes(size)
        return target - device.memory()["peak_allocated"] - self.apart() - unseen

    def device_bytes(self) -> int:
        """Device memory of state, and of gradients that wait there for the end of backward."""
        waits = self.options.gradients_wait
        return sum(
            bucket.place.device_bytes()
            + (bucket.gradient_bytes if waits and bucket.gradients_stay else 0)
            for bucket in self.buckets
        )

    # -- during backward ----------------------------------------------------------------------

    def take(self, param: torch.nn.Parameter, grad: torch.Tensor) -> None:
        """A parameter's gradient of one backward has come."""
        if grad.layout is not torch.strided:
            raise OptionError(
                f"a parameter of shape {tuple(param.shape)} has a {grad.layout} gradient. "
                f"OffloadAdamW takes dense gradients: turn sparse=True off."
            )
        if os.getpid() != self._process:
            raise StateError(
                "an OffloadAdamW was used in a forked child process, which has none of the "
                "parent's threads. Train in the parent only, or start workers with 'spawn'."
            )
        self._backwards.note()
        self.arrivals += 1
        index, position = self.where[param]
        bucket = self.buckets[index]
        bucket.collect(position, grad, self.options.accumulation, self.arrivals)
        if bucket.complete(self.options.accumulation):
            self._close(index)

    def _close(self, index: int) -> None:
        bucket, options = self.buckets[index], self.options
        measure = options.needs_norm and self.ranks is None  # else the average is measured
        self.pipeline.close(bucket, index, measure, options.threads)
        if options.eager:
            bucket.used = self._table.hyper(bucket)
            assert self.storage.copies is not None
            self.pipeline.launch_during_backward(
                bucket,
                bucket.used,
                self.storage.copies.device,
                self.storage.device_inflight_bytes(),
            )

    def group_of(self, param: torch.nn.Parameter) -> dict[str, Any] | None:
        """The param group that holds `param` now; None if the user took it out."""
        return self._table.group_of(param)

    # -- step ------------------------------------------------------------------------------------

    def step(self) -> None:
        """Close what is open and queue every update that has not been queued during backward."""
        if self.ranks is not None:
            self._complete(self.ranks)
        active = [index for index, bucket in enumerate(self.buckets) if bucket.started()]
        for index in active:
            if not self.buckets[index].closed:
                self._close(index)
        buckets = [self.buckets[index] for index in active]
        waiting = [index for index in active if self.buckets[index].used is None]
        if self.ranks is not None:
            for index in active:  # in this order on every process
                self.pipeline.average(self.buckets[index], index, self.ranks, self.options)
        if len(waiting) < len(active):  # options may have been changed since the backward
            self._check_unchanged([bucket for bucket in buckets if bucket.used is not None])
        if not self.options.eager:
            self.pipeline.let_go()  # what eager updates of steps before held
        self._launch(waiting, self.options.needs_norm and len(waiting) == len(active))
        may_guard = self.pipeline.may_guard()
        for bucket in buckets:
            waits = may_guard and can_guard(bucket.params)
            if self.pipeline.guard_reads and not waits:
                bucket.finish()
            if bucket.used is not None:
                bucket.reset()
        self._backwards.clear()
        self.steps += 1

    def _complete(self, ranks: Ranks) -> None:
        """A parameter that has a gradient on another process has one of zeros here."""
        flags = [count > 0 for bucket in self.buckets for count in bucket.counts]
        found = iter(zip(flags, ranks.any_has(flags), strict=True))
        for bucket in self.buckets:
            for position, param in enumerate(bucket.params):
                here, anywhere = next(found)
                if anywhere and not here:
                    zeros = torch.zeros_like(param, requires_grad=False)
                    bucket.collect(position, zeros, self.options.accumulation, self.arrivals)

    def _launch(self, waiting: Sequence[int], by_norm: bool) -> None:
        """Queue the updates in the order of the last forward (see `in_order`).

        Args:
            waiting: indices of the closed buckets that were not updated during backward.
            by_norm: as the norm of all gradients says.
        """
        options = self.options
        buckets = [self.buckets[index] for index in waiting]
        hypers = self._table.hypers(buckets)  # before anything is queued
        verdict = None
        if not by_norm:
            self.pipeline.drop_measures()
        else:
            self.pipeline.measure_rest(dict(zip(waiting, buckets, strict=True)), options.threads)
            verdict = self.pipeline.verdict(
                self.buckets, self.steps, options.max_grad_norm, options.skip_nonfinite, self._say
            )
            self.norm = verdict
        if buckets:
            assert self.storage.copies is not None
            limit_bytes = self.storage.device_inflight_bytes() // 4
            self.pipeline.launch(
                in_order(buckets), hypers, verdict, self.storage.copies, limit_bytes
            )

    def _check_unchanged(self, updated: Sequence[Bucket]) -> None:
        """Eager updates ran during backward: a value set since then came too late for them."""
        late = ""
        if any(bucket.used != self._table.hyper(bucket) for bucket in updated):
            late = "lr or another hyper-parameter was changed"
        elif self.options.needs_norm:
            late = "clipping, or another option that needs the norm, was switched on"
        if late and late not in self._warned_late:
            self._warned_late.add(late)
            text = (
                f"{late} between backward and step(), but eager updates had already used the old "
                f"value during backward. Set it before backward, or pass eager=False."
            )
            self._say(text)
            warnings.warn(text, UserWarning, stacklevel=7)

    def let_go(self) -> None:
        """Keep no gradients of the last step: later work of the device waits for what reads them.

        Between passes of a step those that leave for the host are kept as long as that takes: the
        next forward needs nothing that would wait for them.
        """
        self.pipeline.let_go()
        if self.storage.copies is None:
            return
        if self.mid_step:
            self.storage.copies.retire()
        else:
            self.storage.copies.let_go()

    def weights_read(self) -> None:
        """A forward has read all weights, so that nothing waits for long any more."""
        self.storage.let_go()
        if self.storage.copies is not None:
            self.storage.copies.let_go()

    def finish(self) -> None:
        """Wait for updates in flight."""
        for bucket in self.buckets:
            bucket.finish()
        self.pipeline.let_go()

    def drop(self, why: str) -> None:
        """Drop the gradients of an unfinished step; says so if some were used already."""
        self.pipeline.drop_measures()
        started = [bucket for bucket in self.buckets if bucket.started()]
        written = [param for b in started if b.used is not None for param in b.params]
        for bucket in started:
            bucket.reset()
        self._backwards.clear()
        if written:
            shapes = ["x".join(map(str, param.shape)) or "scalar" for param in written]
            more = ", ..." if len(shapes) > 8 else ""
            self._say(
                f"{why}: {len(written)} parameters had already been updated during backward "
                f"(eager updates), of shapes {', '.join(shapes[:8])}{more}; the others keep their "
                f"values"
            )

    def backward_failed(self) -> bool:
        """Whether a backward brought gradients and then raised."""
        return self._backwards.failed()

    @property
    def mid_step(self) -> bool:
        """Whether gradients of an unfinished step are here."""
        return any(bucket.started() for bucket in self.buckets)

    def refuse_mid_step(self, what: str) -> None:
        """Raise if gradients of an unfinished step are here.

        Raises:
            StateError: they are.
        """
        if self.mid_step:
            raise StateError(
                f"{what} in the middle of a step or accumulation: gradients that have come would "
                f"be lost or counted twice. Call step() or zero_grad() first."
            )

    def settle(self) -> None:
        """Nothing is in flight afterwards, neither parameters nor state."""
        self.finish()
        self.storage.settle()

    def clear(self) -> None:
        """Forget all buckets and their state."""
        self.buckets.clear()
        self.where.clear()
        self.split = None

    def stats(self) -> dict[str, Any]:
        """Counters for `OffloadAdamW.stats`."""
        copies = self.storage.copies
        link = {} if copies is None else copies.stats()
        values: dict[str, int] = {}
        for bucket in self.buckets:
            name = bucket.place.name
            values[name] = values.get(name, 0) + bucket.layout.numel
        return {
            "moments": self.storage.kind,
            "buckets": len(self.buckets),
            "parameters": sum(len(bucket.params) for bucket in self.buckets),
            "values_by_place": values,
            "host_state_bytes": sum(bucket.host_bytes() for bucket in self.buckets),
            "device_state_bytes": sum(b.place.device_bytes() for b in self.buckets),
            "d2h_bytes": link["d2h"].bytes if link else 0,
            "h2d_bytes": link["h2d"].bytes if link else 0,
        }
