"""The optimizer of a session: made, converted from torch's, or one of ours that joins."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ts_core.engine.session import TrainStreamSession
from ts_core.optim import OffloadAdamW, convert_optimizer


def session_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, session: TrainStreamSession
) -> OffloadAdamW:
    """The optimizer that a session's model trains with, under the session's options.

    Args:
        model: for an optimizer of all that it trains, where none is given.
        optimizer: the user's, if any.
        session: has its device, link, events and images.

    Raises:
        OptionError: an optimizer that cannot be converted.
        StateError: one of ours that has trained on another device, or in another mode.
    """
    config = session.config
    moments = session.moments
    shared: dict[str, Any] = {
        "mode": config.optimizer_mode,
        "moment_dtype": moments,
        "max_grad_norm": config.max_grad_norm,
        "threads": config.threads,
        "accumulation_steps": config.accumulation_steps,
        "eager": config.eager,
        "device": session.device,
        "copies": session.copies,
        "on_event": session.log,
        "homes": {home.param: home for home in session.homes},
        "distributed": config.distributed,
    }
    made = _made(model, optimizer, session, shared)
    if made.mode != "cpu" and not session.device.separate_memory:
        session.log(
            f"optimizer_mode={made.mode!r}: there is no GPU, so host threads compute the same "
            f"updates; nothing is faster by it"
        )
    made.guard_params = config.guard_params
    made.headroom = config.vram_headroom
    return made


def _made(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    session: TrainStreamSession,
    shared: dict[str, Any],
) -> OffloadAdamW:
    config = session.config
    if optimizer is None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return OffloadAdamW(trained, lr=config.lr, **shared)
    if isinstance(optimizer, OffloadAdamW):
        optimizer.adopt(
            session.device,
            session.copies,
            session.log,
            mode=config.optimizer_mode,
            moment_dtype="auto" if config.moment_dtype == "auto" else session.moments,
            max_grad_norm=config.max_grad_norm,
            accumulation_steps=config.accumulation_steps,
            eager=config.eager,
            threads=config.threads,
            homes=shared["homes"],
        )
        return optimizer
    return convert_optimizer(optimizer, **shared)
