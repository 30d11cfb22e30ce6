"""What an OffloadAdamW shows of itself: its options, and where it stands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from ts_core.optim.buckets import Bucket
from ts_core.optim.norms import Verdict
from ts_core.optim.options import Option, StepOptions
from ts_core.optim.read_guard import Flight, compiled_code_in_use
from ts_core.optim.refusals import RefusingOptimizer
from ts_core.optim.resident import ResidentAdamW
from ts_core.optim.updates import Updates


class ShownOptimizer(RefusingOptimizer):
    """Options that may be changed between steps, and read-only facts.

    Attributes:
        step_options: of a step.
        mode: "cpu", "gpu", "hybrid" or "auto".
    """

    step_options: StepOptions
    mode: str
    _updates: Updates
    _resident: ResidentAdamW | None
    _resident_norm: float | torch.Tensor | None
    _on_event: Callable[[str], None] | None

    max_grad_norm = Option("max_grad_norm", "Clip the global norm to this; None does not clip.")
    compute_grad_norm = Option("compute_grad_norm", "Measure the norm without clipping.")
    skip_nonfinite = Option("skip_nonfinite", "Leave out steps with NaN or infinite gradients.")
    threads = Option("threads", "Host threads; 0 for all usable cores.")
    headroom = Option("headroom", "Share of the device memory that state leaves free.")

    @property
    def accumulation_steps(self) -> int:
        """Backward passes per step(); may be changed between steps."""
        return self.step_options.accumulation

    @accumulation_steps.setter
    def accumulation_steps(self, value: int) -> None:
        self.step_options.set_accumulation(value)

    @property
    def eager(self) -> bool:
        """Whether updates start during backward."""
        return self.step_options.eager

    @property
    def steps_done(self) -> int:
        """Steps so far."""
        return self._updates.steps

    @property
    def last_grad_norm(self) -> float | None:
        """Global gradient norm of the last step, before clipping; None if it was not needed.

        Waits for it, if it is still being measured.
        """
        verdict = self._updates.norm
        if self._resident is None or verdict is not None:  # of the step before the state moved
            return None if verdict is None else verdict.result().norm
        self._resident.reports.flush()
        if isinstance(self._resident_norm, torch.Tensor):
            self._resident_norm = self._resident_norm.item()
        return self._resident_norm

    @property
    def pending_grad_norm(self) -> Callable[[], float] | None:
        """What gives the norm of the last step, now or later; None if it was not needed.

        Called, it waits until that norm has been measured, and for nothing queued after it. So a
        loop that calls it a step later learns of every norm, and the device never runs dry for it.
        """
        verdict = self._updates.norm
        if self._resident is None or verdict is not None:
            return None if verdict is None else partial(_norm_of, verdict)
        report = self._resident.report
        return None if report is None else partial(self._resident.reports.wait, report)

    @property
    def updates(self) -> int:
        """Updates so far of the most updated parameter, those before a resume included."""
        if self._resident is not None:
            return self._resident.updates
        return max((max(b.steps) for b in self._updates.buckets if b.steps), default=0)

    @property
    def resident(self) -> bool:
        """Whether state is on the device under torch's own kernel (see `make_resident`)."""
        return self._resident is not None

    @property
    def processes(self) -> int:
        """Processes whose gradients are averaged in each step; 1 when training alone."""
        return 1 if self._updates.ranks is None else self._updates.ranks.size

    @property
    def moments(self) -> str:
        """How moments are kept: "float32", "bfloat16" or "int8"."""
        return self._updates.storage.kind

    @property
    def guard_params(self) -> bool:
        """Whether reads of a parameter wait for its update, wherever they happen.

        Without it only `synchronize()` waits (a wrapped model's forward calls it).
        """
        return self._updates.pipeline.guard_reads

    @guard_params.setter
    def guard_params(self, value: bool) -> None:
        self._updates.finish()
        self._updates.pipeline.guard_reads = value

    @property
    def buckets(self) -> Sequence[Bucket]:
        """The pieces that are transferred and updated as one, in the order of the groups."""
        return self._updates.buckets

    @property
    def gradients_come(self) -> int:
        """Gradients so far that hooks took, of all steps; rises with every backward."""
        return self._updates.arrivals

    @property
    def mid_step(self) -> bool:
        """Whether gradients of an unfinished step have come, in this backward or one before it."""
        return self._updates.mid_step

    def refuse_mid_step(self, what: str) -> None:
        """Raise if gradients of an unfinished step are here.

        Raises:
            StateError: they are; `what` is named as the reason to finish the step first.
        """
        self._updates.refuse_mid_step(what)

    def flight_of(self, param: torch.nn.Parameter) -> Flight | None:
        """The last update of `param` while it is (or may be) on its way."""
        where = self._updates.where.get(param)
        return None if where is None else self._updates.buckets[where[0]].flight

    @property
    def reads_wait(self) -> bool:
        """Whether reads of parameters wait for their updates by themselves."""
        return self.guard_params and not compiled_code_in_use()

    def stats(self) -> dict[str, Any]:
        """mode, steps, eager, buckets, parameters, values by place, host and device bytes of state,
        grad_norm, resident, link counters."""
        here = self._resident
        moved = {} if here is None else here.stats()
        return {
            "mode": self.mode if here is None else "resident",
            "steps": self.steps_done,
            "eager": self.eager,
            "grad_norm": self.last_grad_norm,
            "resident": self.resident,
            **self._updates.stats(),
            **moved,
        }

    def _say(self, text: str) -> None:
        if self._on_event is not None:
            self._on_event(text)


def _norm_of(verdict: Future[Verdict]) -> float:
    return verdict.result().norm
