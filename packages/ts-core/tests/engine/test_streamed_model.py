"""StreamedModel: few blocks on the device, the numbers of all blocks on it."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ts_core import OffloadAdamW, StreamedModel
from ts_core.testing import inject_delays
from ts_core.testing.zoo import WIDTH, Normal, inputs, resident_forward, zoo
from ts_core.transfer import edges


def train(
    forward: Any, parameters: list[nn.Parameter], steps: int = 3, autocast: bool = False
) -> list[torch.Tensor]:
    """Losses, the argument's gradients, parameter gradients and weights, step by step."""
    optimizer = torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=1e-2)
    record = []
    for step in range(steps):
        torch.manual_seed(100 + step)
        tokens, shift = inputs(step)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = forward(tokens, shift, gain=0.7)["logits"]
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten() % 5)
        loss.backward()
        record += [loss.detach(), shift.grad]
        record += [p.grad.clone() for p in parameters if p.grad is not None]
        if step != 1:  # step 1 leaves its gradients: the next backward adds to them
            optimizer.step()
            optimizer.zero_grad()
        record += [p.detach().clone() for p in parameters]
    return record


def run_both(
    prefetch_ahead: int, *, delays: int | None, autocast: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    blocks = zoo()
    mine = copy.deepcopy(blocks)
    expected = train(
        lambda *a, **k: resident_forward(blocks, *a, **k),
        [p for b in blocks for p in b.parameters()],
        autocast=autocast,
    )
    with StreamedModel(mine, "host", prefetch_ahead) as model:
        model.train()
        pauses = contextlib.nullcontext() if delays is None else inject_delays(delays)
        with pauses:
            found = train(model, list(model.parameters()), autocast=autocast)
        assert all(p.device.type == "cpu" for p in model.parameters())
        assert model.stats()["peak_resident"] == min(prefetch_ahead + 1, len(mine))
    return expected, found


def same(expected: list[torch.Tensor], found: list[torch.Tensor]) -> bool:
    return len(expected) == len(found) and all(map(torch.equal, expected, found))


@pytest.mark.parametrize("delays", [None, 3])
@pytest.mark.parametrize("prefetch_ahead", [0, 1, 2, 9])
def test_training_equals_resident(prefetch_ahead: int, delays: int | None) -> None:
    expected, found = run_both(prefetch_ahead, delays=delays)
    assert same(expected, found)


def test_training_equals_resident_under_autocast() -> None:
    expected, found = run_both(1, delays=3, autocast=True)
    assert same(expected, found)


def test_missing_wait_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The delays have teeth: without the waits the numbers are wrong."""
    monkeypatch.setattr(edges, "wait", lambda device, stream, event: None)
    expected, found = run_both(1, delays=3)
    assert not same(expected, found)


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_eval_equals_resident_and_has_no_history(context: Any) -> None:
    blocks = zoo()
    mine = copy.deepcopy(blocks)
    tokens, shift = inputs(0)
    with StreamedModel(mine, "host") as model:
        model.eval()
        resident = [block.eval() for block in blocks]
        with inject_delays(1), context():
            for _ in range(2):
                result = model(tokens, shift)
        with torch.no_grad():
            expected = resident_forward(resident, tokens, shift)
    assert type(result) is OrderedDict
    assert result["nothing"] is None
    assert torch.equal(result["logits"], expected["logits"])
    assert torch.equal(result["best"], expected["best"])
    assert not result["logits"].requires_grad


def test_training_after_inference_mode() -> None:
    """Views made in inference mode would be refused by autograd."""
    model = StreamedModel(zoo(), "host")
    tokens, shift = inputs(0)
    with torch.inference_mode():
        model.eval()(tokens, shift)
    model.train()(tokens, shift)["logits"].sum().backward()
    assert shift.grad is not None
    model.close()


def test_each_block_crosses_once_forward_and_backward() -> None:
    model = StreamedModel(zoo(), "host", prefetch_ahead=1)
    tokens, shift = inputs(0)
    model(tokens, shift)["logits"].sum().backward()
    stats = model.stats()
    # 6 forward; backward finds the last two still there.
    assert stats["loads"] == 6 + 4
    assert stats["demand_loads"] == 1
    assert stats["recomputes"] == 6
    assert stats["gradient_bytes"] > 0
    model.reset_stats()
    assert model.stats()["loads"] == 0
    assert len(model.residency_history) == 0
    model.close()


def test_residency_never_exceeds_the_bound_and_is_observed() -> None:
    seen: list[Any] = []
    model = StreamedModel(zoo(), "host", prefetch_ahead=2, residency_observer=seen.append)
    tokens, shift = inputs(0)
    for _ in range(2):
        model(tokens, shift)["logits"].sum().backward()
    assert list(model.residency_history) == seen
    assert max(len(change.resident) for change in seen) == 3
    assert {change.action for change in seen} == {"load", "evict"}
    assert model.residency_history.maxlen == 4096
    now: set[int] = set()
    for change in seen:
        now = now | {change.block} if change.action == "load" else now - {change.block}
        assert set(change.resident) == now
    model.close()


@pytest.mark.parametrize("batch", [4, 5])
def test_microbatches_cross_a_block_together(batch: int) -> None:
    """Equal to k backward passes, last first; weights cross as often as for one."""
    blocks = [Normal(0.0) for _ in range(4)]
    mine = copy.deepcopy(blocks)
    x = torch.randn(batch, 3, WIDTH, requires_grad=True)
    shift = torch.randn(batch, 1, WIDTH)
    y = x.detach().clone().requires_grad_()
    outputs = [
        resident_forward(blocks, piece, part)
        for piece, part in zip(y.tensor_split(2), shift.tensor_split(2), strict=True)
    ]
    weights = torch.randn(batch, 3, WIDTH)
    parts = weights.tensor_split(2)
    for output, part in reversed(list(zip(outputs, parts, strict=True))):
        output.backward(part)
    with StreamedModel(mine, "host", microbatches=2) as model, inject_delays(5):
        result = model(x, shift)
        assert torch.equal(result, torch.cat(outputs))
        result.backward(weights)
        assert model.stats()["loads"] == 4 + 2
        assert model.stats()["recomputes"] == 8
    assert torch.equal(x.grad, y.grad)
    for a, b in zip(nn.ModuleList(blocks).parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_microbatch_arguments_are_cut_only_with_the_batch() -> None:
    from ts_core.engine.streamed_batch import split

    hidden = torch.randn(6, 2)
    pieces = split(hidden, (torch.arange(6), torch.ones(1, 6), None), {"a": [torch.ones(6, 3)]}, 4)
    assert [len(piece[0]) for piece in pieces] == [2, 2, 1, 1]
    assert [piece[1][0].tolist() for piece in pieces] == [[0, 1], [2, 3], [4], [5]]
    assert all(piece[1][1].shape == (1, 6) and piece[1][2] is None for piece in pieces)
    assert [piece[2]["a"][0].shape[0] for piece in pieces] == [2, 2, 1, 1]
    assert len(split(hidden[:2], (), {}, 4)) == 2


def test_frozen_blocks_below_the_first_trained_one_are_not_run_again() -> None:
    model = StreamedModel([Normal(0.0) for _ in range(4)], "host")
    for block in list(model.blocks)[:2]:
        block.requires_grad_(False)
    model(torch.randn(2, 3, WIDTH), None).sum().backward()
    assert model.stats()["recomputes"] == 2
    assert all(p.grad is None for p in model.blocks[0].parameters())
    assert model.blocks[2].inner.up.weight.grad is not None
    model.close()


def test_parameter_hooks_see_gradients() -> None:
    block = Normal(0.0)
    plain = copy.deepcopy(block)
    x = torch.randn(2, 3, WIDTH)
    model = StreamedModel([block], "host")
    calls = []
    home = block.inner.up.weight.data_ptr()
    for module in (plain, block):
        module.inner.up.weight.register_hook(lambda grad: grad * 3)
        module.inner.up.weight.register_post_accumulate_grad_hook(
            lambda p: calls.append((p.grad.clone(), p.data_ptr()))
        )
    plain(x, None).sum().backward()
    model(x, None).sum().backward()
    assert len(calls) == 2
    assert torch.equal(calls[0][0], calls[1][0])
    assert calls[1][1] == home  # hooks find the parameter where the user knows it
    assert torch.equal(block.inner.up.weight.grad, plain.inner.up.weight.grad)
    model.close()


def test_gradients_kept_by_the_user_are_never_overwritten() -> None:
    model = StreamedModel([Normal(0.0), Normal(0.0)], "host")
    kept = []
    for _ in range(3):
        model(torch.randn(2, 3, WIDTH), None).sum().backward()
        weight = model.blocks[0].inner.up.weight
        kept.append((weight.grad, weight.grad.clone()))
        model.zero_grad(set_to_none=True)
    assert all(torch.equal(kept_grad, copied) for kept_grad, copied in kept)
    model.close()


def test_steady_steps_map_no_memory() -> None:
    from ts_core import pinned_stats

    model = StreamedModel([Normal() for _ in range(4)], "host")
    counts = []
    for _ in range(5):
        model(torch.randn(2, 3, WIDTH), None).sum().backward()
        model.zero_grad()
        counts.append(pinned_stats()["host_alloc_calls"])
    assert len(set(counts[1:])) == 1
    model.close()


def test_unrelated_random_numbers_are_the_same_after_backward() -> None:
    """Replaying a block's dropout leaves the generator where it was."""
    model = StreamedModel([Normal(0.5)], "host")
    loss = model(torch.randn(2, 3, WIDTH), None).sum()
    state = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), state)
    model.close()


