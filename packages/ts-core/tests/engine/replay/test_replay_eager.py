"""Blocks that are left alone, and why: what no recording could repeat, no room, no recorder."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ts_core import unwrap, wrap
from ts_core.engine.activation_memory import ActivationMemory
from ts_core.testing import tiny_model
from ts_core.testing.replay import WIDTH, Block, batches, plain_steps, warm


def test_nothing_is_recorded_where_it_was_given_up(
    both: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def give_up(memory: ActivationMemory) -> str:
        asked.append(1)
        return "recordings would take 2 GiB"

    monkeypatch.setattr(ActivationMemory, "no_room_for_recordings", give_up)
    pair = both([Block(), Block()], plain_steps)
    assert asked == [1]
    assert not pair.report["on"] and pair.report["recorded"] == 0
    assert "cuda_graphs: off, since recordings would take 2 GiB" in pair.events


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return x + self.mixed(x) * self.calls


class Normed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, affine=False)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.mixed(self.norm(x))


class Reading(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return x + self.mixed(x) * (2.0 if x.sum().item() > 0 else 1.0)


class Remembering(Block):
    last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> Any:
        before = 0.0 if self.last is None else self.last
        self.last = x.detach().mean()
        return x + self.mixed(x) + before


class Writing(Block):
    def forward(self, x: torch.Tensor) -> Any:
        y = self.mixed(x.clone())
        with torch.no_grad():
            x.mul_(0.5)
        return y


class Aside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.double = 2 * x
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.double


class Stashing(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return x + Aside.apply(self.mixed(x))


class Viewing(Block):
    def forward(self, x: torch.Tensor) -> Any:
        y = x + self.mixed(x)
        return y, y[0]


OUTSIDE: list[torch.Tensor] = []


class Reaching(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return x + self.mixed(x) + OUTSIDE[0]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Counting, "writes into a buffer or parameter"),
        (Normed, "writes"),
        (Reading, "reads a value of the device on the host"),
        (Remembering, "changes modules or their attributes"),
        (Writing, "writes into an argument"),
        (Stashing, "keeps a tensor aside"),
        (Viewing, "results share memory"),
    ],
)
def test_what_cannot_be_captured_stays_eager(
    both: Callable[..., Any], kind: type[Block], why: str
) -> None:
    def drive(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for x in batches(5):
            y = model(x)
            y.square().sum().backward()
            optimizer.step()
            found.append(y.detach())
        return found + [b.clone() for b in model.buffers()]

    pair = both([kind(), kind()], drive, eager=False)
    assert pair.report["replayed_forwards"] == 0
    said = [line for line in pair.events if line.startswith("cuda_graphs: blocks run eagerly")]
    assert len(said) == 1 and why in said[0]


def test_a_tensor_from_outside(both: Callable[..., Any]) -> None:
    """A constant is read where it is; one that is another in each call keeps the block eager."""

    def drive(model: nn.Module, optimizer: Any, changing: bool = False) -> list[torch.Tensor]:
        OUTSIDE[:] = [torch.ones(WIDTH)]
        found = []
        for x in batches(5):
            if changing:
                OUTSIDE[:] = [torch.full((WIDTH,), x.sum().item())]
            found += [model(x)]
        return found

    pair = both([Reaching(), Reaching()], drive)
    assert pair.report["replayed_forwards"] > 0
    pair = both([Reaching(), Reaching()], lambda m, o: drive(m, o, changing=True))
    assert pair.report["replayed_forwards"] == 0


def test_gradients_to_something_outside_stay_eager(both: Callable[..., Any]) -> None:
    def drive(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        leaf = torch.ones(WIDTH, requires_grad=True)
        found = []
        for x in batches(4):
            OUTSIDE[:] = [leaf * 2]
            model(x).square().sum().backward()
            found.append(leaf.grad.clone())
        return found

    pair = both([Reaching(), Reaching()], drive, accumulation_steps=4)
    assert pair.report["replayed_forwards"] == 0


def test_a_forward_in_another_thread_stays_eager(both: Callable[..., Any]) -> None:
    def drive(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        found = warm(model, optimizer)

        def other() -> None:
            with torch.no_grad():
                found.extend(model(x) for x in batches(4))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(30)
        return found + plain_steps(model, optimizer, 2)

    pair = both([Block(), Block()], drive)
    assert any("another stream or thread" in reason for reason in pair.report["eager"])


def test_under_torch_checkpointing_and_inference_mode(both: Callable[..., Any]) -> None:
    def drive(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
        found = []
        for x in batches(4):
            y = torch.utils.checkpoint.checkpoint(model, x.requires_grad_(), use_reentrant=False)
            y.square().sum().backward()
            optimizer.step()
            with torch.inference_mode():
                found.append(model(x.detach()).clone())
        return found

    pair = both([Block(0.2), Block(0.2)], drive)
    assert len(pair.report["eager"]) == 2 and pair.report["replayed_forwards"] == 0


def test_a_recording_that_breaks_turns_replay_off(
    both: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ts_core.engine.replay.host_recorder import HostRecorder

    def record(self: HostRecorder, work: Callable[[], None]) -> Any:
        work()
        self.broken = True
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(HostRecorder, "record", record)
    pair = both([Block(0.2), Block(0.2)], lambda m, o: plain_steps(m, o, 6))
    assert pair.report["on"] is False
    assert pair.model._trainstream_session.replay.complete()  # nothing is set apart for others
    said = [line for line in pair.events if "recording failed: RuntimeError: operation" in line]
    assert len(said) == 1 and "\n" not in said[0]


def test_no_room_for_what_is_kept(
    both: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ts_core.engine.replay.policy import BlockReplay

    begin = BlockReplay.__init__

    def without_room(self: BlockReplay, *args: Any) -> None:
        begin(self, *args)
        self._keeper._room_bytes = lambda: 10

    monkeypatch.setattr(BlockReplay, "__init__", without_room)
    pair = both([Block(), Block()], lambda m, o: plain_steps(m, o, 4), recompute=[1])
    assert pair.report["recorded"] == 1  # a recomputed block keeps nothing
    assert any("no room" in line for line in pair.events)


def test_a_trained_parameter_of_two_blocks_stays_eager(recorders: list[Any]) -> None:
    blocks = [Block(), Block()]
    blocks[1].down.weight = blocks[0].down.weight
    model = nn.Sequential(*blocks)
    model, optimizer = wrap(
        model, device="host", quantize="none", cuda_graphs=True, blocks=blocks, verbose=False
    )
    plain_steps(model, optimizer, 4)
    report = model._trainstream_session.replay.report()
    assert report["replayed_forwards"] == 0
    assert any("used by other modules" in reason for reason in report["eager"])
    unwrap(model)


def test_many_shapes_are_said_once_with_what_helps(both: Callable[..., Any]) -> None:
    """Lengths that never repeat are never recorded; few that do are, and nothing is said."""
    torch.manual_seed(0)
    blocks = [nn.Linear(8, 8) for _ in range(2)]

    def over(lengths: list[int]) -> Callable[[nn.Module, Any], list[torch.Tensor]]:
        def drive(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
            losses = []
            for step, length in enumerate(lengths):
                x = torch.randn(2, length, 8, generator=torch.Generator().manual_seed(step))
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            return losses

        return drive

    def told(pair: Any) -> list[str]:
        return [event for event in pair.events if "pad_to_multiple_of" in event]

    many = both(blocks, over(list(range(1, 25))))
    assert len(told(many)) == 1 and "9 shapes" in told(many)[0] and "packing=" in told(many)[0]
    assert many.report["recorded"] == 0
    turns = both(blocks, over([8, 16, 24, 32, 40] * 4))  # one more than is kept, in turns
    assert len(told(turns)) == 1 and "5 shapes" in told(turns)[0]
    few = both(blocks, over([16, 32, 48, 64] * 6))
    assert few.report["recorded"] == 8 and few.report["replayed_forwards"] > 0
    assert told(few) == []
    odd = both(blocks, over([16, 32, 1, 2, 3, 4, *[16, 32] * 6]))  # some that come once
    assert odd.report["recorded"] == 4 and told(odd) == []


def test_what_was_apart_for_recordings_is_free_once_they_are_given_up(
    recorders: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ActivationMemory, "no_room_for_recordings", lambda self: "too large")
    model = tiny_model(3)
    params = [p for p in model.parameters() if p.requires_grad]
    model, _ = wrap(model, torch.optim.AdamW(params), quantize="none", profile=False)
    session: Any = model._trainstream_session
    freed: list[int] = []
    session.adapter = SimpleNamespace(corrector=SimpleNamespace(is_free=freed.append))
    memory = session.activations.memory
    memory.for_recordings = 1000
    assert memory.apart == 1000
    assert session.replay._keeper._give_up() == "too large"
    assert freed == [1000] and memory.apart == 0
