"""wrap() and unwrap()."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from ts_core.config import WrapOptions
from ts_core.device import Device, resolve_device
from ts_core.engine.activation_options import check_activation_options
from ts_core.engine.assembling import assemble
from ts_core.engine.blocks import A_STACK, find_blocks
from ts_core.engine.codec_choice import choose_codec
from ts_core.engine.experts import (
    StackedExperts,
    experts_to_page,
    parameters_of,
    without_experts,
)
from ts_core.engine.meta_loading import MetaLoading, meta_tensors
from ts_core.engine.optimizer_checks import blocks_left_out, check_lr, say_kept, say_left_out
from ts_core.engine.patches import apply_patches, patches_asked_for, patches_chosen
from ts_core.engine.placement import block_leaves, move_resident
from ts_core.engine.planning import (
    choose_moments,
    machine_profile,
    plan_options,
    profile_under,
    with_rates,
)
from ts_core.engine.quantize import quantize_model
from ts_core.engine.quantize_options import quantize_options
from ts_core.engine.residence import plan_with_tables, staying
from ts_core.engine.served import (
    configure_products,
    holds_stored,
    log_products,
    log_stored,
    serve_stored,
    start_adapters,
    stored_codecs,
)
from ts_core.engine.session import ATTRIBUTE, EventLog, TrainStreamSession
from ts_core.engine.tables import HostTables, lookup_tables
from ts_core.engine.wrap_checks import (
    check_blocks,
    check_pageable,
    check_state,
)
from ts_core.errors import StateError
from ts_core.memory.arena import default_arena
from ts_core.optim import OffloadAdamW
from ts_core.optim.data_parallel import several_processes
from ts_core.transfer import CopyEngine

ModelT = TypeVar("ModelT", bound=nn.Module)


def wrap(
    model: ModelT, optimizer: torch.optim.Optimizer | None = None, **options: Any
) -> tuple[ModelT, OffloadAdamW]:
    """Make a model and its optimizer stream.

    Build the model, freeze or add adapters, quantize, create the optimizer, wrap, make a scheduler
    from the optimizer that this returns, train. The model is changed in place: what stays on the
    device is moved there, matrices of the paged blocks move to one host buffer per block and stream
    to the device when the block runs, gradients stream to host memory during backward, where the
    optimizer works.

    The matrices of a paged block are CPU tensors outside its computation, on a GPU too.

    Args:
        model: the model, on the CPU or already on the device; or on the meta device, with the
            option `loader`, from which its values are read straight to where they stay.
        optimizer: torch.optim.AdamW, torch.optim.Adam, OffloadAdamW, or None to make one with
            `lr` for every parameter that requires a gradient. No scheduler may drive it yet,
            unless it is an OffloadAdamW, which is kept.
        **options: see `ts_core.config.WrapOptions` and docs/options.md.

    Returns:
        The same model, and an OffloadAdamW to use in place of `optimizer`.

    Raises:
        OptionError: an unknown option, or a value that is not accepted.
        NotAvailableError: a value of the interface that is not built yet.
        StateError: the model is already wrapped.
        OutOfBudgetError: the run cannot fit: which budget failed, by how much, what would help.
            The model is unchanged then.
        DataError: `loader` has no values for a name, or not such as the model has. Parts of the
            model may be loaded then: build it again.
    """
    config = WrapOptions.from_keywords(options)
    patches = patches_asked_for(config)
    check_state(model, optimizer, config)
    if optimizer is not None and "lr" in options:
        check_lr(optimizer, config.lr)
    loading = None
    if config.loader is not None and meta_tensors(model):
        loading = MetaLoading(model, config.loader, optimizer)
    try:
        wrapped = _wrap(model, optimizer, config, patches, loading)
    finally:
        if loading is not None:
            loading.close()
    say_kept(optimizer, options, getattr(model, ATTRIBUTE).log)
    return wrapped


def _wrap(
    model: ModelT,
    optimizer: torch.optim.Optimizer | None,
    config: WrapOptions,
    patches: Any,
    loading: MetaLoading | None,
) -> tuple[ModelT, OffloadAdamW]:
    device = _device_for(model, config)
    blocks = list(config.blocks) if config.blocks is not None else find_blocks(model)
    check_blocks(model, blocks, config, device)
    check_activation_options(config.activation_offload, config.recompute, len(blocks))
    experts = experts_to_page(model, config.moe_paging)
    leaves = block_leaves(model, blocks, parameters_of(experts), optimizer)
    check_pageable(leaves, config, blocks_left_out(model, blocks, optimizer))
    log = EventLog(config.verbose)
    log(f"device: {device.torch_device} ({device.kind})")
    say_left_out(model, optimizer, log)
    if not blocks:
        log(
            f"blocks: no stack of blocks was found ({A_STACK}), so nothing streams. Pass "
            f"blocks=[...], the modules of the model that repeat"
        )
    if config.loader is not None and loading is None:
        log("loader: nothing to do, since nothing of the model is on the meta device")
    segments = device.grow_segments()  # the card itself is a limit, too
    if segments is not None:
        log(segments)
    if config.vram_limit_bytes is not None:
        device.set_limit(config.vram_limit_bytes)
    try:
        return _within(model, optimizer, blocks, device, config, log, patches, experts, loading)
    except BaseException:
        if config.vram_limit_bytes is not None:
            device.set_limit(None)
        raise


def _within(
    model: ModelT,
    optimizer: torch.optim.Optimizer | None,
    blocks: Sequence[nn.Module],
    device: Device,
    config: WrapOptions,
    log: EventLog,
    patches: Any,
    experts: Sequence[StackedExperts],
    loading: MetaLoading | None,
) -> tuple[ModelT, OffloadAdamW]:
    """The rest of wrap(), with the device's limit in force."""
    _take_workspaces(device, log)
    moments = choose_moments(model, optimizer, config, log, device)
    codec = choose_codec(model, blocks, device, config, log, moments, experts, optimizer)
    options = quantize_options(config, codec, log)
    quantized: dict[str, Any] = {}
    before = stored_codecs(blocks)
    if codec is not None:
        quantized = quantize_model(
            model,
            codec,
            blocks=blocks,
            device=device,
            block_size=config.quant_block_size,
            **options,
        )
    log_stored(before, codec, quantized.get("tensors", 0), log)
    serve_stored(model)
    quantized["outliers"] = configure_products(model, config, log)
    if loading is not None:
        loading.fill_adapters(model)
    start_adapters(model, log)
    model, wrapped = _start(
        model, optimizer, blocks, device, config, log, quantized, moments, experts, loading
    )
    session: TrainStreamSession = getattr(model, ATTRIBUTE)
    try:
        log_products(model, device.torch_device, log)
        patches += patches_chosen(config, holds_stored(blocks), device, log)
        session.patches = apply_patches(patches, model, blocks, device, log)
    except BaseException:
        unwrap(model)
        raise
    return model, wrapped


