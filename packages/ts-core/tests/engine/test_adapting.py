"""Blocks change place between steps, by what steps used, and no bit of any result changes."""

from __future__ import annotations

import contextlib
import gc
import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from ts_core import memory_report, unwrap, wrap
from ts_core.device import resolve_device
from ts_core.device.limits import kept_by_graphs
from ts_core.engine import wrapping
from ts_core.engine.placement import block_leaves, model_profile
from ts_core.errors import OutOfBudgetError, StateError
from ts_core.schedule.activation_policy import BlockActivations
from ts_core.schedule.rates import TYPICAL_GPU, HardwareProfile
from ts_core.store import placing
from ts_core.testing import TinyModel, TrainingRecord, inject_delays, tiny_model, train

DEPTH = 6
Needs = Callable[[int], float]


def block_bytes(model: TinyModel) -> int:
    return model_profile(model, block_leaves(model, list(model.layers))).pageable[0]


def start(
    monkeypatch: pytest.MonkeyPatch,
    needs: Needs,
    room: float = 8.0,
    expected: float = 0.0,
    full: bool = False,
    **options: Any,
) -> tuple[TinyModel, Any]:
    """A wrapped model on a device of `room` blocks, whose steps seem to need `needs(step)` more.

    Args:
        expected: what the first plan reserves, in blocks.
    """
    model = tiny_model(depth=DEPTH, dropout=0.1, full=full)
    size = block_bytes(model)
    real = wrapping.plan_options
    monkeypatch.setattr(
        wrapping, "plan_options", lambda config: replace(real(config), reserve=int(expected * size))
    )
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = wrap(
        model,
        torch.optim.AdamW(trained, lr=1e-2),
        device="host",
        quantize="none",
        vram_limit=int(room * size),
        vram_headroom=0.0,
        **options,
    )
    session = model._trainstream_session

    def memory() -> dict[str, int]:
        used = session.device.pool.used + int(needs(session.steps) * size)
        return {"allocated": used, "reserved": used, "peak_allocated": used}

    monkeypatch.setattr(session.device, "memory", memory)
    return model, optimizer


def resident(
    steps: int, accumulation: int = 1, full: bool = False, **options: Any
) -> TrainingRecord:
    model = tiny_model(depth=DEPTH, dropout=0.1, full=full)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = wrap(
        model,
        torch.optim.AdamW(trained, lr=1e-2),
        device="host",
        param_offload=False,
        accumulation_steps=accumulation,
        **options,
    )
    return train(model, optimizer, steps, accumulation=accumulation)


def paged(model: TinyModel) -> int:
    report = memory_report(model)
    session = model._trainstream_session
    names = [] if session.pager is None else sorted(session.pager.images)
    assert names == report["params"]["paged_blocks"]  # what is said is what is done
    held = session.device.pool.by_tag()
    expected = session.plan.predicted
    assert held.get("slots", 0) == expected["slots"]
    assert held.get("resident blocks", 0) == expected["resident_blocks"]
    return len(names)


@pytest.mark.parametrize("full", [False, True])
def test_what_streamed_leaves_no_memory_behind(monkeypatch: pytest.MonkeyPatch, full: bool) -> None:
    """Slots and host images go when the last block returns, not when Python collects garbage."""
    gc.collect()
    gc.disable()
    try:
        model, optimizer = start(monkeypatch, lambda step: 1.5, expected=4.5, full=full)
        pager = model._trainstream_session.pager
        storages = [slot.buffer.untyped_storage() for slot in pager.ring.slots]
        images = [weakref.ref(image) for image in pager.images.values()]
        ring = weakref.ref(pager)
        assert len(storages) == 2 and len(images) == 5
        del pager
        train(model, optimizer, 8)
        optimizer.synchronize()
        assert paged(model) == 0
        # One user is this list.
        assert [torch._C._storage_Use_Count(s._cdata) for s in storages] == [1] * len(storages)
        assert [image() for image in images] == [None] * 5 and ring() is None
    finally:
        gc.enable()


def test_blocks_return_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = start(monkeypatch, lambda step: 1.5, expected=4.5)
    session = model._trainstream_session
    assert paged(model) == 5 and session.adapting
    with inject_delays(3, max_ms=1.0) as plan:
        record = train(model, optimizer, 8)
    assert plan.pauses > 0
    assert resident(8).differences(record) == []
    assert paged(model) == 0 and not session.adapting
    assert session.pager is None  # nothing is left on the hot path
    for layer in model.layers:
        assert not layer._forward_hooks and not layer._forward_pre_hooks
        assert "forward" not in layer.__dict__
    report = memory_report(model)["plan"]
    assert report["settled"] and report["target_vram"] == session.config.vram_limit_bytes
    assert any("5 blocks stay on the device" in entry["change"] for entry in report["history"])
    assert any("settled after" in event for event in session.events)
    assert report["measured"]["beside_blocks_and_slots"] == pytest.approx(
        1.5 * block_bytes(tiny_model(depth=DEPTH)), rel=1e-3
    )


