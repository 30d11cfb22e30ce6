"""What users do to paged trained weights: as in plain torch, or an error.

Every case runs on a model all of whose matrices stream and are trained, and on plain torch.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn

from ts_core import unwrap, wrap
from ts_core.errors import OptionError, StateError
from ts_core.optim import read_guard
from ts_core.testing import inject_delays
from ts_core.testing.trained import (
    CLIP,
    WHERE,
    WIDTH,
    Body,
    Stack,
    batch,
    compare,
    looped_body,
    steps,
    steps_body,
    streamed,
)


def writes_body(model: Any, optimizer: Any) -> torch.Tensor:
    steps(model, optimizer)
    with torch.no_grad():
        model.layers[0].up.weight.mul_(0.5)
        model.layers[1].down.weight.copy_(torch.ones(WIDTH, 2 * WIDTH))
    model.layers[2].up.weight.data = model.layers[2].up.weight.data * 2
    model.layers[3].up.weight.data.add_(0.125)
    steps(model, optimizer)
    read = sum(p.detach().sum().cpu() for p in model.parameters())
    steps(model, optimizer, 1)
    with torch.no_grad():
        model.layers[3].down.weight.add_(0.25)
        out: torch.Tensor = model(torch.ones_like(batch(2))).sum().cpu() + read
    return out


@pytest.mark.parametrize("options", [{}, CLIP], ids=["eager", "clipped"])
def test_writes_between_steps(options: dict[str, Any]) -> None:
    compare(writes_body, **options)


def test_writes_to_low_precision_weights_reach_the_master_copy() -> None:
    def make() -> nn.Module:
        return Stack().bfloat16()

    model, optimizer = streamed(make)
    x = batch().bfloat16()
    model(x).square().mean().backward()
    optimizer.step()
    weight = model.layers[1].up.weight
    with torch.no_grad():
        weight.fill_(0.5)
    model(x).square().mean().backward()
    optimizer.step()
    assert (weight.detach().float() - 0.5).abs().max() < 0.03
    master = optimizer.state[weight]["master"]
    assert torch.equal(master.bfloat16(), weight.detach())
    assert (master - 0.5).abs().max() < 0.03


@pytest.mark.parametrize("after", [True, [1, 2], []], ids=str)
@pytest.mark.parametrize("before", [True, [1], []], ids=str)
def test_writes_before_weights_change_place(before: Any, after: Any) -> None:
    """bf16 weights are rounded from a master copy, which moves with them and takes the writes."""
    results = []
    for moves in (True, False):
        torch.manual_seed(0)
        given: dict[str, Any] = {"quantize": "none", "device": "host"}
        model: Any = Stack().bfloat16()
        model, optimizer = wrap(model, lr=1e-3, param_offload=before, **given)
        for step in range(4):
            model(torch.ones(2, WIDTH, dtype=torch.bfloat16)).square().mean().backward()
            optimizer.step()
            if step == 1:
                with torch.no_grad():
                    for weight in (model.layers[1].up.weight, model.head.weight):
                        weight.mul_(1.5)
                if moves:
                    unwrap(model)
                    model, optimizer = wrap(model, optimizer, param_offload=after, **given)
        results.append(copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"])))
    (values, state), (expected, wanted) = results
    assert all(torch.equal(value, expected[name]) for name, value in values.items())
    for key, entry in state.items():
        assert all(torch.equal(value, wanted[key][name]) for name, value in entry.items()), key


@pytest.mark.parametrize("options", [{}, CLIP], ids=["eager", "clipped"])
def test_state_dicts_and_resume(options: dict[str, Any]) -> None:
    """Saved in the middle of a run and loaded into a new one, which goes on alike."""
    model, optimizer = streamed(**options)
    steps(model, optimizer, 2)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for _ in range(2):
        other, theirs = streamed(**options)
        steps(other, theirs, 1)
        other.load_state_dict(saved[0])
        theirs.load_state_dict(saved[1])
        for each in ((model, optimizer), (other, theirs)):
            torch.manual_seed(5)
            steps(*each, 2)
        expected = model.state_dict()
        for name, value in other.state_dict().items():
            assert torch.equal(value, expected[name]), name
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])


def test_loading_into_a_child_of_a_block() -> None:
    def body(model: Any, optimizer: Any) -> None:
        steps(model, optimizer)
        weights = {"weight": torch.full((2 * WIDTH, WIDTH), 0.01), "bias": torch.zeros(2 * WIDTH)}
        model.layers[1].up.load_state_dict(weights)
        steps(model, optimizer)

    compare(body)


def evaluation_body(model: Any, optimizer: Any) -> torch.Tensor:
    seen = torch.zeros(())
    for _ in range(3):
        model(batch()).square().mean().backward()
        if getattr(optimizer, "max_grad_norm", 1) is not None:
            x, y = batch(), batch()  # (else updates have started: torch's values are the old ones)
            with torch.no_grad():
                seen = seen + (model(x).sum() + model.layers[1](y).sum()).cpu()
        optimizer.step()
        with torch.no_grad():
            seen = seen + (model(batch()).sum() + model.layers[2](batch()).sum()).cpu()
        optimizer.zero_grad()
    return seen


def test_evaluation_between_backward_and_step() -> None:
    compare(evaluation_body, **CLIP)


def test_groups_schedules_and_parameters_without_a_gradient() -> None:
    class Partial(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            for k, layer in enumerate(self.layers):
                if (self.calls + k) % 3:
                    x = layer(x)
            out: torch.Tensor = self.head(x)
            return out

    results = []
    for paged in (True, False):
        torch.manual_seed(0)
        model: Any = Partial()
        first = [p for layer in model.layers[:2] for p in layer.parameters()]
        chosen = {id(p) for p in first}
        rest = [p for p in model.parameters() if id(p) not in chosen]
        groups = [{"params": first, "lr": 1e-2, "weight_decay": 0.0}, {"params": rest, "lr": 3e-3}]
        optimizer: Any = torch.optim.AdamW(groups, betas=(0.8, 0.95))
        if paged:
            model, optimizer = wrap(
                model, optimizer, param_offload=True, quantize="none", device="host"
            )
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        with inject_delays(3, max_ms=1.0):
            for _ in range(6):
                steps(model, optimizer, 1)
                schedule.step()
        results.append(model.state_dict())
    for name, value in results[0].items():
        assert (value - results[1][name]).abs().max() <= 2e-6, name


def test_gradient_penalty() -> None:
    def body(model: Any, optimizer: Any) -> None:
        for _ in range(3):
            x = batch().requires_grad_()
            (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            ((gradient.norm(dim=1) - 1) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    compare(body, **CLIP)


def interleaved_body(model: Any, optimizer: Any) -> None:
    for _ in range(3):
        first, second = model(batch()).square().mean(), model(batch()).square().mean()
        second.backward()
        first.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_interleaved_micro_batches() -> None:
    compare(interleaved_body, accumulation_steps=2)


@pytest.mark.parametrize("offload", [False, True, 0.5])
def test_another_backward_over_updated_weights_says_what_to_pass(offload: Any) -> None:
    def loss_of(**options: Any) -> torch.Tensor:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        model, _ = wrap(model, device="host", param_offload=offload, **options)
        loss: torch.Tensor = model(torch.randn(3, 8)).square().mean()
        loss.backward(retain_graph=True)
        return loss

    with pytest.raises(RuntimeError, match=r"an inplace operation.*accumulation_steps"):
        loss_of().backward()
    loss_of(accumulation_steps=2).backward()


@pytest.mark.parametrize("options", [{}, CLIP], ids=["eager", "clipped"])
def test_a_graph_over_updated_weights_raises_as_in_torch(options: dict[str, Any]) -> None:
    model, optimizer = streamed(**options)
    first, second = model(batch()).square().mean(), model(batch()).square().mean()
    first.backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()
    optimizer.zero_grad()
    steps(model, optimizer, 1)


def test_an_exception_in_forward_or_backward_leaves_a_clean_next_step() -> None:
    def body(model: Any, optimizer: Any) -> None:
        steps(model, optimizer, 2)

        def explode(*_: Any) -> None:
            raise RuntimeError("in the middle")

        handle = model.layers[2].down.register_forward_hook(explode)
        with pytest.raises(RuntimeError, match="in the middle"):
            model(batch())
        handle.remove()
        handle = model.layers[1].register_forward_hook(
            lambda module, args, output: output.register_hook(explode) and None
        )
        with pytest.raises(RuntimeError, match="in the middle"):
            model(batch()).square().mean().backward()
        handle.remove()
        optimizer.zero_grad()
        steps(model, optimizer, 2)

    compare(body, **CLIP)


def test_frozen_for_a_while() -> None:
    def body(model: Any, optimizer: Any) -> None:
        steps(model, optimizer, 2)
        model.layers[1].up.weight.requires_grad_(False)
        steps(model, optimizer, 2)
        model.layers[1].up.weight.requires_grad_(True)
        steps(model, optimizer, 2)

    compare(body)


@pytest.mark.parametrize("moments", ["float32", "int8"])
def test_unwrap_train_on_and_wrap_again(moments: str) -> None:
    """State and values pass from images to ordinary parameters and back, bit for bit."""
    results = []
    for paged in (True, False):
        given: dict[str, Any] = {"moment_dtype": moments, "param_offload": paged or [], **CLIP}
        torch.manual_seed(0)
        model: Any = Stack()
        model, optimizer = wrap(model, lr=1e-2, quantize="none", device="host", **given)
        steps(model, optimizer, 2)
        unwrap(model)
        assert all(bucket.home is None for bucket in optimizer.buckets)
        steps(model, optimizer, 2)
        model, optimizer = wrap(model, optimizer, quantize="none", device="host", **given)
        assert any(bucket.home is not None for bucket in optimizer.buckets) == paged
        steps(model, optimizer, 2)
        results.append(copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"])))
    for name, value in results[0][0].items():
        assert torch.equal(value, results[1][0][name]), name
    for key, entry in results[0][1].items():
        for name, value in entry.items():
            assert torch.equal(value, results[1][1][key][name]), (key, name)


def test_weights_that_the_optimizer_leaves_out_stay_and_keep_their_gradient() -> None:
    torch.manual_seed(0)
    model = Stack()
    left_out = model.layers[1].up.weight
    trained = [p for p in model.parameters() if p is not left_out]
    model, optimizer = wrap(
        model,
        torch.optim.AdamW(trained, lr=1e-2),
        param_offload=True,
        quantize="none",
        device="host",
    )
    assert left_out not in {home.param for home in model._trainstream_session.homes}
    model(batch()).square().mean().backward()
    assert left_out.grad is not None
    optimizer.step()


def test_changing_the_dtype_of_a_paged_weight_is_refused() -> None:
    model, _ = streamed()
    model.bfloat16()
    with pytest.raises(StateError, match=r"replaced by a torch\.bfloat16"):
        model(batch().bfloat16())


def test_an_update_that_fails_reaches_the_next_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    # What ran before in this process may have compiled something, and step() would wait then.
    monkeypatch.setattr(read_guard, "compiled_code_in_use", lambda: False)
    model, optimizer = streamed(**CLIP)
    steps(model, optimizer, 1)
    optimizer.synchronize()
    bucket = next(b for b in optimizer.buckets if b.home is not None)

    def broken(*_: Any) -> None:
        raise RuntimeError("the update broke")

    bucket.place.update = broken  # type: ignore[method-assign]
    steps(model, optimizer, 1)
    with pytest.raises(RuntimeError, match="the update broke"):
        model(batch())


@pytest.mark.parametrize("options", [{}, CLIP], ids=["eager", "clipped"])
def test_inference_in_another_thread_beside_training(options: dict[str, Any]) -> None:
    """It sees old or new weights, and neither thread waits for ever."""
    model, optimizer = streamed(**options)
    errors: list[BaseException] = []
    x = batch()

    def infer() -> None:
        try:
            with torch.no_grad():
                for _ in range(30):
                    assert torch.isfinite(model.layers[2](x)).all()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=infer)
    thread.start()
    steps(model, optimizer, 10)
    thread.join(60)
    assert not thread.is_alive()
    assert errors == []


def test_meta_models_are_refused() -> None:
    with torch.device("meta"):
        model = Stack()
    with pytest.raises(OptionError, match="meta"):
        wrap(model, lr=1e-2, device="host", quantize="none")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["cpu", "gpu"])
@pytest.mark.parametrize("clip", [{}, CLIP], ids=["eager", "clipped"])
@pytest.mark.parametrize(
    ("body", "options"),
    [
        (steps_body, {}),
        (writes_body, {}),
        (evaluation_body, CLIP),
        (looped_body, {}),
        (interleaved_body, {"accumulation_steps": 2}),
    ],
)
def test_on_the_gpu(
    body: Body,
    options: dict[str, Any],
    clip: dict[str, Any],
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(WHERE, "device", "cuda")
    monkeypatch.setitem(WHERE, "torch", "cuda")
    compare(body, offload=True, optimizer_mode=mode, **{**clip, **options})


@pytest.mark.gpu
def test_unwrap_on_the_gpu_brings_weights_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WHERE, "device", "cuda")
    monkeypatch.setitem(WHERE, "torch", "cuda")
    model, optimizer = streamed(offload=True)
    steps(model, optimizer, 2)
    before = {name: value.cpu() for name, value in model.state_dict().items()}
    unwrap(model)
    assert all(parameter.is_cuda for parameter in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), before[name]), name
    steps(model, optimizer, 2)
    assert not torch.equal(model.layers[1].up.weight.cpu(), before["layers.1.up.weight"])
