"""What training scripts do around an optimizer, and what must then hold."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from ts_core import OffloadAdamW, wrap
from ts_core.errors import DataError, NotAvailableError, OptionError, StateError
from ts_core.optim import checks

LIMIT = 3e-7


@pytest.mark.parametrize("clip", [clip_grad_norm_, clip_grad_value_])
def test_clipping_imported_before_any_optimizer_is_refused(lab: Any, clip: Any) -> None:
    model = lab.model()
    optimizer = OffloadAdamW(model.parameters(), eager=False)
    lab.loss(model, 0).backward()
    with pytest.raises(StateError, match="max_grad_norm"):
        clip(model.parameters(), 1.0)
    with pytest.raises(StateError, match="max_grad_norm"):
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, torch.tensor(2.0))
    plain = nn.Linear(3, 3)
    plain(torch.ones(1, 3)).sum().backward()
    clip(plain.parameters(), 1e-3)
    assert plain.weight.grad is not None and plain.weight.grad.abs().max() <= 1e-3
    optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("replaced", [False, True])
def test_values_written_between_backward_and_step(
    lab: Any, dtype: torch.dtype, replaced: bool
) -> None:
    ours, theirs = lab.model(dtype), lab.model(dtype)
    optimizer = OffloadAdamW(ours.parameters(), lr=1e-2, eager=False)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for model, opt in ((ours, optimizer), (theirs, reference)):
        for step in range(2):
            lab.loss(model, step).backward()
            with torch.no_grad():
                if replaced:
                    model.large.data = torch.full_like(model.large, 0.5)
                else:
                    model.large.fill_(0.5)
            opt.step()
            opt.zero_grad()
    tolerance = LIMIT if dtype is torch.float32 else 4e-3
    assert (ours.large - theirs.large).abs().max() <= tolerance
    assert (ours.large - 0.5).abs().max() > 5e-3


def test_a_newer_optimizer_takes_over_and_the_older_says_so(lab: Any) -> None:
    lines: list[str] = []
    model, twin = lab.model(), lab.model()
    older = OffloadAdamW(model.parameters(), lr=1e-2, on_event=lines.append)
    lab.run(model, older, 1)
    saved = copy.deepcopy(older.state_dict())
    newer = OffloadAdamW(model.parameters(), lr=1e-2)
    newer.load_state_dict(saved)
    lab.run(model, newer, 2, first=1)
    lab.run(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2), 3)
    assert lab.distance(model, twin) <= LIMIT
    assert any("another OffloadAdamW" in line for line in lines)
    with pytest.raises(StateError, match="another OffloadAdamW"):
        older.step()


def test_groups_that_the_user_edits(lab: Any) -> None:
    ours, theirs = lab.model(), lab.model()
    for model, kind in ((ours, OffloadAdamW), (theirs, torch.optim.AdamW)):
        optimizer = kind(lab.groups(model, True), lr=1e-2)
        lab.run(model, optimizer, 1)
        optimizer.param_groups.reverse()
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.param_groups[1]["params"] = [
            p for p in optimizer.param_groups[1]["params"] if p is not model[0].weight
        ]
        lab.run(model, optimizer, 2, first=1)
    assert lab.distance(ours, theirs) <= LIMIT
    moved = OffloadAdamW(lab.groups(lab.model(), True))
    moved.build()
    last = moved.param_groups[1]["params"].pop()  # shares a bucket with the other small ones
    moved.param_groups[0]["params"].append(last)
    for group in moved.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    with pytest.raises(StateError, match="between param groups"):
        moved.step()


def test_state_is_read_after_the_updates_and_shows_the_step(lab: Any) -> None:
    model, twin = lab.model(), lab.model()
    optimizer = OffloadAdamW(model.parameters(), max_grad_norm=0.5)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-3)
    lab.run(model, optimizer, 3)
    lab.run(twin, reference, 3, clip=0.5)
    for name in ("exp_avg", "exp_avg_sq"):
        ours, theirs = optimizer.state[model.large][name], reference.state[twin.large][name]
        assert (ours - theirs).abs().max() <= LIMIT
    assert optimizer.state[model.large]["step"].item() == 3.0


def test_a_forward_in_another_thread_during_backward_drops_nothing() -> None:
    class Slow(torch.autograd.Function):
        meanwhile: Any = None

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=Slow.meanwhile)
            thread.start()
            thread.join()
            return grad

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(600, 600)
            self.last = nn.Linear(600, 600)

        def forward(self, x: torch.Tensor, slow: bool = False) -> torch.Tensor:
            hidden = self.first(x)
            return self.last(Slow.apply(hidden) if slow else hidden).square().mean()

    x = torch.randn(3, 600)
    results = []
    for busy in (True, False):
        torch.manual_seed(0)
        model, optimizer = wrap(Net(), lr=1e-2, max_grad_norm=0.1, device="cpu")
        for _ in range(2):
            Slow.meanwhile = (lambda m=model: m(x)) if busy else (lambda: None)
            model(x, slow=True).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append((optimizer.last_grad_norm, model.last.weight.detach().clone()))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_zero_grad_of_a_wrapped_model_drops_gradients_that_have_left(lab: Any) -> None:
    ours, theirs = lab.model(), lab.model()
    ours, optimizer = wrap(ours, lr=1e-2, accumulation_steps=2, device="cpu")
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for model, opt in ((ours, optimizer), (theirs, reference)):
        lab.loss(model, 0).backward()
        model.zero_grad()
        lab.loss(model, 1).backward()
        opt.step()
    assert lab.distance(ours, theirs) <= LIMIT


def test_overlapping_parameters_and_changed_dtypes_are_refused(lab: Any) -> None:
    base = torch.zeros(100)
    with pytest.raises(OptionError, match="share"):
        checks.memory([nn.Parameter(base[:60]), nn.Parameter(base[50:])])
    checks.memory([nn.Parameter(base[:50]), nn.Parameter(base[50:])])
    model = lab.model()
    optimizer = OffloadAdamW(model.parameters())
    lab.run(model, optimizer, 1)
    model.bfloat16()
    with pytest.raises(StateError, match="bfloat16 now"):
        lab.run(model, optimizer, 1)
    optimizer.zero_grad()


def test_copies_are_refused_with_the_remedy(lab: Any) -> None:
    optimizer = OffloadAdamW(lab.model().parameters())
    for work in (copy.deepcopy, pickle.dumps):
        with pytest.raises(StateError, match="state_dict"):
            work(optimizer)


@pytest.mark.parametrize(
    "change",
    [{"lr": float("nan")}, {"lr": "x"}, {"betas": (0.9,)}, {"weight_decay": -1.0}],
    ids=str,
)
def test_state_dicts_with_values_out_of_range_are_refused(lab: Any, change: Any) -> None:
    model = lab.model()
    optimizer = OffloadAdamW(model.parameters())
    lab.run(model, optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0].update(change)
    with pytest.raises(DataError, match="param group 0"):
        optimizer.load_state_dict(saved)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["step"] = torch.tensor(-4.0)
    with pytest.raises(DataError, match="step"):
        optimizer.load_state_dict(saved)


def test_what_data_parallel_cannot_do_is_refused(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(NotAvailableError, match="hybrid"):
        OffloadAdamW(lab.model().parameters(), mode="hybrid")
    with pytest.raises(OptionError, match="eager=True"):
        OffloadAdamW(lab.model().parameters(), eager=True)
    OffloadAdamW(lab.model().parameters(), distributed=False)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_reads_new_values_and_may_not_train(lab: Any) -> None:
    model, twin = lab.model(), lab.model()
    lab.run(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2), 1, clip=0.5)
    expected = twin.large[0, :3].tolist()
    optimizer = OffloadAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
    lab.loss(model, 0).backward()
    optimizer.step()
    child = os.fork()
    if child == 0:
        status = 1
        try:  # few values: torch's own threads do not survive a fork either
            found = model.large[0, :3].tolist()
            if all(abs(a - b) <= LIMIT for a, b in zip(found, expected, strict=True)):
                status = 2
                optimizer._updates.take(model.large, torch.zeros(1))
        except StateError:
            status = 7
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    optimizer.synchronize()


def test_compiled_models_train_with_one_graph(lab: Any) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(16, 600), nn.Tanh(), nn.Linear(600, 600))
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    optimizer = OffloadAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.1)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    torch._dynamo.utils.counters.clear()
    x = torch.randn(4, 16)
    for _ in range(4):
        compiled(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        twin(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        reference.step()
        reference.zero_grad()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert lab.distance(model, twin) <= 1e-6
    torch._dynamo.reset()
    gc.collect()


def moved_to(optimizer: OffloadAdamW, place: str) -> OffloadAdamW:
    if place == "device":
        optimizer.make_resident()
    else:
        optimizer.build()
        optimizer.place_state([place] * len(optimizer.buckets))
    return optimizer


@pytest.mark.parametrize("place", ["host", "zero_copy", "resident", "device"])
@pytest.mark.parametrize("first", ["optimizer", "model"])
def test_a_run_goes_on_bit_for_bit_in_whichever_order_it_is_loaded(
    lab: Any, place: str, first: str
) -> None:
    model = lab.model(torch.bfloat16)
    optimizer = moved_to(OffloadAdamW(model.parameters(), lr=1e-4), place)
    lab.run(model, optimizer, 4)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    lab.run(model, optimizer, 4, first=4)
    again = lab.model(torch.bfloat16, seed=1)
    other = moved_to(OffloadAdamW(again.parameters(), lr=1e-4), place)
    lab.run(again, other, 1)
    if first == "model":
        again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    if first == "optimizer":
        again.load_state_dict(saved[0])
    lab.run(again, other, 4, first=4)
    optimizer.synchronize()
    other.synchronize()
    for mine, theirs in zip(again.state_dict().values(), model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(
        other.state_dict()["state"].values(), optimizer.state_dict()["state"].values(), strict=True
    ):
        assert torch.equal(mine["master"], theirs["master"])


@pytest.mark.parametrize("place", ["host", "zero_copy", "resident", "device"])
def test_values_written_before_the_state_was_saved_or_loaded_count(lab: Any, place: str) -> None:
    """The saved fp32 copy is that of the last update."""
    model = lab.model(torch.bfloat16)
    optimizer = moved_to(OffloadAdamW(model.parameters(), lr=1e-3), place)
    lab.run(model, optimizer, 2)
    with torch.no_grad():
        model.large.fill_(0.5)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer = moved_to(OffloadAdamW(model.parameters(), lr=1e-3), place)
    with torch.no_grad():
        model.second.fill_(-0.5)
    optimizer.load_state_dict(saved)
    lab.run(model, optimizer, 1, first=2)
    optimizer.synchronize()
    assert (model.large - 0.5).abs().max() < 0.01
    assert (model.second + 0.5).abs().max() < 0.01