def test_some_blocks_return(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = start(monkeypatch, lambda step: 3.5, expected=5.5)
    assert paged(model) == 6
    with inject_delays(3, max_ms=1.0):
        record = train(model, optimizer, 6)
    assert paged(model) == 4
    assert resident(6).differences(record) == []


def test_a_longer_batch_later_pages_blocks_of_a_resident_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = start(monkeypatch, lambda step: 0.5 if step < 4 else 4.5)
    session = model._trainstream_session
    assert paged(model) == 0 and session.pager is None
    with inject_delays(5, max_ms=1.0):
        record = train(model, optimizer, 9)
    assert resident(9).differences(record) == []
    assert paged(model) == 5 and not session.adapting
    assert any("5 more blocks stream, 5 of 6 stream now" in event for event in session.events)
    unwrap(model)
    assert all(p.device.type == "cpu" for p in model.parameters())
    assert session.device.pool.used == 0


@pytest.mark.parametrize("seed", range(3))
def test_any_course_of_needs_changes_no_bit(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    draw = random.Random(seed)
    needs = [draw.uniform(0.0, 6.5) for _ in range(40)]
    model, optimizer = start(
        monkeypatch,
        lambda step: needs[step],
        expected=draw.choice([0.5, 3.5, 5.5]),
        accumulation_steps=2,
    )
    corrector = model._trainstream_session.adapter.corrector
    monkeypatch.setattr(corrector, "_most_needed", 0)

    def forget(*arguments: Any, real: Any = corrector.observe) -> Any:
        corrector._most_needed = 0  # so that blocks go both ways, again and again
        corrector._returns = 0
        return real(*arguments)

    monkeypatch.setattr(corrector, "observe", forget)
    with inject_delays(seed, max_ms=1.0):
        record = train(model, optimizer, 8, accumulation=2)
    moves = [entry.change for entry in corrector.history if entry.change]
    assert len(moves) >= 3
    assert resident(8, accumulation=2).differences(record) == []
    theirs = tiny_model(depth=DEPTH, dropout=0.1).state_dict()
    for name, value in model.state_dict().items():
        assert "lora" in name or torch.equal(value, theirs[name]), name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_grad_norm": 0.5},
        {"optimizer_mode": "gpu"},
        {"moment_dtype": "bfloat16", "eager": False},
    ],
)
def test_trained_blocks_move_with_their_state(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    needs = [1.5, 1.5, 1.5, 1.5, 5.5, 5.5, 5.5, 5.5]
    model, optimizer = start(
        monkeypatch, lambda step: needs[step], full=True, expected=4.5, **options
    )
    assert paged(model) == 5
    with inject_delays(9, max_ms=1.0):
        record = train(model, optimizer, 7)
    assert resident(7, full=True, **options).differences(record) == []
    assert paged(model) == 6
    changes = [e.change for e in model._trainstream_session.adapter.corrector.history if e.change]
    assert "5 blocks stay" in changes[0] and "6 more blocks stream" in changes[1]


def slow_and_fast_links() -> list[HardwareProfile]:
    return [replace(TYPICAL_GPU, h2d=rate, d2h=rate, duplex=2 * rate) for rate in (1e3, 1e18)]


@pytest.mark.parametrize("link", ["slow", "fast", "not known"])
def test_known_activations_share_the_room_with_blocks(
    monkeypatch: pytest.MonkeyPatch, link: str
) -> None:
    model, optimizer = start(monkeypatch, lambda step: 0.0)
    session = model._trainstream_session
    size = block_bytes(model)
    adapter = session.adapter
    corrector = adapter.corrector
    corrector._options = replace(corrector._options, reserve=None, activation_offload=False)
    rates = dict(zip(("slow", "fast"), slow_and_fast_links(), strict=True)).get(link)
    corrector._machine = replace(corrector._machine, rates=rates)
    for index in ("first", "second"):  # stream four of the six blocks
        monkeypatch.setattr(
            session.device,
            "memory",
            lambda: {"peak_allocated": session.device.pool.used + int(3.5 * size)},
        )
        train(model, optimizer, 1, seed=len(index))
    assert paged(model) == 4
    # A step that recomputes everything needs 1.6 blocks beside the four in place, of eight.
    measured = [BlockActivations(int(0.9 * size), 0, int(0.1 * size))] * DEPTH
    room = -size if link == "not known" else int(2.4 * size)
    taken = adapter.share_room(measured, room)
    if link == "slow":  # streaming bounds the step: 6 blocks and 1.6 fit in 8
        assert taken == 2 * size and paged(model) == 0
        assert any("activations are known: 4 blocks stay" in event for event in session.events)
    elif link == "fast":  # it has time for all, so that more activations stay
        assert taken == -2 * size and paged(model) == 6
        assert any("activations are known: 2 more blocks" in event for event in session.events)
    else:  # not even a step that recomputes everything fits: a block leaves
        assert taken == -size and paged(model) == 5
    monkeypatch.setattr(
        session.device, "memory", lambda: {"peak_allocated": session.device.pool.used}
    )
    train(model, optimizer, 2)


def test_writes_between_steps_move_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    records = []
    for needs in (lambda step: 0.5, lambda step: 0.5 if step != 1 else 5.5):
        with monkeypatch.context() as patch:
            model, optimizer = start(patch, needs)
            train(model, optimizer, 1)
            with torch.no_grad():
                for layer in model.layers:
                    layer.up.weight.mul_(1.5)
            first = train(model, optimizer, 1)  # the blocks leave before this
            model.layers[3].mix.data.add_(0.25)
            records.append((first, train(model, optimizer, 2)))
            assert (paged(model) > 0) == (len(records) == 2)
    for plain, moved in zip(*records, strict=True):
        assert plain.differences(moved) == []


def test_evaluation_and_accumulation_do_not_move_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = start(monkeypatch, lambda step: 5.5, accumulation_steps=2)
    tokens = torch.randint(0, 37, (2, 7))
    for _ in range(3):
        with torch.no_grad():
            model(tokens)
    model(tokens).backward()
    model(tokens).backward()
    assert paged(model) == 0
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(tokens)
    assert paged(model) == 0
    model(tokens).backward()
    assert paged(model) == 6


def test_when_moving_fails_blocks_stay_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = start(monkeypatch, lambda step: 4.5)
    session = model._trainstream_session
    made = []
    real = placing.filled_image

    def no_memory(index: int, *arguments: Any) -> Any:
        if len(made) == 2:
            raise OutOfBudgetError("no host memory")
        made.append(index)
        return real(index, *arguments)

    monkeypatch.setattr(placing, "filled_image", no_memory)
    record = train(model, optimizer, 4)
    assert resident(4).differences(record) == []
    assert paged(model) == 0 and not session.adapting
    assert any("blocks stay where they are" in event for event in session.events)


def test_backward_through_a_forward_from_before_a_move_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, optimizer = start(monkeypatch, lambda step: 0.5, expected=4.5)
    tokens = torch.randint(0, 37, (2, 7))
    model(tokens).backward()
    old = model(tokens)
    optimizer.step()
    optimizer.zero_grad()
    loss = model(tokens)
    with pytest.raises(StateError, match=r"changed place|unwrapped after"):
        old.backward()
    with contextlib.suppress(StateError):
        loss.backward()
    optimizer.zero_grad()
    model(tokens).backward()
    optimizer.step()


@pytest.mark.parametrize("asked", [True, [1, 2], False])
def test_what_was_asked_for_stays(monkeypatch: pytest.MonkeyPatch, asked: Any) -> None:
    model, optimizer = start(monkeypatch, lambda step: 0.1, param_offload=asked, room=9.0)
    before = paged(model)
    train(model, optimizer, 3)
    assert paged(model) == before and not model._trainstream_session.adapting


@pytest.mark.gpu
def test_on_a_gpu_blocks_return_and_a_longer_batch_pages_more() -> None:
    gc.collect()
    resolve_device("cuda").take_workspaces()
    before = torch.cuda.memory_allocated()

    def run(limit: int | None) -> tuple[TinyModel, list[torch.Tensor]]:
        torch.manual_seed(0)
        model = tiny_model(depth=12, width=1024)
        trained = [p for p in model.parameters() if p.requires_grad]
        options: dict[str, Any] = {"cuda_graphs": False}  # recordings would want room, too
        if limit is not None:
            options.update(vram_limit=limit, vram_headroom=0.4)
        model, optimizer = wrap(
            model, torch.optim.AdamW(trained, lr=1e-3), device="cuda", offload=True, **options
        )
        generator = torch.Generator().manual_seed(1)
        losses = []
        for step in range(60):  # trials of more slots take four steps each
            length = 4 if step < 5 else 64
            tokens = torch.randint(0, 37, (8, length), generator=generator).cuda()
            loss = model(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())
        return model, losses

    plain_model, plain = run(None)
    assert memory_report(plain_model)["params"]["paged_blocks"] == []
    unwrap(plain_model)
    del plain_model
    torch.cuda.empty_cache()
    beside = kept_by_graphs(torch.cuda.current_device())  # of other tests: no room of this one
    model, losses = run(int((before + (272 << 20)) / 0.6) + beside)
    session = model._trainstream_session
    assert all(torch.equal(a, b) for a, b in zip(plain, losses, strict=True))
    changes = [entry.change for entry in session.adapter.corrector.history if entry.change]
    assert len(changes) >= 2, changes
    assert "blocks stay on the device" in changes[0] and "more blocks stream" in changes[1]
    assert torch.cuda.max_memory_allocated() <= session.adapter.corrector.target
    assert not session.adapting, session.events
    unwrap(model)
