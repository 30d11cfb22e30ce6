"""Forwards in inference mode and under torch.func; blocks that write buffers; copies of blocks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ts_core import unwrap, wrap
from ts_core.engine import own_buffers
from ts_core.errors import StateError
from ts_core.testing import inject_delays

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Normed(Block):
    """Batch statistics are written, and the result does not depend on them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(super().forward(x))
        return out


class Counting(Block):
    """The result depends on a buffer that each forward writes, in place or by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen = self.seen + x.detach().mean()
        return super().forward(x) * (1 + self.calls / 10) + self.seen


class Spectral(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.utils.parametrizations.spectral_norm(self.up)


class Stack(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module], full: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(4))
        for parameter in self.layers.parameters():
            parameter.requires_grad_(full)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()  # type: ignore[no-any-return]


def wrapped(kind: Callable[[], nn.Module], device: str, full: bool = True, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Stack(kind, full)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    given = {"quantize": "none", "threads": 1, "min_offload_bytes": 0, "max_inflight_bytes": 1}
    return wrap(model, optimizer, offload=True, device=device, **{**given, **options})


RESIDENT = {"param_offload": False, "activation_offload": False, "recompute": False}
DEVICES = ["host", pytest.param("cuda", marks=pytest.mark.gpu)]


def results(
    model: Any, optimizer: Any, device: str, evaluate: Callable[[Any, Any], Any] | None = None
) -> list[torch.Tensor]:
    """Losses of a few steps, what `evaluate` gave around them, and the whole state at the end."""
    out = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        x = torch.randn(5, WIDTH, generator=generator).to("cpu" if device == "host" else device)
        if evaluate is not None:
            out.append(evaluate(model, x))
        loss = model(x)
        if evaluate is not None:
            out.append(evaluate(model, x))
        loss.backward()
        if evaluate is not None:
            out.append(evaluate(model, x))
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.detach())
    state = model.state_dict()
    return [value.cpu().clone() for value in (*out, *state.values())]


def equal(kind: Any, device: str, evaluate: Any = None, full: bool = True, **options: Any) -> None:
    expected = results(*wrapped(kind, device, full, **RESIDENT), device, evaluate)
    with inject_delays(3, max_ms=0.5):
        found = results(*wrapped(kind, device, full, **options), device, evaluate)
    for number, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert torch.equal(a, b), number


def inferred(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return model(x)  # type: ignore[no-any-return]


def mapped(model: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.func.vmap(model)(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("full", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("evaluate", [inferred, mapped])
def test_inference_mode_and_vmap_beside_training(device: str, full: bool, evaluate: Any) -> None:
    equal(Block, device, evaluate, full, param_offload=True, activation_offload=True)


@pytest.mark.parametrize("full", [True, False], ids=["trained", "frozen"])
def test_a_transform_that_cannot_be_leaves_the_model_as_it_was(full: bool) -> None:
    def tried(model: Any, x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(RuntimeError, match=r"saved tensor hooks|TensorWrapper"):
            torch.func.grad(model)(x)
        return torch.zeros(())

    model, optimizer = wrapped(Block, "host", full, param_offload=True)
    expected = results(*wrapped(Block, "host", full, **RESIDENT), "host")
    found = results(model, optimizer, "host", tried)
    losses, state = found[3:12:4], found[12:]
    assert all(torch.equal(a, b) for a, b in zip(expected, [*losses, *state], strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [Normed, Counting, Spectral])
def test_buffers_written_in_forward_are_written_once(device: str, kind: Any) -> None:
    equal(kind, device, param_offload=True, recompute=True)


def test_a_graph_gone_through_twice_starts_from_the_same_buffers() -> None:
    gradients = []
    for options in (RESIDENT, {"param_offload": True, "recompute": True}):
        model, _ = wrapped(Counting, "host", **options)
        loss = model(torch.ones(2, WIDTH))
        for _ in range(2):
            gradients.append(torch.autograd.grad(loss, model.head.weight, retain_graph=True)[0])
            loss_of_input = torch.autograd.grad(loss, model.layers[0].up.bias, retain_graph=True)
            gradients.append(loss_of_input[0])
    assert all(torch.equal(a, b) for a, b in zip(gradients[:4], gradients[4:], strict=True))


def test_a_written_buffer_too_large_to_copy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_buffers, "LARGEST_COPY_BYTES", 0)
    model, _ = wrapped(Counting, "host", recompute=True)
    with pytest.raises(StateError, match=r"writes its buffer 'calls'.*recompute=False"):
        model(torch.ones(2, WIDTH))
    model, optimizer = wrapped(Counting, "host", recompute=False)
    assert len(results(model, optimizer, "host")) > 0


@pytest.mark.parametrize("how", [copy.deepcopy, pickle.dumps])
def test_a_wrapped_model_and_its_blocks_refuse_copies(how: Callable[[Any], Any]) -> None:
    model, _ = wrapped(Block, "host", param_offload=True)
    for part in (model, model.layers, model.layers[1], nn.Sequential(model)):
        with pytest.raises(StateError, match="cannot be copied or pickled"):
            how(part)
    how(model.head)
    unwrap(model)
    how(model)


def test_a_part_of_a_wrapped_model_cannot_be_wrapped() -> None:
    model, _ = wrapped(Block, "host", param_offload=True)
    for part in (model.layers, model.layers[0]):
        with pytest.raises(StateError, match="already wrapped"):
            wrap(part, device="host")
