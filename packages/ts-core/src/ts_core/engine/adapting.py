"""Moving blocks between host and device after the first steps, by what the steps really used.

`PeakCorrector` decides; this module reads the peak and moves blocks, between one step and the next
forward. A block's values are copied as they are, so moving it changes no bit of any result.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from ts_core.engine.placement import block_leaves, move_resident
from ts_core.engine.planning import work_of
from ts_core.engine.slot_depth import SlotDepth
from ts_core.errors import OutOfBudgetError
from ts_core.schedule import MachineProfile, ModelProfile, Plan, PlanOptions
from ts_core.schedule.activation_policy import BlockActivations
from ts_core.schedule.corrections import PeakCorrector
from ts_core.store import BlockImage, Leaf, ParamPager

if TYPE_CHECKING:
    from ts_core.engine.session import TrainStreamSession


class PlacementAdapter:
    """Watches the peak of each step of a wrapped model and moves blocks accordingly.

    Args:
        session: of the model.
        model: the wrapped model.
        profile, machine, options: what the plan in force was made from.
        excluded: `id`s of parameters that are placed by something else.

    Attributes:
        corrector: decides; its history is in `memory_report()`.
    """

    def __init__(
        self,
        session: TrainStreamSession,
        model: nn.Module,
        profile: ModelProfile,
        machine: MachineProfile,
        options: PlanOptions,
        excluded: frozenset[int] = frozenset(),
    ) -> None:
        self._session = weakref.ref(session)
        self._model = weakref.ref(model)
        self._excluded = excluded
        movable = list(range(len(session.blocks)))
        if session.optimizer is not None and session.optimizer.processes > 1:
            # Processes average their gradients by bucket, so trained weights stay in theirs.
            trained = profile.trained_pageable
            movable = [index for index in movable if not (trained and trained[index])]
        self.corrector = PeakCorrector(profile, machine, options, session.plan, movable)
        self._seen = session.steps
        self._begun: tuple[int, int] | None = None  # steps and gradients, as a forward began
        self._held = 0  # of the optimizer on the device, when activations were measured
        self.depth = self._new_depth(session)
        self._all_recorded = False

    @property
    def adapting(self) -> bool:
        """Whether blocks may still change place, or stream through another number of slots."""
        trying = self.depth is not None and not self.depth.tuner.settled
        return self.corrector.adapting or trying

    def streams(self) -> bool:
        """Whether weights of blocks stream now."""
        session = self._session()
        return session is not None and session.pager is not None

    def between_steps(self) -> None:
        """Called before a training forward: look at the step before, and move blocks."""
        session = self._session()
        if session is None or session.steps == self._seen:
            return
        activations = session.activations
        if activations is not None and activations.measuring and session.device.separate_memory:
            return  # a probe's peak is for `share_room`
        if not self.may_move():
            return  # the first pass of an accumulation was such a probe
        self._seen = session.steps
        if self._now_recorded(session):
            session.device.reset_peak()
            return
        peak = session.device.memory()["peak_allocated"]
        apart = 0 if activations is None else activations.memory.apart
        target = self.corrector.target
        if target is not None and session.optimizer is not None:
            # Split state came last into the room that was left, and goes first. Blocks that leave
            # would only make room for more of it.
            pool = activations.memory.hidden() if activations and self._all_recorded else 0
            if session.optimizer.give_state_back(peak + apart + pool - target):
                return
        was_adapting = self.corrector.adapting
        heard = len(self.corrector.history)
        before = session.plan
        settled = activations is None or not activations.adapting
        found = self.corrector.observe(self._seen, peak, settled, apart)
        for entry in self.corrector.history[heard:]:
            if entry.change:
                session.log(f"plan: {entry.change}")
        if found is not None:
            self._move(session, before, found)
        elif was_adapting and not self.corrector.adapting:
            session.log(f"plan: settled after {self._seen} steps")
        if found is None and settled and not self.corrector.adapting:
            self._try_slots(session, peak + apart)

    def _now_recorded(self, session: TrainStreamSession) -> bool:
        """Whether steps replay all blocks from here on.

        The recordings' memory then serves for what steps before had of their own, and which is part
        of the peak so far.
        """
        before, self._all_recorded = self._all_recorded, False
        if session.replay is not None and session.replay.complete():
            self._all_recorded = True
        return self._all_recorded and not before

    def forward_begins(self) -> None:
        """A training forward begins: its backward needs the blocks where they are."""
        session = self._session()
        if session is not None and session.optimizer is not None:
            self._begun = session.steps, session.optimizer.gradients_come

    def may_move(self) -> bool:
        """Whether blocks may change place now.

        Not between a forward and its backward (a loss of two forwards, say), and those with
        trained weights not between the passes of a step.
        """
        session = self._session()
        if session is None or session.optimizer is None:
            return True
        if self._begun == (session.steps, session.optimizer.gradients_come):
            return False
        return not (session.trains_pageable and session.optimizer.mid_step)

    def share_room(self, measured: Sequence[BlockActivations], room: int) -> int:
        """Activations are known now: move blocks as the shortest predicted step has them.

        Called between steps, before it is decided which activations stay.

        Args:
            measured: per block.
            room: bytes of device memory beyond a step that recomputes every block.

        Returns:
            Bytes of it that blocks took; negative when blocks left and gave some.
        """
        session = self._session()
        if session is None:
            return 0
        self._held = 0 if session.optimizer is None else session.optimizer.held_on_device()
        before = session.plan
        work = work_of(session.blocks, measured, session.device.torch_device)
        found = self.corrector.share_room(session.steps, room, measured, work)
        if found is None or not self._move(session, before, found):
            return 0
        session.log(f"plan: {found.reasons[-1]}")
        return _placed(found) - _placed(before)

    @property
    def expected_peak(self) -> int | None:
        """Device memory in bytes that a step takes, by what the first one showed.

        What a step needs that recomputes every block, and recordings of blocks, with the blocks
        and slots there are now, the activations that stay, and the optimizer's state and gradients.
        What waits for a busier link comes on top: copies to the host, up to `max_leaving_bytes` of
        the copy engine, and half as much of gradients for updates by the device.
        None until activations have been measured on a device with a limit.
        """
        session, recomputing = self._session(), self.corrector.recomputing
        if session is None or recomputing is None or session.activations is None:
            return None
        held = 0 if session.optimizer is None else session.optimizer.held_on_device()
        kept = session.activations.device_bytes
        return recomputing + self.corrector.placed + kept + held - self._held

    def before_larger(self, ratio: float) -> None:
        """An input comes that is `ratio` times as large as any before, and will be measured.

        Recordings of smaller ones go, with the memory that they hold, and blocks may leave.
        """
        session = self._session()
        if session is None:
            return
        if session.replay is not None:
            session.replay.forget()
        if not self.may_move():
            return
        before = session.plan
        found = self.corrector.make_room(session.steps, ratio)
        if found is not None and self._move(session, before, found):
            session.log(f"plan: {found.reasons[-1]}")

    def _move(self, session: TrainStreamSession, before: Plan, plan: Plan) -> bool:
        moved = True
        try:
            self._apply(session, plan)
        except OutOfBudgetError as error:
            self._apply(session, before)
            self.corrector.stop(before)
            session.log(f"plan: blocks stay where they are, since moving them failed: {error}")
            moved = False
        session.device.reset_peak()
        self.depth = self._new_depth(session)
        return moved

    def _new_depth(self, session: TrainStreamSession) -> SlotDepth | None:
        """For the placement in force, where slots are memory that has a limit."""
        if session.pager is not None:
            session.pager.waits = None
        limited = session.device.separate_memory and self.corrector.target is not None
        limited = limited and session.replay is None  # each place of a block is recorded
        return SlotDepth(session.device, session.plan) if limited and session.plan.paged else None

    def _try_slots(self, session: TrainStreamSession, peak: int) -> None:
        """Give the ring as many slots as the steps so far have shown to be fastest."""
        pager, target, depth = session.pager, self.corrector.target, self.depth
        if depth is None or pager is None or target is None or session.optimizer is None:
            return
        trying = not depth.tuner.settled
        if depth.observe(pager, target - peak):
            session.optimizer.synchronize()
            try:
                pager.take_out((), depth.tuner.slots)
            except OutOfBudgetError:  # the pool has less than the peak showed
                depth.tuner.tighten()
                pager.take_out((), depth.tuner.slots)
            session.plan = self.corrector.plan = depth.with_slots(session.plan)
            session.device.reset_peak()
        if trying and depth.tuner.settled:
            session.log(
                f"plan: {depth.tuner.slots} slots for the {len(session.plan.paged)} blocks that "
                f"stream: {depth.tuner.reason}"
            )

    def _apply(self, session: TrainStreamSession, plan: Plan) -> None:
        """Let exactly the blocks of `plan.paged` stream."""
        assert session.optimizer is not None and session.store is not None
        session.optimizer.synchronize()  # weights being updated would be copied too early
        paged = set() if session.pager is None else set(session.pager.images)
        if session.resident_reservation is not None:
            session.resident_reservation.release()
            session.resident_reservation = None
        self._start_streaming(session, sorted(set(plan.paged) - paged), plan.slot_count)
        taken: list[BlockImage] = []
        if session.pager is not None:
            taken = session.pager.take_out(sorted(paged - set(plan.paged)), plan.slot_count)
            self._bring_back(session, taken)
        if session.pager is not None and not plan.paged:
            pager, session.pager = session.pager, None
            session.hook_blocks()
            pager.close()
        session.optimizer.set_homes({home.param: home for home in session.homes})
        session.store.forget(taken)
        session.plan = plan
        resident = plan.predicted.get("resident_blocks", 0)
        session.resident_reservation = session.device.pool.reserve(resident, "resident blocks")

    def _start_streaming(
        self, session: TrainStreamSession, indices: list[int], slot_count: int
    ) -> None:
        if not indices:
            return
        assert session.store is not None
        leaves = self._leaves(session)
        images = session.store.build({index: leaves[index] for index in indices})
        try:
            if session.pager is None:
                session.pager = ParamPager(images, session.copies, slot_count)
                session.hook_blocks()
            else:
                session.pager.put_in(images, slot_count)
        except BaseException:  # bound to host images that nothing streams
            self._bring_back(session, images)
            session.store.forget(images)
            raise

    def _bring_back(self, session: TrainStreamSession, images: Sequence[BlockImage]) -> None:
        """Give blocks, bound to their host images, memory of the device."""
        if not session.device.separate_memory:
            for image in images:
                for placement in image.placements:
                    placement.leaf.set(placement.leaf.get().clone())
            return
        elsewhere = [] if session.experts is None else session.experts.leaves()
        for image in images:
            move_resident(session.blocks[image.index], session.device, elsewhere)

    def _leaves(self, session: TrainStreamSession) -> list[list[Leaf]]:
        model = self._model()
        assert model is not None
        return block_leaves(model, session.blocks, self._excluded, session.optimizer)


def _placed(plan: Plan) -> int:
    return plan.predicted.get("resident_blocks", 0) + plan.predicted.get("slots", 0)
