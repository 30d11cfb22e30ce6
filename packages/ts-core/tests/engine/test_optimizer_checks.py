"""wrap() and an optimizer that it is given: schedulers of it, and what it leaves out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from ts_core import OffloadAdamW, wrap
from ts_core.errors import OptionError
from ts_core.testing import tiny_model

HOST: dict[str, Any] = {"device": "host", "quantize": "none"}


def trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


# -- schedulers -----------------------------------------------------------------------------------


def test_a_scheduler_of_an_optimizer_that_is_replaced_is_refused() -> None:
    makers: list[Any] = [
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
        lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer),  # leaves no mark on step()
        lambda optimizer: lr_scheduler.ChainedScheduler([lr_scheduler.StepLR(optimizer, 1)]),
    ]
    for make in makers:
        model = tiny_model()
        optimizer = torch.optim.AdamW(trained(model))
        scheduler = make(optimizer)
        with pytest.raises(OptionError, match="after wrap"):
            wrap(model, optimizer, **HOST)
        del scheduler
        model, streaming = wrap(model, optimizer, **HOST)  # nothing had been changed
        after = make(streaming)
        assert after.optimizer is streaming


def test_the_learning_rate_before_a_dropped_scheduler_is_the_next_ones_base() -> None:
    model = tiny_model()
    optimizer = torch.optim.AdamW(trained(model), lr=0.5)
    lr_scheduler.LambdaLR(optimizer, lambda step: 0.1 * step)
    _, streaming = wrap(model, optimizer, **HOST)
    assert lr_scheduler.LambdaLR(streaming, lambda step: 0.5).get_last_lr() == [0.25]


def test_a_loaded_initial_lr_is_no_scheduler() -> None:
    saved = torch.optim.AdamW(trained(tiny_model()), lr=0.5)
    lr_scheduler.LambdaLR(saved, lambda step: 0.5**step)
    model = tiny_model()
    optimizer = torch.optim.AdamW(trained(model))
    optimizer.load_state_dict(saved.state_dict())
    _, streaming = wrap(model, optimizer, **HOST)
    scheduler = lr_scheduler.LambdaLR(streaming, lambda step: 0.5**step, last_epoch=0)
    assert scheduler.get_last_lr() == [0.25]


def test_a_scheduler_of_an_optimizer_that_is_kept_goes_on() -> None:
    model = tiny_model()
    optimizer = OffloadAdamW(trained(model), lr=0.5)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    _, streaming = wrap(model, optimizer, **HOST)
    streaming.step()
    scheduler.step()
    assert streaming.param_groups[0]["lr"] == 0.25
