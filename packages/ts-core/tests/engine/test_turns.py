"""Several threads use one model whose weights stream: each sees the weights of a whole step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ts_core import StreamedModel, wrap
from ts_core.device import resolve_device
from ts_core.engine.turns import Turns
from ts_core.errors import StateError
from ts_core.optim import read_guard, shown
from ts_core.testing import inject_delays

WIDTH, STEPS = 24, 6
LIMIT_S = 60.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Stack(nn.Module):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(5))
        self.layers.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def wrapped(device: str = "host", frozen: bool = False, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Stack(frozen)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    settings = {"param_offload": True, "quantize": "none", **options}
    return wrap(model, optimizer, device=device, **settings)


def train(model: Any, optimizer: Any, device: str, after_step: Callable[[], None]) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        loss = model(torch.randn(3, WIDTH, generator=generator).to(device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
        after_step()
    return losses


def beside(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any], threading.Event]:
    """A thread that repeats `work` until the event is set; the list takes results and errors."""
    found: list[Any] = []
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            try:
                with torch.no_grad():
                    found.append(work())
            except BaseException as error:
                found.append(error)
                return

    thread = threading.Thread(target=loop, name="inference")
    thread.start()
    return thread, found, stop


def check_beside_training(device: str, part: bool, **options: Any) -> None:
    torch_device = "cpu" if device == "host" else device
    x = torch.ones(2, WIDTH, device=torch_device)

    def look(model: Any) -> torch.Tensor:
        out: torch.Tensor = (model.layers[2] if part else model)(x)
        return out.cpu()

    model, optimizer = wrapped(device, **options)
    with torch.no_grad():
        allowed = [look(model)]

    def remember() -> None:
        with torch.no_grad():
            allowed.append(look(model))

    alone = train(model, optimizer, torch_device, remember)
    model, optimizer = wrapped(device, **options)
    with inject_delays(4, max_ms=0.5):
        thread, found, stop = beside(lambda: look(model))
        both = train(model, optimizer, torch_device, lambda: None)
        stop.set()
        thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert all(torch.equal(here, there) for here, there in zip(both, alone, strict=True))
    assert found
    for out in found:
        assert isinstance(out, torch.Tensor), out
        assert any(torch.equal(out, value) for value in allowed)


MATRIX = [
    {"frozen": True},
    {},
    {"eager": False},
    {"max_grad_norm": 0.1},
    {"guard_params": False},
    {"recompute": True},
    {"activation_offload": True, "min_offload_bytes": 0, "frozen": True},
]


@pytest.mark.parametrize("part", [False, True], ids=["model", "block"])
@pytest.mark.parametrize("options", MATRIX, ids=lambda options: "-".join(options) or "trained")
def test_inference_beside_training_changes_nothing(options: dict[str, Any], part: bool) -> None:
    check_beside_training("host", part, **options)


def test_also_where_compiled_code_keeps_parameters_from_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (read_guard, shown):
        monkeypatch.setattr(module, "compiled_code_in_use", lambda: True)
    for part in (False, True):
        check_beside_training("host", part)


@pytest.mark.gpu
@pytest.mark.parametrize("part", [False, True], ids=["model", "block"])
@pytest.mark.parametrize("options", MATRIX, ids=lambda options: "-".join(options) or "trained")
def test_inference_beside_training_on_the_gpu(options: dict[str, Any], part: bool) -> None:
    check_beside_training("cuda", part, **options)


def test_two_threads_of_inference() -> None:
    model, _ = wrapped(frozen=True)
    inputs = [torch.randn(2, WIDTH) for _ in range(2)]
    with torch.no_grad():
        alone = [model(x) for x in inputs]
    threads = [beside(lambda x=x: model(x)) for x in inputs]  # type: ignore[misc]
    with torch.no_grad():
        for _ in range(20):
            assert torch.equal(model(inputs[0]), alone[0])
    for (thread, found, stop), expected in zip(threads, alone, strict=True):
        stop.set()
        thread.join(LIMIT_S)
        assert all(torch.equal(out, expected) for out in found)


def works_in_another_thread(model: Any) -> bool:
    found: list[torch.Tensor] = []

    def work() -> None:
        with torch.no_grad():
            found.append(model(torch.ones(1, WIDTH)))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return len(found) == 1


@pytest.mark.parametrize("part", [False, True], ids=["model", "block"])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_forward_that_raises_gives_the_turn_back(error: type[BaseException], part: bool) -> None:
    model, _ = wrapped()
    own = model.layers[3].up.forward

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise error("stop")

    model.layers[3].up.forward = broken
    with pytest.raises(error):
        (model.layers[3] if part else model)(torch.ones(1, WIDTH))
    model.layers[3].up.forward = own
    assert works_in_another_thread(model)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_backward_that_raises_gives_the_turn_back(error: type[BaseException]) -> None:
    class Break(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise error("stop")

    model, _ = wrapped()
    handle = model.layers[2].up.register_forward_hook(lambda *call: Break.apply(call[-1]))
    kept = []  # as a debugger keeps the traceback, and with it every frame
    try:
        model(torch.ones(1, WIDTH)).sum().backward()
    except error as caught:
        kept.append(caught)
    assert kept
    handle.remove()
    assert works_in_another_thread(model)


def test_a_backward_inside_a_forward_and_inside_a_backward() -> None:
    """Neither waits for the turn its own thread has; numbers are plain torch's."""
    grads = []
    for streamed in (True, False):
        torch.manual_seed(0)
        model = Stack(frozen=True)
        if streamed:
            model, _ = wrapped(frozen=True, recompute=True)
        x = torch.ones(2, WIDTH, requires_grad=True)
        inner: list[torch.Tensor] = []

        def slope(module: Any, args: Any, output: torch.Tensor, model=model, inner=inner) -> None:  # type: ignore[no-untyped-def]
            if not inner:
                inner.append(torch.empty(0))
                y = torch.ones(2, WIDTH, requires_grad=True)
                with torch.enable_grad():
                    inner[0] = torch.autograd.grad(model.layers[4](y).sum(), y)[0]

        model.first.register_forward_hook(slope)
        grads.append((torch.autograd.grad(model(x).sum(), x)[0], inner[0]))
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1], grads[1][1])


