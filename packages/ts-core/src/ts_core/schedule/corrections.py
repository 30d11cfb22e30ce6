"""From measured peaks of device memory to better plans: a state machine without a device.

A plan reserves memory for what it cannot know: activations, workspaces, what the optimizer keeps.
After a step that is known: the peak less blocks and slots. Blocks then return to the device while
room remains, or more of them stream when the peak is over the target. What everything else needs
is remembered as the most that any step needed, so placement settles; a later step that needs more
(a longer batch) starts it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ts_core.schedule.activation_policy import BlockActivations
from ts_core.schedule.case import Case
from ts_core.schedule.places import repage, spread
from ts_core.schedule.plan import (
    KEEP,
    MachineProfile,
    ModelProfile,
    Plan,
    PlanOptions,
    Work,
    human,
)
from ts_core.schedule.planner import evaluate

QUIET_STEPS = 2
# Blocks are given back at most this often before placement only ever gets tighter.
_MOST_RETURNS = 4
# Of an input, as far as blocks leave the device for it before it has been measured.
_MOST_GROWTH = 4.0
# Room left over when blocks change place, so that steps that differ a little do not move them.
_MARGIN = 0.01
# Blocks leave for activations where the predicted step is shorter by this share.
_WORTH_LEAVING = 0.03


@dataclass(frozen=True)
class Observation:
    """One entry of the history.

    Attributes:
        step: optimizer steps done.
        peak: most bytes of device memory allocated since blocks last changed place.
        target: bytes that a step may use.
        paged: blocks that streamed.
        change: what was decided, in words; empty when nothing was.
    """

    step: int
    peak: int
    target: int
    paged: int
    change: str = ""


class PeakCorrector:
    """Corrects a plan by what its steps really used.

    Args:
        model, machine, options: what the plan was made from.
        plan: the plan in force.
        movable: blocks that may change place.

    Attributes:
        adapting: whether blocks may still be moved; False when a placement was asked for or the
            device has no limit.
        history: what was seen, the last entries.
    """

    HISTORY = 64

    def __init__(
        self,
        model: ModelProfile,
        machine: MachineProfile,
        options: PlanOptions,
        plan: Plan,
        movable: Sequence[int],
    ) -> None:
        self._model = model.on_device(machine.device_bytes if machine.counts_fixed else None)
        self._machine = machine
        self._options = options
        self._movable = tuple(index for index in movable if model.pageable[index])
        self.plan = plan
        self.history: list[Observation] = []
        self._may_move = (
            machine.device_bytes is not None
            and options.param_offload == "auto"
            and len(self._movable) > 0
        )
        self.adapting = self._may_move
        self._quiet = 0
        self._returns = 0
        self._most_needed = 0
        self._needed_with = plan.paged
        self._most_used = 0, plan.paged  # the same without what is yet to come, as was paged then
        self._recomputing: int | None = None  # what a step that recomputes every block needed
        self._stays: tuple[bool, int, int, tuple[int, ...]] | None = None
        self._warned = False

    @property
    def target(self) -> int | None:
        """Bytes that a step may use; None without a limit."""
        if self._machine.device_bytes is None:
            return None
        return int(self._machine.device_bytes * (1.0 - self._options.headroom))

    @property
    def recomputing(self) -> int | None:
        """Bytes beside blocks and slots of a step that recomputes every block; None: not known."""
        return self._recomputing

    @property
    def needed(self) -> int:
        """The most bytes that any step used for other things than blocks and slots."""
        return self._most_needed

    def observe(self, step: int, peak: int, may_return: bool = True, apart: int = 0) -> Plan | None:
        """A step has ended.

        Args:
            step: optimizer steps done.
            peak: most bytes of device memory allocated since the last call that returned a plan.
            may_return: whether blocks may go back to the device now (not while something else
                is still trying out how to use the room).
            apart: bytes that no step has used yet, and that are to be left.

        Returns:
            A plan with other paged blocks, to be put in force before the next step; None to go on.
        """
        target = self.target
        if target is None:
            return None
        before = self._most_needed
        if peak - self.placed > self._most_used[0]:
            self._most_used = peak - self.placed, self.plan.paged
        if peak + apart - self.placed > before:
            self._most_needed = peak + apart - self.placed
            self._needed_with = self.plan.paged
        if not self._may_move:
            self._remember(step, peak, target, self._over(peak, target))
            return None
        changed = self._replan(peak + apart, target, may_return)
        if changed is None:
            self._quiet += 1
            if may_return and self._quiet >= QUIET_STEPS:
                self.adapting = False
            news = self._over(peak, target) if peak > target else ""
            if news or self.adapting or self._most_needed > before:
                self._remember(step, peak, target, news)
            return None
        self._quiet = 0
        self.adapting = True
        more = len(changed.paged) - len(self.plan.paged)
        self._returns += more < 0
        more_to_come = f", and {human(apart)} are to come" if apart else ""
        words = (
            f"step {step} used {human(peak)} of {human(target)}{more_to_come}: "
            f"{_in_words(more)}, {len(changed.paged)} of {len(self._model.pageable)} stream now"
        )
        self._remember(step, peak, target, words)
        self.plan = replace(changed, reasons=(*changed.reasons, words))
        return self.plan

    def share_room(
        self, step: int, room: int, measured: Sequence[BlockActivations], work: Work | None
    ) -> Plan | None:
        """Activations have been measured, and it is open which of them stay.

        The room can go to activations, which saves computing them again, or to blocks, which saves
        streaming them. When the shortest predicted step has more blocks on the device, they return
        now, and activations get what is left. When there is not even room to recompute every
        block, blocks leave; frozen ones also where the link has time for them, so that more
        activations stay.

        Args:
            step: optimizer steps done.
            room: bytes of the target beyond a step that recomputes every block; may be negative.
            measured: per block.
            work: of a step of that size; None: unknown.

        Returns:
            A plan with other paged blocks, or None.
        """
        target = self.target
        if target is not None:
            self._recomputing = target - room - self.placed
        if not self._may_move or work is None or target is None:
            return None
        inputs = tuple(block.boundary for block in measured)
        needed = target - room  # of a step that recomputes every block
        again = sum(inputs) + max(block.saved for block in measured)
        rest = max(0, needed - self.placed - again)
        model = replace(
            self._model,
            fixed_device=rest,
            tables=0,
            trained=0,
            gradients_wait=False,
            leaving=None,
            activations=tuple(block.saved for block in measured),
            inputs=inputs,
            transient=0,
            head=0,
            work=work,
        )
        machine = replace(self._machine, counts_fixed=True, in_use=0)  # part of `rest`
        best = evaluate(model, machine, self._options)
        now = len(self.plan.paged)
        more = len(best.paged) - now
        if not best.fits or more == 0:
            return None
        if more > 0 and room >= 0 and not self._worth_leaving(best, model, machine):
            return None
        if more < 0 and self._model.gradients_wait and any(self._model.trained_pageable):
            return None  # the peak of a step tells whether their gradients fit as well
        found = self._with_paged(len(best.paged), rest + again, anew=more > 0 and room >= 0)
        expected = (
            f"; {best.seconds['step'] * 1000:.0f} ms per step expected, with "
            f"{best.activations.count(KEEP)} of {len(measured)} blocks keeping their activations"
            if best.seconds
            else ""
        )
        words = (
            f"activations are known: {_in_words(more)}, {len(found.paged)} of "
            f"{len(self._model.pageable)} stream now{expected}"
        )
        self._remember(step, needed, target, words)
        self.plan = replace(found, reasons=(*found.reasons, words))
        self._quiet = 0
        self.adapting = True
        return self.plan

    def _worth_leaving(self, best: Plan, model: ModelProfile, machine: MachineProfile) -> bool:
        if any(model.trained_pageable):
            return False  # their updates and gradients would take other ways
        stay = replace(self._options, param_offload=self.plan.paged or False)
        now = evaluate(model, machine, stay)
        if not (now.fits and now.seconds and best.seconds):
            return False
        return best.seconds["step"] <= (1 - _WORTH_LEAVING) * now.seconds["step"]

    def is_free(self, size_bytes: int) -> None:
        """Bytes that were said to come on top of what steps used (`apart`) will not come."""
        self._most_needed -= size_bytes
        if self._most_needed < self._most_used[0]:  # by a step that nothing was to come on top of
            self._most_needed, self._needed_with = self._most_used
        if self._recomputing is not None:
            self._recomputing = max(0, self._recomputing - size_bytes)

    def make_room(self, step: int, ratio: float) -> Plan | None:
        """An input comes that is `ratio` times as large as the largest so far.

        It will be measured with every block recomputed. Where even that may take more than the
        target, blocks leave before; they return by `share_room`, once it has been measured.

        Args:
            step: optimizer steps done.
            ratio: of the sizes. What is not weights or their state is taken to grow by it, at most
                four times (a mask grows with the square of what counts).

        Returns:
            A plan with more paged blocks, or None.
        """
        target = self.target
        if not self._may_move or self._recomputing is None or target is None:
            return None
        fixed = self._model.fixed_device + self._model.trained + self._machine.in_use
        fixed = min(fixed, self._recomputing)
        ratio = min(ratio, _MOST_GROWTH)
        expected = fixed + int((self._recomputing - fixed) * ratio)
        now = self.placed + expected
        if now <= target:
            return None
        found = self._with_room_for(expected)
        more = len(found.paged) - len(self.plan.paged)
        if more <= 0:
            return None
        words = (
            f"an input {ratio:.2f} times as large may need {human(now)} of {human(target)}: "
            f"{_in_words(more)} while it is measured"
        )
        self._remember(step, now, target, words)
        self.plan = replace(found, reasons=(*found.reasons, words))
        self._quiet = 0
        self.adapting = True
        return self.plan

    def _with_paged(self, count: int, reserve: int, anew: bool = False) -> Plan:
        """The plan with `count` paged blocks, few of them others than now.

        `anew`: evenly spread whatever streams now. Where blocks leave although all fits, the link
        has time in every pass, and what counts is that no load is waited for.
        """
        options = replace(self._options, reserve=reserve, reserved_with=self.plan.paged)
        machine = replace(self._machine, host_available=None)
        stuck = [index for index in self.plan.paged if index not in self._movable]
        current = [index for index in self.plan.paged if index in self._movable]
        count = min(max(0, count - len(stuck)), len(self._movable))
        if anew:
            chosen = tuple(self._movable[k] for k in spread(count, len(self._movable)))
        else:
            chosen = repage(current, self._movable, count)
        paged = tuple(sorted([*stuck, *chosen]))
        case = Case(self._model, machine, options, (), options.slot_count)
        if case.shortfall(paged) and options.slot_count > 1:
            case = Case(self._model, machine, options, (), 1)
        return case.plan(paged)

    @property
    def placed(self) -> int:
        """Bytes of blocks and slots on the device."""
        predicted = self.plan.predicted
        return predicted.get("resident_blocks", 0) + predicted.get("slots", 0)

    def stop(self, plan: Plan) -> None:
        """Moving blocks failed: `plan` stays in force."""
        self.plan = plan
        self._may_move = False
        self.adapting = False

    def _replan(self, peak: int, target: int, may_return: bool) -> Plan | None:
        now = len(self.plan.paged)
        over = peak > target
        returning = may_return and self._returns < _MOST_RETURNS and now > 0
        case = (over, self._most_needed, target, self.plan.paged)
        if case == self._stays or not (over or returning):
            return None
        enough = self._with_room_for(self._most_needed + int(target * _MARGIN))
        if over and len(enough.paged) > now:
            return enough
        if not over and len(enough.paged) < now:
            return enough
        self._stays = case  # the same answer at the next step, without the search
        return None

    def _with_room_for(self, reserve: int) -> Plan:
        """The plan that leaves `reserve` bytes to everything but blocks and slots."""
        options = replace(self._options, reserve=reserve, reserved_with=self._needed_with)
        machine = replace(self._machine, host_available=None)
        stuck = [index for index in self.plan.paged if index not in self._movable]
        current = [index for index in self.plan.paged if index in self._movable]
        choices: dict[int, tuple[int, ...]] = {}
        trained = max(self._model.trained_pageable, default=0)
        most = max((self._model.pageable[index] for index in self._movable), default=1) + trained
        for slots in range(options.slot_count, 0, -1):
            case = Case(self._model, machine, options, (), slots)
            # Each block that leaves frees no more than `most`.
            least = case.shortfall(()) // most - len(stuck)
            for count in range(min(max(0, least), len(self._movable)), len(self._movable) + 1):
                if count not in choices:
                    more = repage(current, self._movable, count)
                    choices[count] = tuple(sorted([*stuck, *more]))
                if case.shortfall(choices[count]) == 0:
                    return case.plan(choices[count])
        return case.plan(choices[len(self._movable)])

    def _over(self, peak: int, target: int) -> str:
        if peak <= target or self._warned:
            return ""
        self._warned = True
        return (
            f"a step used {human(peak)}, over the target of {human(target)}, and no block can be "
            f"moved to change that. Use a smaller batch or shorter sequences, recompute=True, or "
            f"a smaller vram_headroom if that is what you want."
        )

    def _remember(self, step: int, peak: int, target: int, change: str) -> None:
        self.history.append(Observation(step, peak, target, len(self.plan.paged), change))
        del self.history[: -self.HISTORY]


def _in_words(more: int) -> str:
    return f"{more} more blocks stream" if more > 0 else f"{-more} blocks stay on the device"
