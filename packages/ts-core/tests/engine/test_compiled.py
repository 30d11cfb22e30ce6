"""torch.compile of a wrapped model, of its blocks, before and after wrapping: never wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ts_core import OffloadAdamW, memory_report, wrap
from ts_core.optim.read_guard import compiled_code_in_use, in_flight
from ts_core.testing import inject_delays, tiny_model

# torch.compile looks at `.grad` of whatever it is given.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

# Every way a block may be treated, each on another block.
MIXED = {"param_offload": True, "recompute": [1], "activation_offload": 0.5, "min_offload_bytes": 1}


@pytest.fixture(autouse=True)
def dynamo_forgets() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def losses(model: nn.Module, optimizer: Any, device: str = "cpu") -> list[float]:
    found = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randint(0, 37, (2, 9), generator=generator).to(device)).float().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


class Counting:
    """A backend that runs what dynamo found, through autograd's own tracing, and counts it."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs += 1
        return aot_eager(graph, inputs)


def compiled(where: str, backend: Any, device: str, **options: Any) -> tuple[nn.Module, Any]:
    model = tiny_model()
    if where == "model before":
        return wrap(torch.compile(model, backend=backend), lr=1e-2, device=device, **options)
    if where == "blocks before":
        for index, block in enumerate(model.layers):
            model.layers[index] = torch.compile(block, backend=backend)
    elif where == "in place before":
        for block in model.layers:
            block.compile(backend=backend)
    model, optimizer = wrap(model, lr=1e-2, device=device, **options)
    if where == "model after":
        model = torch.compile(model, backend=backend)
    elif where == "blocks after":
        for index, block in enumerate(model.layers):
            model.layers[index] = torch.compile(block, backend=backend)
    elif where == "in place after":
        for block in model.layers:
            block.compile(backend=backend)
    return model, optimizer


WAYS = [
    "model before",
    "model after",
    "blocks before",
    "blocks after",
    "in place before",
    "in place after",
]


@pytest.mark.parametrize("where", WAYS)
def test_compiled_equals_eager(where: str) -> None:
    wanted = losses(*wrap(tiny_model(), lr=1e-2, device="host", **MIXED))
    backend = Counting()
    model, optimizer = compiled(where, backend, "host", **MIXED)
    assert losses(model, optimizer) == pytest.approx(wanted, abs=2e-6)
    assert bool(backend.graphs) == (where == "blocks before")  # the others run as they are
    said = any(
        "torch.compile: the blocks run as they are" in e for e in memory_report(model)["events"]
    )
    assert said == (where in ("model before", "in place before"))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # advice
@pytest.mark.parametrize("where", WAYS)
def test_inductor_on_a_gpu(where: str) -> None:
    wanted = losses(*wrap(tiny_model(), lr=1e-2, device="cuda", **MIXED), device="cuda")
    found = losses(*compiled(where, "inductor", "cuda", **MIXED), device="cuda")
    assert found == pytest.approx(wanted, rel=1e-4)


def test_a_function_that_is_only_decorated_changes_nothing() -> None:
    """Libraries decorate functions where they are imported; step() still returns at once."""
    torch.compile(lambda x: x + 1, backend="eager")
    assert not compiled_code_in_use()
    function = torch.compile(lambda x: x + 1, backend="eager")
    function(torch.ones(1))
    assert compiled_code_in_use()


def test_the_first_compilation_may_come_while_updates_are_in_flight() -> None:
    """It meets ordinary parameters, with their new values."""
    results = []
    for late in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 600), nn.Linear(600, 8))
        if not late:
            model.compile(backend="aot_eager")
        optimizer = OffloadAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.1)
        x = torch.ones(2, 8)
        model(x).square().mean().backward()
        with inject_delays(2, max_ms=5.0):
            optimizer.step()
            optimizer.zero_grad()
            if late:
                assert any(in_flight(param) for param in model.parameters())
                model.compile(backend="aot_eager")
                out = model(x)
                assert {type(param) for param in model.parameters()} == {nn.Parameter}
            else:
                out = model(x)
        results.append(out.detach())
    torch.testing.assert_close(*results, rtol=0, atol=0)
