"""Where optimizer state lives with offload="auto": on the device, as soon as there is room.

Parameters that stay on the device whatever the plan (adapters, norms, biases) have their state
there from the first step, when the plan has room for it: the plan counts it. Otherwise the peak of
the first steps decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from ts_core.config import WrapOptions
from ts_core.errors import OutOfBudgetError
from ts_core.optim.resident import device_bytes_needed, why_not
from ts_core.schedule import MachineProfile, ModelProfile, Plan, PlanOptions, make_plan
from ts_core.schedule.plan import human
from ts_core.schedule.planner import evaluate
from ts_core.schedule.rates import TYPICAL_GPU
from ts_core.store import Leaf

if TYPE_CHECKING:
    from ts_core.engine.session import TrainStreamSession

UPDATES_BEFORE_RESIDENCE = 2
# Before a step has been measured, state may take this share of the device's memory, and push this
# many blocks off the device; more where host threads would take longer than what has to stream.
SMALL_SHARE = 0.10
BLOCKS_PUSHED_OUT = 1


def staying(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    leaves: Sequence[Sequence[Leaf]],
    config: WrapOptions,
    moments: str,
    several: bool = False,
) -> list[nn.Parameter]:
    """The trained parameters, when all of them stay on the device whatever the plan.

    Args:
        model, optimizer, config: of wrap().
        leaves: per block, what can be paged.
        moments: how they are kept; only fp32 ones are kept on the device.
        several: whether processes average their gradients, on the host.

    Returns:
        Empty when their state belongs on the host, or that is decided later.
    """
    if config.offload != "auto" or moments != "float32" or several:
        return []
    if optimizer is None:
        trained = [param for param in model.parameters() if param.requires_grad]
    else:
        trained = [param for group in optimizer.param_groups for param in group["params"]]
    pageable = {id(leaf.owner) for block in leaves for leaf in block if leaf.trained}
    if why_not(trained) or any(id(param) in pageable for param in trained):
        return []
    return trained


def plan_with_state(
    profile: ModelProfile,
    machine: MachineProfile,
    options: PlanOptions,
    params: Sequence[nn.Parameter],
) -> tuple[ModelProfile, Plan, bool]:
    """The plan, with the optimizer state of `params` on the device when it has room (pure).

    Returns:
        The profile that the plan is for, the plan, and whether the state is on the device.
    """
    plan = make_plan(profile, machine, options)
    if not (params and plan.fits and machine.counts_fixed) or machine.device_bytes is None:
        return profile, plan, False
    counted = with_state(profile, params)
    found = evaluate(counted, machine, options)
    small = device_bytes_needed(params) <= SMALL_SHARE * machine.device_bytes
    few = len(found.paged) <= len(plan.paged) + BLOCKS_PUSHED_OUT
    if small and found.fits and (few or _host_is_slower(profile, machine, options)):
        return counted, found, True
    return profile, plan, False


def _host_is_slower(profile: ModelProfile, machine: MachineProfile, options: PlanOptions) -> bool:
    """Whether updates by host threads take longer than streaming the blocks that never fit.

    Where they do not, they hide behind it, and blocks that state pushes out would make it longer.
    """
    least = evaluate(profile, machine, replace(options, activation_share=0.0))
    rates = machine.rates or TYPICAL_GPU
    streams = 2 * sum(profile.pageable[index] for index in least.paged) / rates.h2d
    return profile.trained_values / rates.host_adamw > streams


def plan_with_tables(
    profile: ModelProfile,
    machine: MachineProfile,
    options: PlanOptions,
    params: Sequence[nn.Parameter],
    take: Callable[[], bool],
    check_memory: bool,
) -> tuple[ModelProfile, Plan, bool]:
    """`plan_with_state`, with input embeddings in host memory where the plan says so.

    Args:
        profile, machine, options, params: as for `plan_with_state`.
        take: moves the embeddings; whether it could.
        check_memory: refuse a run that cannot fit without that.

    Raises:
        OutOfBudgetError: it cannot fit.
    """
    found = plan_with_state(profile, machine, options, params)
    if found[1].host_tables and not take():
        found = plan_with_state(replace(profile, tables=0), machine, options, params)
        if check_memory and not found[1].fits:
            raise OutOfBudgetError(" ".join(found[1].reasons))
    counted, plan, on_device = found
    return counted.with_host_tables() if plan.host_tables else counted, plan, on_device


def with_state(profile: ModelProfile, params: Sequence[nn.Parameter]) -> ModelProfile:
    """The profile with the state of all trained parameters on the device instead of the host."""
    gradients = sum(param.numel() * param.element_size() for param in params)
    work = profile.work
    if work is not None:  # the device updates: no host threads, and nothing of it on the link
        work = replace(work, updates=0, gradient_bytes=0, updated_bytes=0)
    return replace(
        profile,
        work=work,
        fixed_device=profile.fixed_device + device_bytes_needed(params) - gradients,
        trained=gradients,
        gradients_wait=True,
        host_state=0,
        host_copies=0,
    )


def start(session: TrainStreamSession) -> None:
    """Make the optimizer's memory: on the device when the plan says so, else on the host."""
    optimizer = session.optimizer
    assert optimizer is not None
    if optimizer.resident:
        return
    if not session.state_on_device:
        optimizer.build()  # host memory now, so that nothing is page-locked in backward
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    optimizer.make_resident()
    session.log(
        f"offload='auto': what is trained stays on the device, and the plan has room for its "
        f"optimizer state ({human(device_bytes_needed(params))} with gradients), which is moved to "
        f"the device; torch's fused AdamW from the first step"
    )


def consider(session: TrainStreamSession) -> None:
    """After a step: once the peak is known, move the state to the device if all of it fits."""
    optimizer = session.optimizer
    if optimizer is None or optimizer.updates < UPDATES_BEFORE_RESIDENCE:
        return
    if session.activations is not None and session.activations.adapting:
        return  # the peak of a step is not yet what it will be
    if session.adapting and session.plan.paged:
        return  # blocks may come back to the device first
    optimizer.after_step = None
    params = [param for group in optimizer.param_groups for param in group["params"]]
    device = session.device
    budget = device.usable_bytes()
    why = _why_not_now(session, params)
    if why or budget is None:
        session.log(f"offload='auto': optimizer state stays on the host, since {why}")
        return
    target = int(budget * (1 - session.config.vram_headroom))
    free = target - device.memory()["peak_allocated"]
    if session.activations is not None:
        free -= session.activations.memory.apart
    needed = device_bytes_needed(params)
    if needed > free:
        session.log(
            f"offload='auto': optimizer state stays on the host: it needs {human(needed)} of "
            f"the device and {human(max(free, 0))} are free at the peak of a step"
        )
        return
    optimizer.make_resident()
    if session.adapter is not None and session.trains_pageable:
        session.adapter.corrector.stop(session.plan)  # those weights have to stay now
    session.log(
        f"offload='auto': everything fits, optimizer state ({human(needed)} with gradients) "
        f"moved to the device; torch's fused AdamW from here on"
    )


def _why_not_now(session: TrainStreamSession, params: Sequence[nn.Parameter]) -> str:
    if session.plan.paged and session.trains_pageable:
        return f"{len(session.plan.paged)} blocks stream with weights that are trained"
    return why_not(params)
