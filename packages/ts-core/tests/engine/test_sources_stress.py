"""Random use of a model whose weights lie in memory, behind the ring and in files, all at once."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ts_core import memory_report, unwrap, wrap
from ts_core.engine import hosting
from ts_core.errors import DataError
from ts_core.memory.budget import PageLockBudget
from ts_core.store import disk, placing
from ts_core.store.placing import ImageStore
from ts_core.testing import TinyModel, inject_delays, tiny_model

DEPTH, WIDTH, ACTIONS = 6, 32, 24
IMAGE = 20_736  # bytes of a block


class User:
    """Does the same random things to a model, streamed or not, and notes what comes out."""

    def __init__(self, seed: int, options: dict[str, Any]) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.options = {
            "lr": 1e-2,
            "device": "host",
            "quantize": "none",
            "offload": True,
            **options,
        }
        self.streams = bool(options.get("param_offload"))
        self.seen: list[torch.Tensor] = []
        self.model: TinyModel = tiny_model(DEPTH, WIDTH, dropout=0.1)
        self.wrap()

    def wrap(self) -> None:
        self.model, self.optimizer = wrap(self.model, **self.options)

    def tokens(self) -> torch.Tensor:
        return torch.randint(0, 37, (2, 7), generator=self.generator)

    def act(self) -> None:
        kind = self.random.choice(
            [
                "step",
                "step",
                "step",
                "evaluate",
                "write",
                "replace",
                "hide",
                "load",
                "break",
                "wrap",
            ]
        )
        torch.manual_seed(self.random.randrange(1000))
        weight = self.random.choice(list(self.model.layers)).up.weight
        factor = self.random.choice([0.5, 2.0])
        if kind == "step":
            loss = self.model(self.tokens())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.seen.append(loss.detach())
        elif kind == "evaluate":
            self.model.eval()
            with torch.no_grad():
                self.seen.append(self.model(self.tokens()))
            self.model.train()
        elif kind == "write":
            with torch.no_grad():
                weight.mul_(factor)
        elif kind == "replace":
            weight.data = weight.data * factor
        elif kind == "hide":
            weight.data.mul_(factor)
        elif kind == "load":
            state = {name: value.clone() for name, value in self.model.state_dict().items()}
            state["layers.2.down.weight"] *= factor
            self.model.load_state_dict(state)
        elif kind == "break":
            self.break_off()
        else:
            unwrap(self.model)
            self.seen.append(weight.detach().clone())
            self.wrap()

    def break_off(self) -> None:
        """An error in the middle of a forward or of a backward, or no backward at all."""
        layer = self.model.layers[self.random.randrange(DEPTH)]
        place = self.random.choice(["forward", "backward", "nowhere"])

        def explode(*_: Any) -> None:
            raise ZeroDivisionError

        def explode_later(module: Any, arguments: Any, output: torch.Tensor) -> None:
            output.register_hook(explode)

        if place == "nowhere":
            self.model(self.tokens())
        else:
            handle = layer.register_forward_hook(explode if place == "forward" else explode_later)
            with pytest.raises(ZeroDivisionError):
                self.model(self.tokens()).backward()
            handle.remove()
        self.optimizer.zero_grad()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks in memory; parts and reads so small that a block takes many."""
    budget = PageLockBudget(2 * IMAGE, "a test's")
    monkeypatch.setattr(hosting, "page_lock_budget", lambda: budget)
    monkeypatch.setattr(placing, "_LEAST_PART_BYTES", 3000)
    monkeypatch.setattr(disk, "READ_BYTES", 1100)


@pytest.mark.parametrize("source", ["ring", "disk", "disk through ring"])
@pytest.mark.parametrize("seed", [1, 2])
def test_random_use(
    small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, seed: int
) -> None:
    store = functools.partial(ImageStore, through_ring="ring" in source)
    monkeypatch.setattr(hosting, "ImageStore", store)
    directory = tmp_path if "disk" in source else None
    resident = User(seed, {"param_offload": False, "eager": False})
    streamed = User(seed, {"param_offload": True, "eager": False, "disk_offload": directory})
    params = memory_report(streamed.model)["params"]
    assert len(params["staged_blocks"]) + len(params["disk_blocks"]) == DEPTH - 2
    with inject_delays(seed, max_ms=2, share=0.3):
        for number in range(ACTIONS):
            resident.act()
            streamed.act()
            assert len(resident.seen) == len(streamed.seen)
            pairs = zip(resident.seen, streamed.seen, strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), f"action {number}"
    last = [user.model.state_dict() for user in (resident, streamed)]
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])


@pytest.mark.parametrize("ring", [False, True])
def test_errors_of_the_disk_at_random_places(
    small: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ring: bool
) -> None:
    """Each reaches the caller as a DataError, and steps that were not hit are exact."""
    store = functools.partial(ImageStore, through_ring=ring)
    monkeypatch.setattr(hosting, "ImageStore", store)
    resident = User(3, {"param_offload": False, "eager": False})
    streamed = User(3, {"param_offload": True, "eager": False, "disk_offload": tmp_path})
    dice = random.Random(5)
    whole = disk._read_exactly
    broken = False

    def unreliable(descriptor: int, target_h: torch.Tensor, offset: int) -> None:
        if broken and dice.random() < 0.05:
            raise OSError(5, "Input/output error")
        whole(descriptor, target_h, offset)

    monkeypatch.setattr(disk, "_read_exactly", unreliable)
    failures = 0
    for step in range(12):
        broken = step % 2 == 1
        tokens = torch.randint(0, 37, (2, 7), generator=torch.Generator().manual_seed(step))
        try:
            torch.manual_seed(step)
            loss = streamed.model(tokens)
            loss.backward()
        except DataError as error:
            assert "Input/output error" in str(error)
            failures += 1
            streamed.optimizer.zero_grad()
            continue
        streamed.optimizer.step()
        torch.manual_seed(step)
        expected = resident.model(tokens)
        expected.backward()
        resident.optimizer.step()
        assert torch.equal(loss, expected)
        for user in (resident, streamed):
            user.optimizer.zero_grad()
    assert failures > 0
    last = [user.model.state_dict() for user in (resident, streamed)]
    assert all(torch.equal(last[0][name], last[1][name]) for name in last[0])
