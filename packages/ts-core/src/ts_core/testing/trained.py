"""A stack whose streamed blocks are trained, beside the same one in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ts_core.engine import wrap
from ts_core.optim import OffloadAdamW
from ts_core.testing import inject_delays

WIDTH = 16


class Block(nn.Module):
    """Two matrices with biases, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The next hidden state."""
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x))) * self.scale
        return out


class Stack(nn.Module):
    """Blocks and a head, all trained."""

    def __init__(self, kind: Callable[[], nn.Module] = Block, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One value a row."""
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


Body = Callable[[Any, Any], Any]
CLIP: dict[str, Any] = {"max_grad_norm": 1e9}  # the norm is needed, so updates start in step()
# Where models are: for wrap(), and for torch.
WHERE = {"device": "host", "torch": "cpu"}


def batch(rows: int = 4) -> torch.Tensor:
    """Random input."""
    return torch.randn(rows, WIDTH).to(WHERE["torch"])


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> None:
    """Train."""
    for _ in range(count):
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def streamed(make: Callable[[], nn.Module] = Stack, **options: Any) -> tuple[Any, OffloadAdamW]:
    """A model whose trained blocks stream, and its optimizer."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    given = {"param_offload": True, "quantize": "none", "device": WHERE["device"], **options}
    model, wrapped = wrap(model, optimizer, **given)
    session: Any = model._trainstream_session
    assert session.homes
    return model, wrapped


def compare(body: Body, make: Callable[[], nn.Module] = Stack, **options: Any) -> None:
    """Run `body` on a streamed model and on plain torch; trained values agree."""
    results = []
    for paged in (True, False):
        torch.manual_seed(0)
        if paged:
            model, optimizer = streamed(make, **options)
        else:
            model = make().to(WHERE["torch"])
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # type: ignore[assignment]
        with inject_delays(3, max_ms=1.0):
            result = body(model, optimizer)
        results.append((model.state_dict(), result))
    for name, value in results[0][0].items():
        assert (value.cpu() - results[1][0][name].cpu()).abs().max() <= 2e-6, name
    if results[0][1] is not None:
        assert torch.allclose(results[0][1], results[1][1], rtol=1e-5, atol=1e-5)


def looped(model: Any) -> torch.Tensor:
    """Blocks called several times, and not in the order of the stack."""
    x = batch()
    for index in (0, 2, 1, 3, 0, 0):
        x = model.layers[index](x)
    out: torch.Tensor = model.head(x).square().mean()
    return out


def looped_body(model: Any, optimizer: Any) -> None:
    """Trains over `looped`."""
    for _ in range(4):
        looped(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def steps_body(model: Any, optimizer: Any) -> None:
    """Trains, no more."""
    steps(model, optimizer, 4)
