"""wrap() and an optimizer that it is given: schedulers of it, and what it leaves out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from ts_core import OffloadAdamW, memory_report, wrap
from ts_core.errors import OptionError, StateError
from ts_core.testing import tiny_model, train

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
        with pytest.raises(OptionError, match=rf"\({type(scheduler).__name__}.*after wrap"):
            wrap(model, optimizer, **HOST)
        vars(scheduler)  # how attributes are held may change by this
        with pytest.raises(OptionError, match=rf"{type(scheduler).__name__}.*after wrap"):
            wrap(model, optimizer, **HOST)
        del scheduler
        model, streaming = wrap(model, optimizer, **HOST)  # nothing had been changed
        after = make(streaming)
        assert after.optimizer is streaming


def test_what_only_resembles_a_scheduler_is_none() -> None:
    model = tiny_model()
    optimizer = torch.optim.AdamW(trained(model))
    mine = {"optimizer": optimizer, "last_epoch": 0, "base_lrs": [1e-3]}
    _, streaming = wrap(model, optimizer, **HOST)
    assert mine["optimizer"] is not streaming


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


# -- parameters that the optimizer lacks ----------------------------------------------------------


def left_out_events(model: torch.nn.Module) -> list[str]:
    events: list[str] = memory_report(model)["events"]
    return [line for line in events if "not in the optimizer" in line]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, OffloadAdamW])
def test_an_optimizer_of_other_parameters_is_refused(kind: Any) -> None:
    model = tiny_model()
    optimizer = kind(trained(model))
    with pytest.raises(OptionError, match=r"none of the 10 parameters .* as they are now"):
        wrap(copy.deepcopy(model), optimizer, **HOST)
    frozen = [param for param in model.parameters() if not param.requires_grad]
    with pytest.raises(OptionError, match="none of the 10 parameters"):
        wrap(model, torch.optim.AdamW(frozen), **HOST)


def test_parameters_that_the_optimizer_lacks_are_named() -> None:
    model = tiny_model()
    model.layers[1].mix.requires_grad_(True)
    optimizer = torch.optim.AdamW([p for p in trained(model) if p is not model.layers[1].mix])
    before = model.layers[1].mix.detach().clone()
    model, streaming = wrap(model, optimizer, param_offload=[0], **HOST)
    [event] = left_out_events(model)
    assert "1 parameters of 1.00 KiB" in event and "layers.1.mix (16, 16)" in event
    train(model, streaming, 2)
    assert torch.equal(model.layers[1].mix, before)


@pytest.mark.parametrize("full", [True, False])
def test_a_complete_optimizer_is_not_remarked_on(full: bool) -> None:
    for frozen_too in (True, False):
        model = tiny_model(full=full)  # with a tied head
        params = list(model.parameters()) if frozen_too else trained(model)
        model, _ = wrap(model, torch.optim.AdamW(params), **HOST)
        assert left_out_events(model) == []
    model, _ = wrap(tiny_model(full=full), **HOST)
    assert left_out_events(model) == []


def test_paging_weights_that_the_optimizer_lacks_is_refused_for_that_reason() -> None:
    model = torch.nn.Sequential(
        torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3))), torch.nn.Linear(4, 4)
    )
    optimizer = torch.optim.AdamW(model[1].parameters())
    for asked in (True, [0, 2]):
        with pytest.raises(OptionError, match="not in the optimizer"):
            wrap(model, optimizer, param_offload=asked, **HOST)
    model[0].requires_grad_(False)
    model, _ = wrap(model, optimizer, param_offload=True, **HOST)
    assert left_out_events(model) == []


# -- its learning rate ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.optim.AdamW, OffloadAdamW])
def test_a_learning_rate_beside_an_optimizer_with_another_is_refused(kind: Any) -> None:
    for lr in (5.0, 1e-3):  # the latter is the default of the option
        model = tiny_model()
        first, *rest = trained(model)
        groups: list[dict[str, Any]] = [{"params": [first]}, {"params": rest, "lr": 0.25}]
        optimizer = kind(groups, lr=0.5)
        with pytest.raises(OptionError, match=r"lr=0\.5, 0\.25\. Set it there"):
            wrap(model, optimizer, lr=lr, **HOST)
        _, streaming = wrap(model, optimizer, **HOST)
        assert [group["lr"] for group in streaming.param_groups] == [0.5, 0.25]
    model = tiny_model()
    wrap(model, kind(trained(model), lr=0.5), lr=0.5, **HOST)


# -- options of wrap() that it has, too ------------------------------------------------------------


def test_options_that_a_given_optimizer_keeps_as_they_were_are_named() -> None:
    def events(**options: Any) -> list[str]:
        model = tiny_model()
        optimizer = OffloadAdamW(trained(model), mode="gpu", accumulation_steps=4)
        model, _ = wrap(model, optimizer, **options, **HOST)
        return [line for line in memory_report(model)["events"] if "keeps its own" in line]

    mode, passes = events(optimizer_mode="cpu", accumulation_steps=1, max_grad_norm=None)
    assert mode.startswith("optimizer_mode='cpu'") and "mode='gpu'" in mode
    assert passes.startswith("accumulation_steps=1") and "accumulation_steps=4" in passes
    assert events() == events(accumulation_steps=2, max_grad_norm=0.5) == []


# -- the optimizer that is stepped ----------------------------------------------------------------


@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_that_no_step_took_say_which_step_was_missed(passes: int) -> None:
    model = tiny_model()
    given = torch.optim.AdamW(trained(model))
    model, _ = wrap(model, given, accumulation_steps=passes, **HOST)
    tokens = torch.randint(0, 37, (2, 7))
    for _ in range(passes):
        model(tokens).backward()
        given.step()  # does nothing: its parameters have no gradients
    with pytest.raises(StateError) as caught:
        model(tokens).backward()
    for words in ("accumulation_steps", "to wrap()", "that wrap() returned", "TrainStreamTrainer"):
        assert words in str(caught.value)
