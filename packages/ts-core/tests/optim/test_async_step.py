"""step() returns at once; whoever reads a parameter waits for that one, and for nothing else."""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ts_core import OffloadAdamW
from ts_core.errors import StateError
from ts_core.optim import read_guard
from ts_core.optim.places import HostPlace

LIMIT = 3e-7


class Gate:
    """Host updates wait until the gate opens, and are noted in order."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.order: list[int] = []


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    original = HostPlace.update

    def update(self: HostPlace, update: Any, scale: float) -> Any:
        assert made.open.wait(60)
        made.order.append(update.target.numel())
        return original(self, update, scale)

    monkeypatch.setattr(HostPlace, "update", update)
    yield made
    made.open.set()


def later(gate: Gate, seconds: float = 0.05) -> None:
    threading.Timer(seconds, gate.open.set).start()


READS: dict[str, Callable[[nn.Module], Any]] = {
    "operation": lambda m: (m.large * 1.0).detach(),
    "data": lambda m: m.large.data.clone(),
    "detach": lambda m: m.large.detach().clone(),
    "state_dict": lambda m: m.state_dict()["large"].clone(),
    "item": lambda m: torch.tensor(m.large[3, 3].item()),
    "foreach": lambda m: torch._foreach_mul([m.large.detach()], 1.0)[0],
    "list": lambda m: torch.cat([m.large]).detach(),
    "keyword": lambda m: torch.add(input=m.large, other=0.0).detach(),
    "numpy": lambda m: torch.from_numpy(m.large.detach().numpy().copy()),
    "pickle": lambda m: torch.load(_pickled(m.large)),
    "thread": lambda m: _in_thread(lambda: m.large.detach().clone()),
    "clone": lambda m: __import__("copy").deepcopy(m).large.detach(),
}


def _pickled(tensor: torch.Tensor) -> Any:
    import io

    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    buffer.seek(0)
    return buffer


def _in_thread(work: Callable[[], torch.Tensor]) -> torch.Tensor:
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("how", READS)
def test_a_read_anywhere_waits_for_the_new_values(lab: Any, gate: Gate, how: str) -> None:
    model, twin = lab.model(), lab.model()
    lab.run(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2), 1, clip=0.5)
    expected = READS[how](twin) if how != "thread" else twin.large.detach()
    optimizer = OffloadAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
    lab.loss(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert read_guard.in_flight(model.large)
    assert not gate.order
    later(gate)
    found = READS[how](model)
    assert (found - expected).abs().max() <= LIMIT
    assert type(model.large) is nn.Parameter
    optimizer.synchronize()


def test_step_returns_before_the_updates_and_harmless_questions_do_not_wait(
    lab: Any, gate: Gate
) -> None:
    model = lab.model()
    optimizer = OffloadAdamW(model.parameters(), max_grad_norm=0.5)
    lab.loss(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert model.large.shape == (400, 701)
    assert model.large.grad is None
    assert model.large.requires_grad and model.large.is_leaf
    assert isinstance(model.large, nn.Parameter)
    assert model.large in set(model.parameters())
    assert model.large.numel() == 400 * 701
    assert optimizer.last_grad_norm == pytest.approx(optimizer.stats()["grad_norm"])
    pending = optimizer.pending_grad_norm
    assert pending is not None and pending() == optimizer.last_grad_norm
    assert not gate.order and read_guard.in_flight(model.large)
    assert not read_guard.in_flight(model.unused)
    gate.open.set()
    optimizer.synchronize()


def test_updates_run_in_forward_order_and_a_read_waits_for_its_own_only(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*(nn.Linear(600, 600 + 8 * k, bias=False) for k in range(1)))
    layers = [nn.Parameter(torch.randn(600, 600 + k) * 0.01) for k in range(4)]
    hidden = torch.randn(2, 600)

    def forward() -> torch.Tensor:
        out = hidden
        for k, layer in enumerate(layers):
            out = (out @ layer)[:, :600].tanh()
            assert k >= 0
        return out.sum()

    optimizer = OffloadAdamW(layers, max_grad_norm=1.0)
    order: list[int] = []
    held = threading.Event()
    original = HostPlace.update

    def update(self: HostPlace, update: Any, scale: float) -> Any:
        order.append(update.target.numel() // 600 - 600)
        if len(order) == 2:
            assert held.wait(20)
        return original(self, update, scale)

    monkeypatch.setattr(HostPlace, "update", update)
    forward().backward()
    optimizer.step()
    layers[0].sum()  # the first in forward order: there, while the second is held
    assert order[:1] == [0] and read_guard.in_flight(layers[1])
    held.set()
    optimizer.synchronize()
    assert order == [0, 1, 2, 3]
    assert len(list(model.parameters())) == 1


def test_waiting_holds_no_core(lab: Any, gate: Gate, cpu_of_threads: Callable[[], float]) -> None:
    model = lab.model()
    optimizer = OffloadAdamW(model.parameters(), max_grad_norm=0.5)
    lab.loss(model, 0).backward()
    optimizer.step()
    used: list[float] = []

    def open_later() -> None:
        before = cpu_of_threads()
        time.sleep(0.5)
        used.append(cpu_of_threads() - before)
        gate.open.set()

    threading.Thread(target=open_later).start()
    model.large.sum()
    assert used and used[0] < 0.25


def test_an_error_in_an_update_reaches_every_reader(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def update(self: HostPlace, update: Any, scale: float) -> Any:
        raise RuntimeError("the disk is on fire")

    model = lab.model()
    optimizer = OffloadAdamW(model.parameters(), max_grad_norm=0.5)
    lab.loss(model, 0).backward()
    monkeypatch.setattr(HostPlace, "update", update)
    optimizer.step()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="on fire"):
            model.large.sum()
    with pytest.raises(RuntimeError, match="on fire"):
        optimizer.synchronize()


def test_a_dropped_model_is_freed_with_updates_in_flight(lab: Any, gate: Gate) -> None:
    model = lab.model()
    optimizer = OffloadAdamW(model.parameters(), max_grad_norm=0.5)
    lab.loss(model, 0).backward()
    optimizer.step()
    kept = weakref.ref(model.large)
    del model, optimizer
    gate.open.set()
    deadline = time.monotonic() + 30
    while kept() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert kept() is None
    assert not [reference for reference in read_guard._flying.values() if reference() is None]


def test_gradients_that_come_before_the_update_has_read_the_last_ones_wait(
    lab: Any, gate: Gate
) -> None:
    model, twin = lab.model(), lab.model()
    optimizer = OffloadAdamW(model.parameters(), lr=1e-2, max_grad_norm=0.5)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    losses = [lab.loss(model, step) for step in range(2)]  # both graphs before any step
    losses[0].backward()
    optimizer.step()
    optimizer.zero_grad()
    later(gate)
    losses[1].backward()  # a sum: the graph needs no parameter, nothing has read one
    optimizer.step()
    lab.run(twin, reference, 2, clip=0.5)
    assert lab.distance(model, twin) <= LIMIT


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_nothing_is_lost_when_zero_grad_comes_at_odd_places(
    lab: Any, max_grad_norm: float | None
) -> None:
    model, twin = lab.model(), lab.model()
    optimizer = OffloadAdamW(model.parameters(), lr=1e-2, max_grad_norm=max_grad_norm)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    for step in range(3):
        for each, opt in ((model, optimizer), (twin, reference)):
            opt.zero_grad()
            loss = lab.loss(each, step)
            opt.zero_grad(set_to_none=False)
            loss.backward()
            if opt is reference and max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(each.parameters(), max_grad_norm)
            opt.step()
            opt.step()  # no gradients: nothing happens, as in torch with None gradients
            if opt is reference:
                opt.zero_grad()
                continue
            each.zero_grad()
        reference.zero_grad()
    # torch's second step() used the same gradients again; do likewise for comparison
    single, again = lab.model(), lab.model()
    lab.run(single, torch.optim.AdamW(single.parameters(), lr=1e-2), 3, clip=max_grad_norm)
    lab.run(again, OffloadAdamW(again.parameters(), lr=1e-2, max_grad_norm=max_grad_norm), 3)
    assert lab.distance(single, again) <= LIMIT
    assert lab.distance(model, again) == 0.0


def test_lr_is_the_one_at_step(lab: Any, gate: Gate) -> None:
    model, twin = lab.model(), lab.model()
    optimizer = OffloadAdamW(model.parameters(), lr=1e-2, eager=False)
    lab.loss(model, 0).backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 77.0  # for the next step, while this one is in flight
    gate.open.set()
    lab.run(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2), 1)
    assert lab.distance(model, twin) <= LIMIT


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("skip", [False, True])
def test_gradients_that_are_not_finite(lab: Any, bad: float, skip: bool) -> None:
    lines: list[str] = []
    model = lab.model()
    optimizer = OffloadAdamW(
        model.parameters(), lr=1e-2, max_grad_norm=0.5, skip_nonfinite=skip, on_event=lines.append
    )
    lab.run(model, optimizer, 1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    (lab.loss(model, 1) + model.large[0, 0] * bad).backward()
    optimizer.step()
    optimizer.zero_grad()
    same = all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert same == skip
    assert sum("NaN or infinite" in line for line in lines) == 1
    assert ("skipped" in "".join(lines)) == skip
    assert optimizer.updates == (1 if skip else 2)
    if skip:
        twin = lab.model()
        reference = torch.optim.AdamW(twin.parameters(), lr=1e-2)
        lab.run(twin, reference, 1, clip=0.5)
        lab.run(twin, reference, 1, clip=0.5, first=2)
        lab.run(model, optimizer, 1, first=2)
        assert lab.distance(model, twin) <= LIMIT


def test_grad_scaler_is_refused_with_the_remedy(lab: Any) -> None:
    model = lab.model()
    optimizer = OffloadAdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(lab.loss(model, 0)).backward()
    with pytest.raises(Exception, match="bfloat16"):
        scaler.step(optimizer)
    with pytest.raises(StateError, match="bfloat16"):
        scaler.unscale_(optimizer)


def test_the_scaler_guard_leaves_others_alone(lab: Any) -> None:
    optimizer = OffloadAdamW(lab.model().parameters())
    torch.amp.GradScaler("cpu", enabled=False).unscale_(optimizer)  # does nothing, so may be there
    plain = nn.Linear(3, 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(plain(torch.ones(2, 3)).sum()).backward()
    scaler.unscale_(torch.optim.AdamW(plain.parameters()))
    assert plain.bias.grad is not None and plain.bias.grad.tolist() == [2.0] * 3


def test_backward_that_raises_leaves_a_clean_next_step() -> None:
    from ts_core import wrap

    class Broken(torch.autograd.Function):
        fail = True

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            if Broken.fail:
                raise RuntimeError("boom")
            return grad

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(600, 600)
            self.last = nn.Linear(600, 600)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(Broken.apply(self.first(x))).square().mean()

    x = torch.randn(3, 600)
    for eager in (None, False):
        torch.manual_seed(0)
        model, optimizer = wrap(Net(), lr=1e-2, eager=eager, device="cpu")
        Broken.fail = True
        with pytest.raises(RuntimeError, match="boom"):
            model(x).backward()
        Broken.fail = False
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        model(x).backward()  # no zero_grad() in between
        optimizer.step()
        assert all(not torch.equal(before[n], p) for n, p in model.named_parameters())
        said = [e for e in model._trainstream_session.events if "raised before step()" in e]
        assert len(said) == (1 if eager is None else 0)
        if said:
            assert "600x600" in said[0]


def test_a_model_whose_update_failed_is_freed(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error keeps neither the readers' frames nor the model."""
    model = lab.model()
    optimizer = OffloadAdamW(model.parameters(), max_grad_norm=0.5)
    lab.run(model, optimizer, 1)
    optimizer.synchronize()

    def broken(*_: Any) -> None:
        raise RuntimeError("the disk is on fire")

    for bucket in optimizer.buckets:
        monkeypatch.setattr(bucket.place, "update", broken)
    lab.loss(model, 0).backward()
    optimizer.step()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="on fire"):
            model.large.sum()
    monkeypatch.undo()
    kept = weakref.ref(model.large)
    del model, optimizer, bucket
    deadline = time.monotonic() + 30
    while kept() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert kept() is None