def test_state_dict_and_step_wait_for_the_pass_of_another_thread() -> None:
    model, optimizer = wrapped(eager=False)
    model(torch.ones(1, WIDTH)).sum().backward()
    inside, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        inside.set()
        go_on.wait(LIMIT_S)

    handle = model.layers[2].up.register_forward_pre_hook(hold)
    running = threading.Thread(target=lambda: model(torch.ones(1, WIDTH)))
    running.start()
    assert inside.wait(LIMIT_S)
    handle.remove()

    def step() -> None:
        optimizer.step()
        done.set()

    stepping = threading.Thread(target=step)
    stepping.start()
    assert not done.wait(0.3)
    go_on.set()
    assert done.wait(LIMIT_S)
    running.join(LIMIT_S)
    stepping.join(LIMIT_S)


def test_threads_that_wait_for_each_other_are_told() -> None:
    turns = Turns(resolve_device("host"), patience_s=0.2)
    inside, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with turns.alone():
            inside.set()
            go_on.wait(LIMIT_S)

    holder = threading.Thread(target=hold, name="the holder")
    holder.start()
    assert inside.wait(LIMIT_S)
    with (
        pytest.raises(StateError, match=r"'the holder'.*waits for it.*one thread at a time"),
        turns.alone(),
    ):
        pass
    go_on.set()
    holder.join(LIMIT_S)
    with turns.alone():  # the one that gave up has left the queue
        pass


def test_a_thread_that_ended_inside_a_pass_holds_nobody_up() -> None:
    turns = Turns(resolve_device("host"))
    thread = threading.Thread(target=turns.enter)
    thread.start()
    thread.join(LIMIT_S)
    with turns.alone():
        pass


def test_turns_come_in_the_order_of_asking() -> None:
    turns = Turns(resolve_device("host"))
    order: list[int] = []
    threads = []

    def work(number: int) -> None:
        with turns.alone():
            order.append(number)

    with turns.alone():
        for number in range(4):
            threads.append(threading.Thread(target=work, args=(number,)))
            threads[-1].start()
            while len(turns._queue) <= number:
                threading.Event().wait(0.001)
    for thread in threads:
        thread.join(LIMIT_S)
    assert order == [0, 1, 2, 3]


def test_a_change_of_threads_puts_their_streams_in_order() -> None:
    """What the first queued on its stream comes before what the second queues on another."""

    class Recorded:
        name = "compute"

        def __init__(self) -> None:
            self.waited: list[Any] = []

        def record(self) -> Any:
            return ("end of", self)

        def wait_event(self, event: Any) -> None:
            self.waited.append(event)

    class Fake:
        stream = Recorded()

        def compute_stream(self) -> Any:
            return self.stream

    device = Fake()
    turns = Turns(device)  # type: ignore[arg-type]
    first, second = device.stream, Recorded()
    for stream in (first, second):
        device.stream = stream
        with turns.alone():
            pass
    assert first.waited == second.waited == []  # one thread orders its own streams

    def other() -> None:
        device.stream = first
        with turns.alone():
            pass

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(LIMIT_S)
    assert first.waited == [("end of", second)]


def test_a_turn_taken_inside_a_backward_ends_with_it() -> None:
    """state_dict() in a gradient hook, say."""
    model, _ = wrapped()
    states: list[Any] = []
    model.first.weight.register_hook(lambda grad: states.append(model.state_dict()))
    model.layers[4].register_full_backward_hook(lambda *_: states.append(model.state_dict()))
    model(torch.ones(1, WIDTH)).sum().backward()
    assert len(states) == 2
    assert works_in_another_thread(model)


@pytest.mark.parametrize("device", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_streamed_models_take_turns_too(device: str) -> None:
    """Gradients of several passes, with and without inference beside them."""
    x = torch.ones(2, WIDTH)
    grads = []
    for busy in (False, True):
        torch.manual_seed(0)
        with StreamedModel([Block() for _ in range(4)], device) as model, inject_delays(4, 0.5):
            with torch.no_grad():
                expected = model(x)
            thread, found, stop = beside(lambda model=model: model(x))  # type: ignore[misc]
            if not busy:
                stop.set()
                thread.join(LIMIT_S)
            inputs = torch.Generator().manual_seed(1)
            for _ in range(STEPS):
                model(torch.randn(3, WIDTH, generator=inputs)).square().mean().backward()
            stop.set()
            thread.join(LIMIT_S)
            assert not thread.is_alive()
            for out in found:
                assert isinstance(out, torch.Tensor), out
                assert torch.equal(out, expected)
            grads.append([parameter.grad for parameter in model.parameters()])
    for alone, both in zip(*grads, strict=True):
        assert torch.equal(alone, both)
