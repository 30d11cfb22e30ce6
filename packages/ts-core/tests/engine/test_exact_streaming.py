"""The exact tier: a streamed run equals a resident run bit for bit, with delays injected."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from ts_core import memory_report, unwrap, wrap
from ts_core.testing import TinyModel, TrainingRecord, inject_delays, tiny_model, train
from ts_core.transfer import edges

STEPS = 10


def run(
    param_offload: Any,
    *,
    steps: int = STEPS,
    accumulation: int = 2,
    delays: int | None = None,
    slots: int | None = None,
    call: Any = None,
    device: str = "host",
    **model_options: Any,
) -> tuple[TinyModel, TrainingRecord]:
    model = tiny_model(dropout=0.1, **model_options)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = wrap(
        model,
        torch.optim.AdamW(trained, lr=1e-2),
        param_offload=param_offload,
        accumulation_steps=accumulation,
        quantize="none",
        offload=True,
        device=device,
    )
    where = "cpu" if device == "host" else device
    pauses = contextlib.nullcontext() if delays is None else inject_delays(delays)
    with pauses as plan:
        record = train(model, optimizer, steps, accumulation=accumulation, call=call, device=where)
    assert plan is None or plan.pauses > 0
    return model, record


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("param_offload", [True, 0.5, [0, 3]])
def test_streamed_equals_resident(param_offload: Any, dtype: torch.dtype) -> None:
    _, resident = run(False, dtype=dtype)
    model, streamed = run(param_offload, dtype=dtype, delays=7)
    assert resident.differences(streamed) == []
    params = memory_report(model)["params"]
    wanted = {True: 5, 0.5: 3}.get(param_offload, 2) if not isinstance(param_offload, list) else 2
    assert len(params["paged_blocks"]) == wanted
    assert params["loads"] >= wanted


def test_forward_and_backward_load_each_block_once_but_the_last() -> None:
    """Over n paged blocks and 2 slots a pass copies n + (n - 2) blocks, none of them on demand."""
    for steps in (1, 4):
        model, _ = run(True, steps=steps, accumulation=1)
        params = memory_report(model)["params"]
        assert params["loads"] == steps * (2 * 5 - 2)
        assert params["demand_loads"] == 0


def test_missing_wait_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The delay injection has teeth: without the waits the numbers are wrong."""
    _, resident = run(False, steps=3)
    monkeypatch.setattr(edges, "wait", lambda device, stream, event: None)
    _, broken = run(True, steps=3, delays=7)
    assert resident.differences(broken) != []


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_under_activation_checkpointing(use_reentrant: bool) -> None:
    def call(model: TinyModel, tokens: torch.Tensor) -> torch.Tensor:
        hidden = model.embed(tokens)
        hidden.requires_grad_(True)
        for layer in model.layers:
            hidden = checkpoint(layer, hidden, use_reentrant=use_reentrant)
        logits = model.head(model.norm(hidden)).float()
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        )

    _, resident = run(False, steps=4)
    _, streamed = run(True, steps=4, call=call, delays=11)
    assert resident.differences(streamed) == []


def test_checkpointing_still_saves_memory_inside_paged_blocks() -> None:
    """The block's saved-tensor hooks pass activations on to the hooks outside."""
    model, _ = run(True, steps=1)
    hidden = torch.randn(2, 7, 16, requires_grad=True)
    seen: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.layers[0](hidden)
    assert any(tensor.shape == (2, 7, 32) for tensor in seen)
    slots = {
        s.buffer.untyped_storage().data_ptr() for s in model._trainstream_session.pager.ring.slots
    }
    assert not any(tensor.untyped_storage().data_ptr() in slots for tensor in seen)


def test_module_called_twice_and_out_of_order() -> None:
    def call(model: TinyModel, tokens: torch.Tensor) -> torch.Tensor:
        hidden = model.embed(tokens)
        for index in (0, 2, 1, 4, 3, 0, 0):
            hidden = model.layers[index](hidden)
        logits = model.head(model.norm(hidden)).float()
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        )

    _, resident = run(False, steps=4, call=call)
    _, streamed = run(True, steps=4, call=call, delays=13)
    assert resident.differences(streamed) == []


def test_evaluation_between_steps_and_after_an_exception() -> None:
    records = []
    for param_offload in (False, True):
        model, _ = run(param_offload, steps=2)
        optimizer = model._trainstream_session.optimizer
        tokens = torch.randint(0, 37, (2, 7), generator=torch.Generator().manual_seed(5))
        with torch.no_grad():
            before = [model(tokens) for _ in range(3)] if not model.eval() else None
        model.eval()
        with torch.no_grad():
            before = [model(tokens) for _ in range(3)]
        assert torch.equal(before[0], before[1]) and torch.equal(before[0], before[2])
        model.train()

        def explode(*_: Any) -> None:
            raise RuntimeError("in the middle of a forward")

        handle = model.layers[2].down.register_forward_hook(explode)
        with pytest.raises(RuntimeError, match="in the middle"):
            model(tokens)
        handle.remove()

        def explode_back(grad: torch.Tensor) -> None:
            raise RuntimeError("in the middle of a backward")

        hidden_hook = model.layers[2].register_forward_hook(
            lambda module, args, output: output.register_hook(explode_back) and None
        )
        with pytest.raises(RuntimeError, match="in the middle"):
            model(tokens).backward()
        hidden_hook.remove()
        optimizer.zero_grad()
        record = train(model, optimizer, 2, accumulation=2, seed=9)
        record.losses.append(before[0])
        records.append(record)
    # The broken backward may have updated whole tensors eagerly in the last blocks: same in both.
    assert records[0].differences(records[1]) == []


def test_two_models_in_one_process() -> None:
    _, resident = run(False, steps=2)
    first, _ = run(True, steps=1)
    _, second = run(True, steps=2)
    assert resident.differences(second) == []
    assert first._trainstream_session is not None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("param_offload", [True, 0.5, [0, 3]])
def test_streamed_equals_resident_on_the_gpu(param_offload: Any, dtype: torch.dtype) -> None:
    _, resident = run(False, dtype=dtype, device="cuda", width=128)
    _, streamed = run(param_offload, dtype=dtype, delays=7, device="cuda", width=128)
    assert resident.differences(streamed) == []


@pytest.mark.gpu
def test_auto_moves_optimizer_state_to_the_device_and_resumes_there() -> None:
    """offload="auto": after two updates torch's fused AdamW; a resumed run goes on with it."""
    records = []
    for parts in ((6,), (3, 3)):
        model = tiny_model(width=128)
        state = None
        for number, steps in enumerate(parts):
            model, optimizer = wrap(model, lr=1e-2, quantize="none", device="cuda")
            if state is not None:
                optimizer.load_state_dict(state)
                assert optimizer.resident
            record = train(model, optimizer, steps, device="cuda", seed=number + len(parts))
            assert optimizer.resident
            state = copy.deepcopy(optimizer.state_dict())
            events = model._trainstream_session.events
            assert any("moved to the device" in line for line in events)
            assert memory_report(model)["optimizer"]["host_state_bytes"] == 0
            unwrap(model)
        records.append(record)
    assert len(records) == 2
    reference = tiny_model(width=128).cuda()
    stock = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], lr=1e-2)
    expected = train(reference, stock, 6, device="cuda", seed=1)
    for name, value in records[0].trained.items():
        assert (value - expected.trained[name]).abs().max() < 1e-5