def test_two_forwards_then_two_backwards() -> None:
    blocks = [Normal(0.0) for _ in range(3)]
    mine = copy.deepcopy(blocks)
    x, y = torch.randn(2, 3, WIDTH), torch.randn(1, 3, WIDTH)
    with StreamedModel(mine, "host") as model, inject_delays(2):
        losses = [model(v, None).square().mean() for v in (x, y)]
        losses[0].backward()
        losses[1].backward()
    expected = [resident_forward(blocks, v, None).square().mean() for v in (x, y)]
    for loss in expected:
        loss.backward()
    for a, b in zip(nn.ModuleList(blocks).parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_state_dict_load_and_dtype() -> None:
    blocks = zoo()
    model = StreamedModel(copy.deepcopy(blocks), "host", dtype=torch.float64)
    before = list(model.parameters())
    assert {p.dtype for p in before} == {torch.float64}
    model.to(torch.float32)
    assert [id(p) for p in before] == [id(p) for p in model.parameters()]
    other = StreamedModel(zoo(1), "host")
    other.load_state_dict(model.state_dict())
    tokens, shift = inputs(0)
    model.eval(), other.eval()
    assert torch.equal(model(tokens, shift)["logits"], other(tokens, shift)["logits"])
    expected = resident_forward([b.eval() for b in blocks], tokens, shift)["logits"]
    assert torch.equal(other(tokens, shift)["logits"], expected)
    model.close()
    other.close()


@pytest.mark.parametrize("write", ["data", "in_place", "other_memory"])
def test_writes_between_steps_count(write: str) -> None:
    model = StreamedModel([Normal(0.0), Normal(0.0)], "host").eval()
    plain = copy.deepcopy(list(model.blocks))
    x = torch.randn(2, 3, WIDTH)
    model(x, None)
    for block in (model.blocks[1], plain[1]):
        if write == "data":
            block.inner.up.weight.data.mul_(2)
        elif write == "other_memory":
            block.inner.up.weight.data = block.inner.up.weight.data * 2
        else:
            with torch.no_grad():
                block.inner.up.weight.mul_(2)
    with torch.no_grad():
        expected = resident_forward(plain, x, None)
    assert torch.equal(model(x, None), expected)
    model.close()


def test_inner_tensors_of_a_frozen_wrapper_stream() -> None:
    """A weight in a wrapper subclass (a quantized one, say) streams by its inner tensors."""
    from torch.testing._internal.two_tensor import TwoTensor

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            value = TwoTensor(torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH))
            self.weight = nn.Parameter(value, requires_grad=False)
            self.trained = nn.Parameter(torch.randn(WIDTH))

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return torch.tanh(hidden @ self.weight.a + hidden @ self.weight.b.t()) * self.trained

    blocks = [Wrapped() for _ in range(4)]
    values = [(b.weight.a.clone(), b.weight.b.clone(), b.trained.detach()) for b in blocks]
    x = torch.randn(3, WIDTH)
    y = x
    for a, b, trained in values:
        y = torch.tanh(y @ a + y @ b.t()) * trained
    with StreamedModel(blocks, "host", dtype=torch.float32) as model, inject_delays(4):
        result = model(x)
        assert torch.equal(result, y)
        result.sum().backward()
        assert model.stats()["slot_bytes"] >= 2 * 4 * WIDTH * WIDTH
    assert all(block.trained.grad is not None for block in blocks)


