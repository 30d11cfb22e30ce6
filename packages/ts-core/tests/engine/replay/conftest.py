"""Replay on the host: wrapped models that record on a tape, beside the same models without."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from ts_core import memory_report, wrap
from ts_core.engine.replay import setup
from ts_core.engine.replay.host_recorder import HostRecorder


class Stack(nn.Module):
    """Blocks in a row; arguments beside the first go to every block."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for layer in self.layers:
            x = layer(x, *args, **kwargs)
            if isinstance(x, tuple):
                x = x[0]
        return x


class Pair:
    """What `both` gives back: results of the replayed run, and what its session says."""

    def __init__(self, model: nn.Module, recorder: HostRecorder, results: list[Any]) -> None:
        self.model = model
        self.recorder = recorder
        self.results = results
        self.report = memory_report(model)["replay"]
        self.events = memory_report(model)["events"]


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[HostRecorder]:
    """Sessions record on the host from here on; the recorders they use are appended."""
    found: list[HostRecorder] = []

    def recorder_for(device: Any) -> HostRecorder:
        found.append(HostRecorder())
        return found[-1]

    monkeypatch.setattr(setup, "recorder_for", recorder_for)
    return found


@pytest.fixture
def both(recorders: list[HostRecorder]) -> Callable[..., Pair]:
    """`both(blocks, drive, **options)`: drive a wrapped Stack with and without replay.

    `drive(model, optimizer)` returns tensors that must be the same bit for bit, and so
    must the trained values afterwards (`close`: within rounding).
    """

    def run(
        blocks: Sequence[nn.Module],
        drive: Callable[[nn.Module, Any], Sequence[torch.Tensor]],
        close: bool = False,
        **options: Any,
    ) -> Pair:
        found: list[tuple[nn.Module, list[Any]]] = []
        for graphs in (False, True):
            torch.manual_seed(11)
            model = Stack(copy.deepcopy(list(blocks)))
            trained = [p for p in model.parameters() if p.requires_grad]
            model, optimizer = wrap(
                model,
                torch.optim.AdamW(trained, lr=1e-2),
                **{
                    "device": "host",
                    "quantize": "none",
                    "offload": True,
                    "cuda_graphs": graphs,
                    "blocks": list(model.layers),
                    **options,
                },
            )
            results = list(drive(model, optimizer))
            optimizer.synchronize()
            results += [torch.get_rng_state(), *[p.detach().clone() for p in trained]]
            found.append((model, results))
        (_, plain), (model, replayed) = found
        assert len(plain) == len(replayed)
        for k, (a, b) in enumerate(zip(plain, replayed, strict=True)):
            same = torch.allclose(a, b, 1e-4, 1e-4) if close else torch.equal(a, b)
            assert same, f"result {k} of {len(plain)}"
        return Pair(model, recorders[-1], replayed)

    return run
