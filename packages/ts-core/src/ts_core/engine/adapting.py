"""Moving blocks between host and device after the first steps, by what the steps really used.

`PeakCorrector` decides; this module reads the peak and moves blocks, between one step and the next
forward. A block's values are copied as they are, so moving it changes no bit of any result.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from ts_core.engine.blocks import shared_parameters
from ts_core.engine.placement import move_resident
from ts_core.errors import OutOfBudgetError
from ts_core.schedule import MachineProfile, ModelProfile, Plan, PlanOptions
from ts_core.schedule.corrections import PeakCorrector
from ts_core.store import BlockImage, ParamPager, pageable_leaves

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
        self._shared = shared_parameters(model, session.blocks) | excluded
        movable = range(len(session.blocks))
        self.corrector = PeakCorrector(profile, machine, options, session.plan, movable)
        self._seen = session.steps

    @property
    def adapting(self) -> bool:
        """Whether blocks may still change place."""
        return self.corrector.adapting

    def between_steps(self) -> None:
        """Called before a training forward: look at the step before, and move blocks."""
        session = self._session()
        if session is None or session.steps == self._seen:
            return
        self._seen = session.steps
        peak = session.device.memory()["peak_allocated"]
        was_adapting = self.corrector.adapting
        heard = len(self.corrector.history)
        before = session.plan
        found = self.corrector.observe(self._seen, peak, _activations_settled(session))
        for entry in self.corrector.history[heard:]:
            if entry.change:
                session.log(f"plan: {entry.change}")
        if found is not None:
            self._move(session, before, found)
        elif was_adapting and not self.corrector.adapting:
            session.log(f"plan: settled after {self._seen} steps")

    def _move(self, session: TrainStreamSession, before: Plan, plan: Plan) -> None:
        try:
            self._apply(session, plan)
        except OutOfBudgetError as error:
            self._apply(session, before)
            self.corrector.stop(before)
            session.log(f"plan: blocks stay where they are, since moving them failed: {error}")
        session.device.reset_peak()

    def _apply(self, session: TrainStreamSession, plan: Plan) -> None:
        """Let exactly the blocks of `plan.paged` stream."""
        assert session.optimizer is not None
        session.optimizer.synchronize()  # weights that are still being updated would be copied old
        paged = set() if session.pager is None else set(session.pager.images)
        _give_back(session)
        self._start_streaming(session, sorted(set(plan.paged) - paged), plan.slot_count)
        if session.pager is not None:
            taken = session.pager.take_out(sorted(paged - set(plan.paged)), plan.slot_count)
            for image in taken:
                self._bring_back(session, image.index)
            assert session.store is not None
            session.store.forget(taken)
        session.optimizer.set_homes({home.param: home for home in session.homes})
        if not plan.paged:
            _stop_streaming(session)
        session.plan = plan
        resident = plan.predicted.get("resident_blocks", 0)
        session.resident_reservation = session.device.pool.reserve(resident, "resident blocks")

    def _start_streaming(
        self, session: TrainStreamSession, indices: list[int], slot_count: int
    ) -> None:
        if not indices:
            return
        images: list[BlockImage] = []
        try:
            assert session.store is not None
            images = session.store.build(
                {index: pageable_leaves(session.blocks[index], self._shared) for index in indices}
            )
            if session.pager is None:
                session.pager = ParamPager(images, session.copies, slot_count)
                session.hook_blocks()
            else:
                session.pager.put_in(images, slot_count)
        except BaseException:
            for index in indices:  # some are bound to host images that nothing streams
                self._bring_back(session, index)
            if images and session.store is not None:
                session.store.forget(images)
            raise

    def _bring_back(self, session: TrainStreamSession, index: int) -> None:
        """Give a block, bound to its host image, memory of the device."""
        block = session.blocks[index]
        elsewhere = [] if session.experts is None else session.experts.leaves()
        if session.device.separate_memory:
            move_resident(block, session.device, elsewhere)
            return
        for leaf in pageable_leaves(block, self._shared):
            leaf.set(leaf.get().clone())


def _activations_settled(session: Any) -> bool:
    activations = getattr(session, "activations", None)
    return not getattr(activations, "adapting", False)


def _give_back(session: TrainStreamSession) -> None:
    if session.resident_reservation is not None:
        session.resident_reservation.release()
        session.resident_reservation = None


def _stop_streaming(session: TrainStreamSession) -> None:
    """Nothing streams: take the pager's hooks off and give the ring back."""
    pager, session.pager = session.pager, None
    session.hook_blocks()
    if pager is not None:
        pager.close()
