"""What users do to a wrapped model between, during and after steps: right numbers, or an error.

Every case runs on a streamed model and on plain torch with the same seed.
"""

from __future__ import annotations

import copy
import gc
import os
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ts_core import OffloadAdamW, unwrap, wrap
from ts_core.errors import OptionError, StateError
from ts_core.testing import inject_delays

WIDTH = 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x))) + self.adapter(x)
        return out


class Stack(nn.Module):
    def __init__(self, kind: type[nn.Module] = Block) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(6))
        self.head = nn.Linear(WIDTH, 1)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("adapter" in name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        out: torch.Tensor = self.head(x)
        return out


def batch(rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, WIDTH)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> None:
    for _ in range(count):
        model(batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


Body = Callable[[Any, torch.optim.Optimizer], Any]


def compare(body: Body, make: Callable[[], nn.Module] = Stack, **options: Any) -> None:
    """Run `body` on a streamed model and on plain torch; trained values agree."""
    results = []
    for streamed in (True, False):
        torch.manual_seed(0)
        model = make()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer: Any = torch.optim.AdamW(trained, lr=1e-2)
        if streamed:
            given = {"param_offload": True, "quantize": "none", "device": "host", **options}
            model, optimizer = wrap(model, optimizer, **given)
        with inject_delays(3, max_ms=1.0):
            result = body(model, optimizer)
        model.zero_grad()
        results.append((model.state_dict(), result))
    for name, value in results[0][0].items():
        assert (value - results[1][0][name]).abs().max() <= 2e-6, name
    if results[0][1] is not None:
        assert (results[0][1] - results[1][1]).abs().max() <= 2e-6


def test_in_place_writes_to_frozen_weights() -> None:
    def body(model: Any, optimizer: torch.optim.Optimizer) -> None:
        steps(model, optimizer)
        with torch.no_grad():
            for layer in model.layers:
                layer.up.weight.mul_(0.5)
        steps(model, optimizer)

    compare(body)


def test_writes_through_data_and_replaced_data() -> None:
    def body(model: Any, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        steps(model, optimizer)
        for layer in model.layers:
            layer.up.weight.data.mul_(0.5)
            layer.down.weight.data = layer.down.weight.data * 2
        steps(model, optimizer)
        with torch.no_grad():
            model.layers[5].up.weight.data.add_(0.125)
            model.layers[0].up.weight.data.add_(0.125)
            out: torch.Tensor = model(torch.ones(2, WIDTH))
        return out

    compare(body)


def test_loading_into_a_child_of_a_block() -> None:
    def body(model: Any, optimizer: torch.optim.Optimizer) -> None:
        steps(model, optimizer)
        weights = {"weight": torch.full((2 * WIDTH, WIDTH), 0.01), "bias": torch.zeros(2 * WIDTH)}
        model.layers[1].up.load_state_dict(weights)
        steps(model, optimizer)

    compare(body)


def test_gradient_penalty() -> None:
    def body(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            x = batch().requires_grad_()
            (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            ((gradient.norm(dim=1) - 1) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    compare(body)


def test_block_weight_used_outside_its_block() -> None:
    def body(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(4):
            x = batch()
            for layer in model.layers:
                x = layer(x)
                x = x + torch.tanh(F.linear(x, layer.up.weight[:WIDTH]))
            model.head(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    compare(body)


class WithTable(Block):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), {"table": self.table[:2]}


def test_block_that_returns_a_view_of_its_weight() -> None:
    def body(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(4):
            x, tables = batch(), []
            for layer in model.layers:
                x, extra = layer(x)
                tables.append(extra["table"])
            scale = sum((k + 1) * table.sin().mean() for k, table in enumerate(tables))
            (model.head(x) * scale).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    compare(body, lambda: Stack(WithTable))


def test_interleaved_micro_batches() -> None:
    def body(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            first, second = model(batch()).square().mean(), model(batch()).square().mean()
            second.backward()
            first.backward()
            optimizer.step()
            optimizer.zero_grad()

    compare(body, accumulation_steps=2)


def streamed(make: Callable[[], nn.Module] = Stack, **options: Any) -> tuple[Any, OffloadAdamW]:
    torch.manual_seed(0)
    given = {"param_offload": True, "quantize": "none", "device": "host", "lr": 1e-2, **options}
    return wrap(make(), **given)


def test_unfreezing_a_streamed_weight_is_refused() -> None:
    model, optimizer = streamed()
    weight = model.layers[1].up.weight
    weight.requires_grad_(True)
    optimizer.add_param_group({"params": [weight]})
    with pytest.raises(StateError, match=r"up\.weight of block 1 .* unwrap"):
        model(batch())


def test_changing_dtype_of_a_streamed_weight_is_refused() -> None:
    model, _ = streamed()
    model.bfloat16()
    with pytest.raises(StateError, match=r"replaced by a torch\.bfloat16"):
        model(batch().bfloat16())


def test_lr_set_between_backward_and_step_is_said() -> None:
    model, optimizer = streamed()
    model(batch()).square().mean().backward()
    optimizer.param_groups[0]["lr"] = 1e-3
    with pytest.warns(UserWarning, match="eager=False"):
        optimizer.step()

    def body(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for step in range(4):
            model(batch()).square().mean().backward()
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
            optimizer.step()
            optimizer.zero_grad()

    compare(body, eager=False)


@pytest.mark.parametrize("eager", [None, False])
def test_graph_over_updated_weights_raises_as_in_torch(eager: bool | None) -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    model, optimizer = streamed(make, param_offload=False, eager=eager)
    first, second = model(batch()).square().mean(), model(batch()).square().mean()
    first.backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()


def test_accumulation_changed_in_the_middle_of_a_step_is_refused() -> None:
    model, optimizer = streamed()
    model(batch()).square().mean().backward()
    optimizer.accumulation_steps = 2
    with pytest.raises(StateError, match="after the step's last one"):
        model(batch()).square().mean().backward()


def test_two_parameters_over_one_memory_are_refused_before_anything_changes() -> None:
    model = Stack()
    model.layers[1].adapter.weight.data = model.layers[0].adapter.weight.data
    with pytest.raises(OptionError, match="share their memory"):
        wrap(model, param_offload=True, quantize="none", device="host")
    assert not model.layers[0]._forward_pre_hooks


def test_refused_optimizer_leaves_no_hook() -> None:
    model = Stack()
    trained = [p for p in model.parameters() if p.requires_grad]
    with pytest.raises(OptionError, match="amsgrad"):
        wrap(model, torch.optim.AdamW(trained, amsgrad=True), param_offload=True, device="host")
    assert not any(layer._forward_pre_hooks for layer in model.layers)
    with pytest.raises(OptionError, match="eager=True"):
        wrap(model, eager=True, max_grad_norm=1.0, device="host")


def test_options_reach_an_optimizer_that_was_passed() -> None:
    model = Stack()
    own = OffloadAdamW([p for p in model.parameters() if p.requires_grad])
    wrap(model, own, eager=False, threads=1, device="host", quantize="none")
    assert (own.eager, own.threads) == (False, 1)


def test_copies_and_late_backwards_say_what_to_do() -> None:
    model, _ = streamed()
    with pytest.raises(StateError, match="unwrap"):
        copy.deepcopy(model)
    loss = model(batch()).sum()
    unwrap(model)
    with pytest.raises(StateError, match="before unwrap"):
        loss.backward()


def test_forked_child_is_refused_instead_of_hanging() -> None:
    model, _ = streamed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork beside threads
        child = os.fork()
    if child == 0:
        try:
            model(batch())
        except StateError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_dropped_models_leave_no_threads(
    started_threads: Callable[[], list[threading.Thread]],
) -> None:
    for _ in range(5):
        model, optimizer = streamed()
        steps(model, optimizer, 1)
        del model, optimizer
    end = time.monotonic() + 30
    while started_threads() and time.monotonic() < end:
        gc.collect()  # the last update may have been in flight, and held them, at the first try
        time.sleep(0.01)
    assert started_threads() == []


def test_inference_in_another_thread_beside_training() -> None:
    model, optimizer = streamed()
    errors: list[BaseException] = []
    x = batch()

    def infer() -> None:
        try:
            with torch.no_grad():
                for _ in range(30):
                    model.layers[2](x)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=infer)
    thread.start()
    steps(model, optimizer, 10)
    thread.join()
    assert errors == []
