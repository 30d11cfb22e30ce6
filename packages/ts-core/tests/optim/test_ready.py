"""ParamReadyHooks: modules wait for the updates of their own weights, and for nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ts_core import OffloadAdamW, ParamReadyHooks
from ts_core.errors import OptionError, StateError
from ts_core.optim.places import HostPlace


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Updates of OffloadAdamW wait until it is set."""
    event = threading.Event()
    original = HostPlace.update

    def update(self: HostPlace, update: Any, scale: float) -> Any:
        assert event.wait(60)
        return original(self, update, scale)

    monkeypatch.setattr(HostPlace, "update", update)
    yield event
    event.set()


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(600, 600), nn.Tanh(), nn.Linear(600, 600))  # a bucket each


def stepped(model: nn.Sequential, optimizer: Any) -> torch.Tensor:
    x = torch.randn(3, 600, generator=torch.Generator().manual_seed(1))
    model(x).square().mean().backward()
    optimizer.step()
    return x


@pytest.mark.parametrize("guarded", [True, False])
def test_a_forward_waits_and_counts(opened: threading.Event, guarded: bool) -> None:
    plain, model = stack(), stack()
    expected = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    x = stepped(plain, expected)
    optimizer = OffloadAdamW(model.parameters(), lr=1e-2, threads=1)
    optimizer.guard_params = guarded
    hooks = ParamReadyHooks(model, optimizer)
    stepped(model, optimizer)
    assert hooks.pending() == [name for name, _ in model.named_parameters()]
    assert (type(model[0].weight) is nn.Parameter) is not guarded
    threading.Timer(0.1, opened.set).start()
    found = model(x)
    assert (found - plain(x)).abs().max() < 1e-5
    stats = hooks.stats()
    assert "0" in stats and "1" not in stats and stats["0"]["waits"] == 1
    assert stats["0"]["seconds"] > 0
    assert hooks.pending() == []


def test_without_hooks_the_values_are_old_ones(opened: threading.Event) -> None:
    """So that the test above is one of the hooks."""
    model = stack()
    optimizer = OffloadAdamW(model.parameters(), lr=1e-2, threads=1)
    optimizer.guard_params = False
    before = model[0].weight.detach().clone()
    stepped(model, optimizer)
    assert torch.equal(model[0].weight, before)
    opened.set()
    optimizer.synchronize()
    assert not torch.equal(model[0].weight, before)


def test_the_state_dict_waits(opened: threading.Event) -> None:
    model = stack()
    optimizer = OffloadAdamW(model.parameters(), lr=1e-2, threads=1)
    optimizer.guard_params = False
    before = model[2].weight.detach().clone()
    hooks = ParamReadyHooks(model, optimizer)
    stepped(model, optimizer)
    threading.Timer(0.1, opened.set).start()
    assert not torch.equal(model.state_dict()["2.weight"], before)
    hooks.remove()


def test_a_module_waits_for_its_own_weights_only() -> None:
    model, opened = stack(), threading.Event()
    hooks = ParamReadyHooks(model)
    first, last = model[0], model[2]

    def double(value: torch.Tensor) -> None:
        assert opened.wait(60)
        value.mul_(2.0)

    before = last.weight.detach().clone()
    hooks.update([last.weight], double)
    x = torch.randn(3, 600)
    first(x)  # comes back at once
    assert hooks.pending() == ["2.weight"] and hooks.stats() == {}
    threading.Timer(0.1, opened.set).start()
    assert torch.equal(last.weight.detach(), 2 * before)  # any read waits
    hooks.remove()


def test_updates_run_in_order_and_bump_the_version() -> None:
    model = stack()
    hooks = ParamReadyHooks(model)
    weight = model[0].weight
    out = model(torch.randn(3, 600, requires_grad=True)).sum()
    hooks.update([weight], lambda value: value.fill_(1.0))
    hooks.update([weight], lambda value: value.add_(1.0))
    hooks.wait()
    assert torch.equal(weight, torch.full_like(weight, 2.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_what_an_update_raises_is_raised_at_the_read_until_the_next() -> None:
    model = stack()
    hooks = ParamReadyHooks(model)

    def fails(value: torch.Tensor) -> None:
        raise ValueError("no room")

    hooks.update([model[0].bias], fails)
    with pytest.raises(ValueError, match="no room"):
        model(torch.randn(3, 600))
    assert hooks.pending() == ["0.bias"]
    hooks.update([model[0].bias], lambda value: value.zero_())
    model(torch.randn(3, 600))
    assert hooks.pending() == [] and not model[0].bias.any()


def test_one_updater_per_parameter() -> None:
    model = stack()
    optimizer = OffloadAdamW(model.parameters(), threads=1)
    hooks = ParamReadyHooks(model)
    with pytest.raises(StateError, match="OffloadAdamW updates these parameters"):
        hooks.update([model[0].weight], lambda value: value.zero_())
    optimizer.detach()
    hooks.update([model[0].weight], lambda value: value.zero_())
    assert not model[0].weight.any()


def test_removed_hooks_wait_for_nothing(opened: threading.Event) -> None:
    model = stack()
    optimizer = OffloadAdamW(model.parameters(), threads=1)
    optimizer.guard_params = False
    hooks = ParamReadyHooks(model, optimizer)
    hooks.remove()
    x = stepped(model, optimizer)
    model(x)
    assert hooks.stats() == {} and len(hooks.pending()) == 4


def test_only_modules() -> None:
    with pytest.raises(OptionError, match="list"):
        ParamReadyHooks([])  # type: ignore[arg-type]


@pytest.mark.gpu
def test_updates_of_ones_own_on_a_gpu() -> None:
    """An update waits for the kernels that still read the old values, and later ones for it."""
    model = stack().cuda()
    hooks = ParamReadyHooks(model)
    x = torch.randn(3, 600, device="cuda")
    weight = model[0].weight
    for step in range(20):
        before = weight.detach().clone()
        torch.cuda._sleep(2_000_000)
        old = x @ before.t()
        found = x @ weight.detach().t()
        grad_h = torch.full((600, 600), float(step), pin_memory=True)
        hooks.update([weight], lambda v, g=grad_h: v.add_(g.to(v.device, non_blocking=True)))
        assert torch.equal(found, old)
        assert torch.equal(weight, before + step)
    hooks.remove()