@pytest.mark.parametrize(
    ("options", "delays"), [({}, None), ({}, 6), ({"max_grad_norm": 0.1}, None)]
)
def test_with_offload_adamw(options: dict[str, Any], delays: int | None) -> None:
    """It moves small parameters into memory of its own, and updates during backward."""

    def run(streamed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        blocks: list[nn.Module] = [Normal(0.0) for _ in range(3)]
        forward: Any = lambda x: resident_forward(blocks, x, None)  # noqa: E731
        if streamed:
            model = StreamedModel(blocks, "host")
            forward = lambda x: model(x, None)  # noqa: E731
        parameters = list(nn.ModuleList(blocks).parameters())
        optimizer = OffloadAdamW(parameters, lr=1e-2, threads=1, **options)
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            loss = forward(torch.randn(2, 3, WIDTH, generator=generator)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach().clone() for p in parameters]

    expected = run(False)
    with contextlib.nullcontext() if delays is None else inject_delays(delays):
        found = run(True)
    assert same(expected, found)


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch_ahead", [0, 1, 2])
@pytest.mark.parametrize("autocast", [False, True])
def test_gpu_training_equals_resident(prefetch_ahead: int, autocast: bool) -> None:
    device = torch.device("cuda")
    blocks = zoo()
    mine = copy.deepcopy(blocks)
    for block in blocks:
        block.to(device)

    def run(forward: Any, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.125)
        record = []
        for step in range(3):
            torch.manual_seed(100 + step)
            tokens, shift = inputs(step)
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                logits = forward(tokens.to(device), shift.to(device), gain=0.7)["logits"]
            labels = tokens.flatten().to(device) % 5
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels)
            loss.backward()
            record += [loss.detach().cpu(), shift.grad]
            record += [p.grad.cpu().clone() for p in parameters if p.grad is not None]
            if step != 1:
                optimizer.step()
                optimizer.zero_grad()
        return record

    expected = run(
        lambda *a, **k: resident_forward(blocks, *a, **k),
        [p for b in blocks for p in b.parameters()],
    )
    with StreamedModel(mine, device, prefetch_ahead) as model, inject_delays(3):
        found = run(model.train(), list(model.parameters()))
        assert all(p.device.type == "cpu" for p in model.parameters())
        assert all(p.grad is None or p.grad.device.type == "cpu" for p in model.parameters())
    assert same(expected, found)


