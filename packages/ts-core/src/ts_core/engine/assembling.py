"""Putting a session together: weights to their places, what runs blocks, and who tells whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from ts_core.engine.activation_options import activation_options
from ts_core.engine.activations import Activations
from ts_core.engine.adapting import PlacementAdapter
from ts_core.engine.attention import AttentionChoice
from ts_core.engine.casts import Casts
from ts_core.engine.experts import ExpertPaging, StackedExperts, parameters_of
from ts_core.engine.experts_store import run_stored
from ts_core.engine.hosting import build_images
from ts_core.engine.meta_loading import MetaLoading
from ts_core.engine.placement import left_out, move_resident
from ts_core.engine.replay import replay_for
from ts_core.engine.residence import start as start_optimizer
from ts_core.engine.session import ATTRIBUTE, TrainStreamSession
from ts_core.engine.session_optimizer import session_optimizer
from ts_core.engine.state_room import StateRoom
from ts_core.engine.wrap_checks import check_no_gradients, compiled_from_outside
from ts_core.memory.arena import default_arena
from ts_core.optim import OffloadAdamW
from ts_core.schedule import MachineProfile, ModelProfile, PlanOptions
from ts_core.schedule.plan import human
from ts_core.store import Leaf, ParamPager


def assemble(
    session: TrainStreamSession,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    leaves: Sequence[Sequence[Leaf]],
    profile: ModelProfile,
    machine: MachineProfile,
    asked: PlanOptions,
    experts: Sequence[StackedExperts],
    loading: MetaLoading | None,
) -> OffloadAdamW:
    """Give a planned session its parts and hook the model; returns the optimizer to train with.

    Args:
        session: that of `model`, with its plan.
        model: gets the session as an attribute, last.
        optimizer: the user's, if any.
        leaves: per block, its weights that could stream.
        profile, machine, asked: what the plan was made from.
        experts: stacks of experts that page.
        loading: reads values of a model on the meta device.

    Raises:
        TrainstreamError: as wrap() does; the session is to be closed then.
    """
    blocks, log = session.blocks, session.log
    _place_weights(session, model, leaves, experts, loading)
    session.replay = replay_for(session, model)
    if blocks:
        options = activation_options(session.config, session.replay is not None)
        session.activations = Activations(blocks, session.copies, options, log)
    session.attention = AttentionChoice(session.config.attention, session.device, log)
    session.attention.install(model, blocks)  # inside what is computed again
    session.casts = Casts(blocks, model)
    session.hook_blocks()
    session.optimizer = made = session_optimizer(model, optimizer, session)
    start_optimizer(session)
    # Once activations have been measured, room for recordings is set apart before others share it.
    asked = replace(asked, replayed=False, avoid_pages=session.replay is not None)
    elsewhere = frozenset(parameters_of(experts) | left_out(model, made))
    session.adapter = PlacementAdapter(session, model, profile, machine, asked, elsewhere)
    _connect(session, session.adapter, made, machine)
    session.hook_model(model)
    session.watch_for_room()
    if compiled_from_outside(model, blocks):
        log(
            "torch.compile: the blocks run as they are, since their forwards are entered from "
            "outside what was compiled. To compile them, replace each by torch.compile(block) "
            "before wrap()"
        )
    setattr(model, ATTRIBUTE, session)
    session.device.reset_peak()
    return made


def _place_weights(
    session: TrainStreamSession,
    model: nn.Module,
    leaves: Sequence[Sequence[Leaf]],
    experts: Sequence[StackedExperts],
    loading: MetaLoading | None,
) -> None:
    """Paged weights to their images, those of experts to theirs, the rest to the device."""
    device, plan, log = session.device, session.plan, session.log
    paged = [leaf for index in plan.paged for leaf in leaves[index]]
    check_no_gradients(paged)
    images = build_images(session, {index: leaves[index] for index in plan.paged})
    if experts:
        session.experts = ExpertPaging(experts, session.copies, default_arena())
        paged += session.experts.leaves()
        log(session.experts.in_words())
    session.stored_experts = run_stored(model, session.blocks, experts)
    if loading is not None:
        loading.fill(model, device)
        log(
            f"loader: {loading.tensors} tensors of {human(loading.size_bytes)} read to where they "
            f"stay"
        )
    move_resident(model, device, paged)
    resident = plan.predicted.get("resident_blocks", 0)
    session.resident_reservation = device.pool.reserve(resident, "resident blocks")
    if images:
        session.pager = ParamPager(images, session.copies, plan.slot_count)


def _connect(
    session: TrainStreamSession,
    adapter: PlacementAdapter,
    optimizer: OffloadAdamW,
    machine: MachineProfile,
) -> None:
    """Tell activations what else wants device memory, and the others what they set apart."""
    activations = session.activations
    if activations is None:
        return
    memory = activations.memory
    if session.replay is not None:
        memory.recorded = session.replay.beside_bytes
        memory.hidden = session.replay.pool_bytes
        memory.all_recorded = session.replay.complete
    state_room = StateRoom(session, machine.rates)
    memory.for_state = state_room
    activations.share_room = adapter.share_room
    activations.pledge = state_room.pledge
    activations.before_larger = adapter.before_larger
    activations.may_move = adapter.may_move
    activations.streams = adapter.streams
    optimizer.leave_room_for(lambda: memory.apart + memory.hidden())
    optimizer.forward_takes(lambda: state_room.forward_s)
