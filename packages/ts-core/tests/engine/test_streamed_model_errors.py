"""What StreamedModel refuses, what it says, and that it works again afterwards."""

from __future__ import annotations

import copy
import os
import pickle
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from ts_core import StreamedModel
from ts_core.engine.streamed_state import BlockState
from ts_core.errors import DataError, OptionError, OutOfBudgetError, StateError
from ts_core.memory.arena import default_arena

WIDTH = 4


class InPlace(nn.Module):
    """A block that can be told to misbehave."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.fault = ""

    def forward(self, hidden: torch.Tensor) -> Any:
        if self.fault == "input":
            hidden.add_(1)
        if self.fault == "buffer":
            self.count.add_(1)
        if self.fault == "replaced buffer":
            self.count = self.count + 1
        if self.fault == "weight":
            with torch.no_grad():
                self.linear.weight.mul_(2)
        if self.fault == "raise":
            raise ZeroDivisionError("the block's own")
        if self.fault == "backward":
            hidden = Raises.apply(hidden)
        if self.fault == "result":
            return {"hidden": hidden}
        return self.linear(hidden)


class Raises(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("in backward")


def blocks(count: int = 3) -> list[nn.Module]:
    return [InPlace() for _ in range(count)]


def expected_gradients(model: StreamedModel, x: torch.Tensor) -> list[torch.Tensor]:
    plain = copy.deepcopy(list(model.blocks))
    hidden = x
    for block in plain:
        block.fault = ""
        hidden = block(hidden)
    hidden.sum().backward()
    return [p.grad for p in nn.ModuleList(plain).parameters()]


def assert_works(model: StreamedModel) -> None:
    for block in model.blocks:
        block.fault = ""
    model.zero_grad()
    x = torch.randn(2, WIDTH)
    wanted = expected_gradients(model, x)
    model.train()(x.clone()).sum().backward()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("input", "changed an input of shape"),
        ("buffer", "changed its own count"),
        ("replaced buffer", "changed its own count"),
        ("weight", "changed its own linear.weight"),
        ("result", "must return a tensor"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_faulty_block_is_named_and_the_model_works_on(
    fault: str, message: str, training: bool
) -> None:
    model = StreamedModel(blocks(), "host").train(training)
    before = [tensor.clone() for tensor in model.state_dict().values()]
    model.blocks[1].fault = fault
    kind = DataError if fault == "result" else StateError
    with pytest.raises(kind, match=f"block 1 .*{message}"):
        model(torch.randn(2, WIDTH))
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert_works(model)
    model.close()


def test_works_after_an_exception_in_forward_and_in_backward() -> None:
    model = StreamedModel(blocks(), "host")
    model.blocks[1].fault = "raise"
    with pytest.raises(ZeroDivisionError, match="own"):
        model(torch.randn(2, WIDTH))
    assert_works(model)
    model.zero_grad()
    model.blocks[1].fault = "backward"
    with pytest.raises(ZeroDivisionError, match="in backward"):
        model(torch.randn(2, WIDTH)).sum().backward()
    assert all(p.device.type == "cpu" for p in model.parameters())
    assert_works(model)
    model.close()


def test_gradients_of_a_backward_that_raised_outside_are_not_added_later() -> None:
    model = StreamedModel(blocks(), "host")
    x = Raises.apply(torch.randn(2, WIDTH, requires_grad=True))
    with pytest.raises(ZeroDivisionError):
        model(x).sum().backward()
    assert_works(model)
    model.close()


def test_bad_input() -> None:
    with StreamedModel(blocks(), "host") as model, pytest.raises(DataError, match="is a list"):
        model([1, 2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefetch_ahead": -1}, "prefetch_ahead=-1"),
        ({"prefetch_ahead": True}, "prefetch_ahead=True"),
        ({"microbatches": 0}, "microbatches=0"),
        ({"buffer_budget_bytes": "1GiB"}, "buffer_budget_bytes='1GiB'"),
        ({"dtype": torch.int8}, "dtype=torch.int8"),
        ({"device": "tpu"}, "device='tpu'"),
    ],
)
def test_bad_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        StreamedModel(blocks(), **{"device": "host", **options})


def test_budget() -> None:
    size = StreamedModel(blocks(), "host").stats()["slot_bytes"]
    with pytest.raises(OutOfBudgetError, match=r"block 0 .*short by 1\."):
        StreamedModel(blocks(), "host", buffer_budget_bytes=size - 1)
    model = StreamedModel(blocks(), "host", prefetch_ahead=2, buffer_budget_bytes=2 * size)
    assert model.stats()["slots"] == 2
    assert_works(model)


def test_state_that_cannot_stream() -> None:
    with pytest.raises(DataError, match="at least one block"):
        StreamedModel([], "host")
    with pytest.raises(DataError, match="block 1 is a builtin_function"):
        StreamedModel([nn.Linear(2, 2), torch.relu], "host")
    with pytest.raises(DataError, match="weight of block 0 is on the meta device"):
        StreamedModel([nn.Linear(2, 2, device="meta")], "host")
    sparse = nn.Module()
    sparse.register_buffer("table", torch.eye(3).to_sparse())
    with pytest.raises(DataError, match=r"table of block 0 has layout torch\.sparse_coo"):
        StreamedModel([sparse], "host")


def test_memory_that_cannot_be_page_locked_is_refused() -> None:
    class Refuses:
        """An arena that hands out plain memory, as beyond a page-lock limit."""

        refusal = "page-locking 80 bytes was refused; ulimit -l is 64 KiB"
        fallbacks = 0

        def empty(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.fallbacks += 1
            return default_arena().empty(*args, **kwargs)

        def stats(self) -> dict[str, int]:
            return {"arena_fallbacks": self.fallbacks}

    BlockState(0, nn.Linear(2, 2), None, Refuses(), pinned=False)
    with pytest.raises(OutOfBudgetError, match=r"block 3 needs .* page-locked .* ulimit -l is 64"):
        BlockState(3, nn.Linear(2, 2), None, Refuses(), pinned=True)


def test_too_little_ram_for_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    from ts_core.engine import streamed_grads

    model = StreamedModel([nn.Linear(WIDTH, WIDTH) for _ in range(3)], "host")
    arena = type("Full", (), {"stats": lambda self: {"arena_largest_free": 0}})()
    monkeypatch.setattr(model._machinery.landing, "arena", arena)
    monkeypatch.setattr(streamed_grads, "ram_available_bytes", lambda: 1000)
    with pytest.raises(OutOfBudgetError, match=r"gradients .* short by"):
        model(torch.randn(2, WIDTH))
    monkeypatch.undo()
    model(torch.randn(2, WIDTH)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_aliased_storage() -> None:
    tied = [nn.Linear(2, 2, bias=False) for _ in range(2)]
    tied[1].weight = tied[0].weight
    with pytest.raises(DataError, match=r"weight of block . and weight of block . share memory"):
        StreamedModel(tied, "host")
    block = nn.Linear(2, 2)
    with pytest.raises(DataError, match="share memory"):
        StreamedModel([block, block], "host")
    views = nn.Module()
    whole = torch.zeros(4)
    views.register_buffer("low", whole[:3])
    views.register_buffer("high", whole[2:])
    with pytest.raises(DataError, match="high of block 0 and low of block 0"):
        StreamedModel([views], "host")


def test_blocks_of_a_closed_model_and_their_copies_stream_again() -> None:
    mine = blocks()
    with StreamedModel(mine, "host") as model:
        assert_works(model)
    with StreamedModel(copy.deepcopy(mine), "host") as model:
        assert_works(model)
    with StreamedModel(mine, "host") as model:
        assert_works(model)


def test_replaced_state_is_refused() -> None:
    model = StreamedModel(blocks(), "host")
    weight = model.blocks[1].linear.weight
    kept = weight.data
    weight.data = torch.zeros(WIDTH, WIDTH + 1)
    with pytest.raises(StateError, match=r"block 1: linear\.weight is .* \(4, 5\) now"):
        model(torch.randn(2, WIDTH))
    weight.data = kept
    assert_works(model)
    model.blocks[2].linear.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    with pytest.raises(StateError, match=r"block 2: .* replaced .*linear.weight"):
        model(torch.randn(2, WIDTH))


def test_weights_changed_between_forward_and_backward() -> None:
    model = StreamedModel(blocks(), "host")
    loss = model(torch.randn(2, WIDTH)).sum()
    with torch.no_grad():
        model.blocks[1].linear.weight.mul_(2)
    with pytest.raises(StateError, match="block 1 were changed in place between"):
        loss.backward()
    assert_works(model)


def test_sparse_gradient_is_refused() -> None:
    model = StreamedModel([nn.Embedding(5, WIDTH, sparse=True)], "host")
    with pytest.raises(DataError, match="sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()


def test_closed_copied_pickled_moved() -> None:
    model = StreamedModel(blocks(), "host")
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(StateError, match="cannot be copied or pickled"):
            attempt(model)
    with pytest.raises(StateError, match="Use its own"):
        model.apply_ = model._apply(lambda tensor: tensor)
    loss = model(torch.randn(2, WIDTH)).sum()
    model.close()
    model.close()
    for use in (lambda: model(torch.randn(2, WIDTH)), model.stats, lambda: model.residency_history):
        with pytest.raises(StateError, match="closed"):
            use()
    with pytest.raises(StateError, match="closed"):
        loss.backward()
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_called_from_inside_its_own_block() -> None:
    class Inside(nn.Module):
        model: Any = None

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.model[0](hidden)

    inside = Inside()
    model = StreamedModel([inside, nn.Linear(WIDTH, WIDTH)], "host")
    inside.model = [model]
    with pytest.raises(StateError, match="one pass at a time"):
        model(torch.randn(2, WIDTH))
    model.close()


def test_ambiguous_and_unjoinable_microbatches() -> None:
    class Takes(nn.Module):
        def forward(self, hidden: torch.Tensor, other: Any = None) -> Any:
            return hidden.mean() if other == "scalar" else hidden

    with StreamedModel([Takes()], "host", microbatches=2) as model:
        with pytest.raises(DataError, match=r"unsqueeze\(0\)"):
            model(torch.ones(3, 2), torch.ones(3, 3))
        with pytest.raises(DataError, match="cannot be joined"):
            model(torch.ones(3, 2), "scalar")
        with pytest.raises(DataError, match="shape"):
            model(torch.ones(()))


def test_threads_end_with_the_model() -> None:
    before = set(threading.enumerate())  # those of earlier tests may end meanwhile
    started: set[threading.Thread] = set()
    for _ in range(3):
        with StreamedModel(blocks(), "host") as model:
            model(torch.randn(2, WIDTH)).sum().backward()
            started |= set(threading.enumerate()) - before
        del model
    assert len(started) >= 3  # or this test would show nothing
    deadline = time.monotonic() + 30
    for thread in started:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not [thread for thread in started if thread.is_alive()]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_forked_child_is_refused() -> None:
    model = StreamedModel(blocks(), "host")
    slots = model._machinery.slots
    slots._process += 1  # as a child would see it
    with pytest.raises(StateError, match="forked child"):
        model(torch.randn(2, WIDTH))
    slots._process -= 1
    assert_works(model)


def test_a_load_that_is_interrupted_leaves_the_slot_behind_its_last_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from types import SimpleNamespace

    from ts_core.device import HostDevice
    from ts_core.engine.streamed_slots import BlockSlots
    from ts_core.transfer import CopyEngine

    def state() -> Any:
        image = SimpleNamespace(
            bind=lambda *_: None, bind_host=lambda: None, buffer_h=torch.zeros(8, dtype=torch.uint8)
        )
        return SimpleNamespace(image=image, size_bytes=8)

    copies = CopyEngine(HostDevice())
    slots = BlockSlots([state(), state()], copies, 1, None)
    slots.enter(0, 1)
    slots.leave(0)
    (last_read,) = slots._done.values()
    waited: list[Any] = []
    h2d = copies.h2d

    def interrupted(dst_d: torch.Tensor, src_h: torch.Tensor, after: Any = None) -> Any:
        waited.append(after)
        if len(waited) == 1:
            raise KeyboardInterrupt
        return h2d(dst_d, src_h, after=after)

    monkeypatch.setattr(copies, "h2d", interrupted)
    with pytest.raises(KeyboardInterrupt):
        slots.enter(1, 1)
    slots.enter(1, 1)
    assert waited == [last_read, last_read] and not slots._done