def test_moving_keeps_what_was_learned() -> None:
    model = StreamedModel([Normal(0.0), Normal(0.0)], "host")
    x = torch.randn(2, 3, WIDTH)
    model(x, None).sum().backward()
    gradient = model.blocks[0].inner.up.weight.grad.clone()
    expected = model.eval()(x, None)
    assert model.cpu() is model and model.device == torch.device("cpu")
    assert torch.equal(model(x, None), expected)
    assert torch.equal(model.blocks[0].inner.up.weight.grad, gradient)
    assert {p.dtype for p in model.bfloat16().parameters()} == {torch.bfloat16}
    assert torch.equal(model.blocks[0].inner.up.weight.grad, gradient.bfloat16())
    assert model(x.bfloat16(), None).dtype == torch.bfloat16
    model.close()


@pytest.mark.gpu
def test_gpu_moving() -> None:
    model = StreamedModel([Normal(0.0), Normal(0.0)], "host").eval()
    x = torch.randn(2, 3, WIDTH)
    expected = model(x, None)
    result = model.cuda()(x, None)
    assert result.device.type == "cuda"
    torch.testing.assert_close(result.cpu(), expected)
    assert torch.equal(model.cpu()(x, None), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True])
def test_gpu_forward_does_not_wait_for_the_device(
    training: bool, no_host_waits: Callable[[], None]
) -> None:
    model = StreamedModel([Normal() for _ in range(6)], "cuda").train(training)
    x = torch.randn(2, 3, WIDTH, device="cuda")
    model(x, None)
    torch.cuda.synchronize()
    no_host_waits()
    torch.cuda._sleep(int(2e9))
    for _ in range(3):
        model(x, None)
    assert not torch.cuda.current_stream().query()


@pytest.mark.gpu
def test_gpu_steady_steps_map_and_lock_nothing() -> None:
    from ts_core import pinned_stats

    model = StreamedModel([Normal() for _ in range(4)], "cuda")
    counts = []
    for _ in range(5):
        model(torch.randn(2, 3, WIDTH, device="cuda"), None).sum().backward()
        model.zero_grad()
        counts.append(pinned_stats()["host_alloc_calls"])
    assert len(set(counts[1:])) == 1
    reserved = torch.cuda.memory_reserved()
    model(torch.randn(2, 3, WIDTH, device="cuda"), None).sum().backward()
    assert torch.cuda.memory_reserved() == reserved
    model.close()