def unwrap(model: ModelT) -> ModelT:
    """Bring every weight back to the device as an ordinary tensor and remove the hooks.

    Raises:
        StateError: the model is not wrapped, or its paged weights are in the middle of a step.
    """
    session: TrainStreamSession | None = getattr(model, ATTRIBUTE, None)
    if session is None:
        raise StateError("the model is not wrapped: unwrap() takes what wrap() returned.")
    if session.homes and session.optimizer is not None:
        session.optimizer.refuse_mid_step("unwrap()")
    session.close()
    move_resident(model, session.device, ())
    if session.optimizer is not None:
        session.optimizer.set_homes({})
    delattr(model, ATTRIBUTE)
    return model


def _start(
    model: ModelT,
    optimizer: torch.optim.Optimizer | None,
    blocks: Sequence[nn.Module],
    device: Device,
    config: WrapOptions,
    log: EventLog,
    quantized: dict[str, Any],
    moments: str,
    experts: Sequence[StackedExperts],
    loading: MetaLoading | None,
) -> tuple[ModelT, OffloadAdamW]:
    leaves = block_leaves(model, blocks, parameters_of(experts), optimizer)
    profile = profile_under(config, model, leaves, moments, optimizer)
    profile = without_experts(profile, experts)
    machine, asked = machine_profile(device, model, optimizer), plan_options(config)
    several = several_processes(config.distributed, config.optimizer_mode, config.eager)
    stay = staying(model, optimizer, leaves, config, moments, several)
    tables = HostTables(device, default_arena())
    take = functools.partial(tables.take, lookup_tables(model, leaves), log)
    profile, plan, on_device = plan_with_tables(
        profile, machine, asked, stay, take, config.check_memory
    )
    if plan.paged:
        machine = with_rates(machine, device, config, log)
    for reason in plan.reasons:
        log(f"plan: {reason}")
    copies = CopyEngine(device, config.max_inflight_bytes)
    session = TrainStreamSession(model, blocks, config, device, copies, plan, log)
    session.tables = tables
    session.quantized = quantized
    session.moments = moments
    session.state_on_device = on_device
    session.trains_pageable = any(leaf.trained for block in leaves for leaf in block)
    try:
        made = assemble(
            session, model, optimizer, leaves, profile, machine, asked, experts, loading
        )
    except BaseException:
        session.close()  # hooks, threads and files go; the weights keep their values
        raise
    return model, made


def _device_for(model: nn.Module, config: WrapOptions) -> Device:
    if config.device is not None:
        return resolve_device(config.device)
    for parameter in model.parameters():
        if parameter.device.type == "cuda":
            return resolve_device(parameter.device)
    return resolve_device(None)


def _take_workspaces(device: Device, log: EventLog) -> None:
    """What torch needs beside any tensor is there before memory is planned."""
    try:
        device.take_workspaces()
    except torch.OutOfMemoryError as error:  # the plan says what is short, if it is
        log(f"device memory: none for torch's own workspaces: {str(error).splitlines()[0]}")
