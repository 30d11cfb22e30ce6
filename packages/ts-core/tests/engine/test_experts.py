"""Paging of stacked experts with a plug-in and layers of this test's own: no model library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ts_core import memory_report, unwrap, wrap
from ts_core.engine import experts as engine
from ts_core.engine.experts_layer import StackedExperts, picked_table, runs
from ts_core.errors import DataError, OptionError
from ts_core.testing import inject_delays

WIDTH = 8


class Experts(nn.Module):
    """y = sum over a token's picks of weight * (x W[pick] + b[pick])."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_experts = count
        self.weight = nn.Parameter(torch.randn(count, WIDTH, WIDTH) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.randn(count, WIDTH))

    def forward(self, x: torch.Tensor, picks: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, place = torch.where(picks == expert)
            if token.numel():
                y = x[token] @ self.weight[expert] + self.bias[expert]
                out = out.index_add(0, token, y * gates[token, place, None])
        return out


class Block(nn.Module):
    def __init__(self, count: int, top: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count)
        self.experts = Experts(count)
        self.top = min(top, count)
        self.by_name = False
        self.drop: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gates, picks = self.router(x).softmax(-1).topk(self.top, dim=-1)
        if self.drop is not None:  # tokens that no expert takes
            picks = picks.masked_fill(picks == self.drop, self.experts.num_experts)
        if self.by_name:
            return x + self.experts(x, gates=gates, picks=picks)
        return x + self.experts(x, picks, gates)


class Model(nn.Module):
    def __init__(self, count: int = 5, top: int = 2, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(count, top) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Plugin:
    @staticmethod
    def find_experts(model: nn.Module) -> list[StackedExperts]:
        return [
            StackedExperts(name, module, ("weight", "bias"), index_name="picks")
            for name, module in model.named_modules()
            if isinstance(module, Experts)
        ]


@pytest.fixture(autouse=True)
def _plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    class Models:
        @staticmethod
        def names() -> list[str]:
            return ["no-experts", "mine"]

        @staticmethod
        def get(name: str) -> Any:
            return Plugin if name == "mine" else object()

    monkeypatch.setattr(engine, "models", Models)


def model(**changes: Any) -> Model:
    torch.manual_seed(0)
    made = Model(**changes)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_("router" in name or "bias" in name)
    return made


def trained(made: Model, paging: bool, tokens: int = 6) -> list[torch.Tensor]:
    made, optimizer = wrap(made, device="cpu", quantize="none", moe_paging=paging, lr=1e-2)
    found = []
    with inject_delays(1, max_ms=0.5):
        for step in range(4):
            x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(step))
            loss = made(x).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach().clone())
    found += [parameter.detach().clone() for parameter in made.parameters()]
    return found


def set_up(made: Model, change: str) -> Model:
    for layer in made.layers:
        if change == "by name":
            layer.by_name = True
        if change == "no expert":
            layer.drop = 1
    return made


@pytest.mark.parametrize("change", ["plain", "by name", "no expert"])
@pytest.mark.parametrize(
    "sizes", [{}, {"count": 1}, {"count": 2, "top": 1}, {"count": 64, "top": 3, "depth": 2}]
)
def test_equal_to_resident(change: str, sizes: dict[str, int]) -> None:
    runs_ = [trained(set_up(model(**sizes), change), paging) for paging in (False, True)]
    assert all(torch.equal(a, b) for a, b in zip(*runs_, strict=True))


def test_no_tokens_pick_no_experts() -> None:
    made, _ = wrap(model(), device="cpu", quantize="none", moe_paging=True)
    x = torch.zeros(0, WIDTH, requires_grad=True)
    made(x).sum().backward()
    assert x.grad is not None and x.grad.shape == (0, WIDTH)
    report = memory_report(made)["experts"]
    assert (report["picked"], report["load_bytes"]) == (0, 0)


def test_the_same_layer_twice_in_one_forward() -> None:
    class Twice(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(super().forward(x).flip(0))

    found = []
    for paging in (False, True):
        torch.manual_seed(0)
        made: Model = Twice()
        for name, parameter in made.named_parameters():
            parameter.requires_grad_("router" in name)
        found.append(trained(made, paging))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_second_derivatives_and_retained_graphs() -> None:
    found = []
    for paging in (False, True):
        made, _ = wrap(model(), device="cpu", quantize="none", moe_paging=paging)
        x = torch.ones(4, WIDTH).cumsum(0).div(9).requires_grad_()
        (grad,) = torch.autograd.grad(made(x).pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), x, retain_graph=True)
        (again,) = torch.autograd.grad(grad.square().sum(), x)
        found.append([grad.detach(), second, again])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_calls_that_are_refused() -> None:
    made, _ = wrap(model(), device="cpu", quantize="none", moe_paging=True)
    experts = made.layers[0].experts
    x, gates = torch.randn(2, WIDTH), torch.ones(2, 1)
    with pytest.raises(DataError, match=r"layers.0.experts was called without the integer"):
        experts(x, gates, gates)
    with pytest.raises((IndexError, RuntimeError)):
        experts(x, torch.tensor([[7], [0]]), gates)
    out = experts(x, torch.tensor([[4], [0]]), gates)
    unwrap(made)
    assert torch.equal(out, experts(x, torch.tensor([[4], [0]]), gates))
    dense = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with pytest.raises(OptionError, match="no stacked experts were found"):
        wrap(dense, device="cpu", moe_paging=True)


@pytest.mark.parametrize(
    ("picks", "expected"),
    [
        ((), []),
        ((3,), [(0, 3, 1)]),
        ((0, 1, 2), [(0, 0, 3)]),
        ((0, 2, 3, 7), [(0, 0, 1), (1, 2, 2), (3, 7, 1)]),
    ],
)
def test_runs(picks: tuple[int, ...], expected: list[tuple[int, int, int]]) -> None:
    assert runs(picks) == expected


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_picked_table(dtype: torch.dtype) -> None:
    hit, place = picked_table(torch.tensor([[4, 1], [1, 5]], dtype=dtype), 5)
    assert hit.tolist() == [0, 1, 0, 0, 1, 1]
    assert (place[1], place[4]) == (0, 1)


def test_forwards_of_others_are_put_back() -> None:
    made = model()
    experts = made.layers[0].experts
    calls: list[int] = []
    own: Callable[..., Any] = experts.forward

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    experts.forward = counted  # type: ignore[method-assign]
    made, _ = wrap(made, device="cpu", quantize="none", moe_paging=True)
    made(torch.randn(3, WIDTH))
    unwrap(made)
    assert experts.__dict__["forward"] is counted and "forward" not in made.layers[1].__dict__
    made(torch.randn(3, WIDTH))
    assert len(calls) == 2


def test_picks_come_to_the_host_behind_their_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the picks are read from a page-locked copy."""
    made, _ = wrap(model(), device="cpu", quantize="none", moe_paging=True)
    x = torch.randn(6, WIDTH)
    with torch.no_grad():
        expected = made(x)
        session: Any = made._trainstream_session  # type: ignore[attr-defined]
        monkeypatch.setattr(session.device, "separate_memory", True)
        with inject_delays(4, max_ms=3.0, share=1.0):
            assert torch.equal(made(x), expected)
            assert memory_report(made)["transfers"]["d2h"]["copies"] == 3
            monkeypatch.setattr(session.device, "host_wait", lambda event: None)
            session.experts.calls._hit_h.zero_()
            assert not torch.equal(made(x), expected)  # the delays are felt
