"""In which codec the frozen weights are stored, if any: planned with each until one fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from ts_core.config import WrapOptions
from ts_core.device import Device
from ts_core.engine.experts import StackedExperts, parameters_of, without_experts
from ts_core.engine.experts_store import unpaged_experts
from ts_core.engine.placement import block_leaves
from ts_core.engine.planning import machine_profile, plan_options, profile_under
from ts_core.engine.quantize import quantizable_weights
from ts_core.engine.quantize_options import bytes_per_weight
from ts_core.engine.session import EventLog
from ts_core.errors import OutOfBudgetError
from ts_core.optim.moments import MOMENT_KINDS, bytes_per_value
from ts_core.registry import codecs
from ts_core.schedule import (
    MachineProfile,
    ModelProfile,
    Plan,
    make_plan,
)
from ts_core.schedule.planner import evaluate
from ts_core.schedule.remedies import Alternative

_OFF = ("none", None, False)


def choose_codec(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    device: Device,
    config: WrapOptions,
    log: EventLog,
    moments: str,
    experts: Sequence[StackedExperts] = (),
    optimizer: torch.optim.Optimizer | None = None,
) -> str | None:
    """The codec to store frozen weights in, or None; refuses a run that cannot fit."""
    leaves = block_leaves(model, blocks, parameters_of(experts), optimizer)
    profile = profile_under(config, model, leaves, moments, optimizer)
    named = config.quantize if config.quantize not in (*_OFF, "auto") else None
    profile = without_experts(profile, experts, named and bytes_per_weight(named, config))
    weights = quantizable_weights(blocks, unpaged_experts(model, blocks, experts))
    plan, codec = plan_codec(
        profile, weights, machine_profile(device, model, optimizer), config, moments
    )
    if not plan.fits:
        if config.check_memory:
            raise OutOfBudgetError(" ".join(plan.reasons))
        log(f"check_memory=False: going on although {' '.join(plan.reasons)}")
    elif codec is not None and config.quantize == "auto":
        log(f"quantize='auto': {codec} chosen, since the run does not fit without it")
    return codec


def plan_codec(
    profile: ModelProfile,
    weights: Sequence[tuple[int, int]],
    machine: MachineProfile,
    config: WrapOptions,
    moments: str,
) -> tuple[Plan, str | None]:
    """The plan, and the codec to store frozen weights in or None (a pure function).

    Args:
        profile: of the model in full precision.
        weights: per block, count and bytes of the weights that can be stored in a codec.
        machine: what there is.
        config: the options of wrap().
        moments: how moments are kept.
    """
    options = plan_options(config)

    def plan_with(codec_name: str | None) -> Plan:
        estimate = stored_estimate(profile, weights, codec_name, config)
        plan = evaluate(estimate, machine, options)
        if plan.fits or not config.check_memory:
            return plan
        tried = _alternatives(profile, weights, codec_name, config, moments)
        return make_plan(estimate, machine, options, tried)

    asked = config.quantize
    if asked in _OFF:
        return plan_with(None), None
    if asked != "auto":
        return plan_with(asked), asked
    plain = evaluate(profile, machine, options)
    enough = plain.fits and not (config.prefer == "speed" and plain.paged)
    if enough:
        return plain, None
    if any(count for count, _ in weights):
        for name in by_precision():
            plan = evaluate(stored_estimate(profile, weights, name, config), machine, options)
            if plan.fits and not (config.prefer == "speed" and plain.fits and plan.paged):
                return plan, name
    return plan_with(None), None


def by_precision() -> list[str]:
    """Names of the installed codecs, the most precise first."""
    found = [(codecs.get(name).error_rank_order, name) for name in codecs.names()]
    return [name for _, name in sorted(found)]


def stored_estimate(
    profile: ModelProfile,
    weights: Sequence[tuple[int, int]],
    codec_name: str | None,
    config: WrapOptions,
) -> ModelProfile:
    """The profile with the frozen weights of the blocks stored in a codec (None: as they are)."""
    if codec_name is None:
        return profile
    per_weight = bytes_per_weight(codec_name, config)
    pageable = tuple(
        size - plain_bytes + int(count * per_weight)
        for size, (count, plain_bytes) in zip(profile.pageable, weights, strict=True)
    )
    saved = sum(profile.pageable) - sum(pageable)
    return replace(
        profile,
        pageable=pageable,
        in_host=min(profile.in_host, sum(pageable)),
        to_load=max(0, profile.to_load - saved) if profile.to_load else 0,
    )


def _alternatives(
    profile: ModelProfile,
    weights: Sequence[tuple[int, int]],
    codec_name: str | None,
    config: WrapOptions,
    moments: str,
) -> list[Alternative]:
    """Other ways to run a training that does not fit: another codec, smaller moments."""
    found = []
    if any(count for count, _ in weights) and config.quantize != "auto":
        for name in by_precision():
            if name != codec_name:
                words = f"store the frozen weights of the blocks in {name} (quantize={name!r})"
                found.append(Alternative(words, stored_estimate(profile, weights, name, config)))
    now = stored_estimate(profile, weights, codec_name, config)
    for kind in MOMENT_KINDS[MOMENT_KINDS.index(moments) + 1 :]:
        saved = int(profile.trained_values * (bytes_per_value(moments) - bytes_per_value(kind)))
        words = f"keep moments in less memory (optimizer_mode='cpu', moment_dtype={kind!r})"
        found.append(Alternative(words, replace(now, host_state=now.host_state - saved)))
    return found
