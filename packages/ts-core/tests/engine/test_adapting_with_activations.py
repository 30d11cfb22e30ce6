"""Blocks and activations share the room of a device that seems to have memory of its own."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from ts_core import memory_report, unwrap, wrap
from ts_core.device import HostDevice
from ts_core.engine import planning, residence, wrapping
from ts_core.engine.placement import block_leaves, model_profile
from ts_core.optim.resident import device_bytes_needed
from ts_core.schedule import MachineProfile, ModelProfile, PlanOptions
from ts_core.schedule.activation_policy import ActivationLimits, extra_device_bytes
from ts_core.schedule.rates import TYPICAL_GPU, HardwareProfile
from ts_core.testing import TinyModel, TrainingRecord, inject_delays, tiny_model, train

DEPTH = 6
TOKENS = (2, 7)


class OtherMemory(HostDevice):
    """The host device as if it had memory of its own, which a step fills as it would a GPU's."""

    separate_memory = True
    session: Any = None
    first = 0  # blocks paged at first
    other = 0  # bytes of everything but blocks, slots and activations

    def memory(self) -> dict[str, int]:
        peak = self.pool.used + self.other
        activations = None if self.session is None else self.session.activations
        if activations is not None and any(activations.block_bytes):
            measured = activations.measured
            peak += sum(block.boundary for block in measured)
            peak += max(block.saved for block in measured)
            limits = ActivationLimits(None, 0, 1, 1 << 30)
            peak += extra_device_bytes(measured, activations.policy, limits)
        return {"allocated": self.pool.used, "reserved": self.pool.used, "peak_allocated": peak}


def run(
    monkeypatch: pytest.MonkeyPatch,
    rates: HardwareProfile,
    room: float,
    steps: int,
    dtype: torch.dtype = torch.float32,
    full: bool = False,
    accumulation: int = 1,
    call: Any = None,
    **options: Any,
) -> tuple[TinyModel, TrainingRecord, OtherMemory]:
    model = tiny_model(depth=DEPTH, dropout=0.1, dtype=dtype, full=full)
    profile = model_profile(model, block_leaves(model, list(model.layers)), 8.0, 1 << 20)
    size = profile.pageable[0]
    device = OtherMemory()
    device.other = profile.fixed_device + profile.trained
    monkeypatch.setattr(wrapping, "_device_for", lambda model, config: device)
    monkeypatch.setattr(planning, "TYPICAL_GPU", rates)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = wrap(
        model,
        torch.optim.AdamW(trained, lr=1e-2),
        quantize="none",
        profile=False,
        host_arena=False,
        max_inflight_bytes=1 << 20,
        min_offload_bytes=1 << 9,
        vram_headroom=0.0,
        vram_limit=int(room * size + device.other),
        accumulation_steps=accumulation,
        **options,
    )
    device.session = model._trainstream_session
    device.first = len(device.session.plan.paged)
    with inject_delays(3, max_ms=0.5):
        record = train(model, optimizer, steps, accumulation=accumulation, call=call)
    return model, record, device


def train_until_decided(model: TinyModel) -> None:
    """Steps until it is decided where state lives (blocks, activations and slots are tried)."""
    optimizer = model._trainstream_session.optimizer
    for _ in range(200):
        if optimizer.after_step is None:
            return
        train(model, optimizer, 1)


@pytest.fixture(scope="module")
def plain() -> TrainingRecord:
    model = tiny_model(depth=DEPTH, dropout=0.1)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = wrap(
        model, torch.optim.AdamW(trained, lr=1e-2), device="host", param_offload=False
    )
    return train(model, optimizer, 9)


@pytest.mark.parametrize("rate", [1e3, 1e18])
@pytest.mark.parametrize("room", [6.0, 8.0, 40.0])
def test_it_settles_within_the_target_and_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, plain: TrainingRecord, rate: float, room: float
) -> None:
    rates = replace(TYPICAL_GPU, h2d=rate, d2h=rate, duplex=2 * rate)
    model, record, device = run(monkeypatch, rates, room, 9, offload=True)
    assert plain.differences(record) == []
    report = memory_report(model)
    assert device.memory()["peak_allocated"] <= report["plan"]["target_vram"]
    if room == 40.0:  # everything fits
        assert report["params"]["paged_blocks"] == []
        assert set(report["activations"]["policy"]) == {"keep"}
    if rate == 1e3 and room < 40.0:  # streaming bounds the step: blocks before activations
        assert len(report["params"]["paged_blocks"]) < device.first
        assert any("activations are known" in event for event in report["events"])


@pytest.mark.parametrize(
    ("streaming", "room", "policy"),
    [(0.5, 8.5, "krrrkk"), (False, 10.0, "rrkrrk")],
)
def test_beside_blocks_that_stream_those_at_the_ends_are_not_recomputed(
    monkeypatch: pytest.MonkeyPatch,
    plain: TrainingRecord,
    streaming: float | bool,
    room: float,
    policy: str,
) -> None:
    asked = {"param_offload": streaming, "activation_offload": False, "offload": True}
    model, record, _ = run(monkeypatch, TYPICAL_GPU, room, 9, **asked)
    report = memory_report(model)
    assert "".join(word[0] for word in report["activations"]["policy"]) == policy
    assert len(report["params"]["paged_blocks"]) == (3 if streaming else 0)
    assert plain.differences(record) == []


@pytest.mark.parametrize("full", [False, True])
def test_while_gradients_are_accumulated_trained_weights_keep_their_place(
    monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """Activations are known after the first of a step's passes; blocks move when it has ended."""
    rates = replace(TYPICAL_GPU, h2d=1e3, d2h=1e3, duplex=2e3)
    given: dict[str, Any] = {"full": full, "accumulation": 3, "offload": True}
    model, record, device = run(monkeypatch, rates, 8.0, 6, **given)
    report = memory_report(model)
    assert len(report["params"]["paged_blocks"]) < device.first
    assert any("activations are known" in event for event in report["events"])
    _, kept, _ = run(monkeypatch, rates, 200.0, 6, param_offload=False, recompute=False, **given)
    assert kept.differences(record) == []


@pytest.mark.parametrize("full", [False, True])
def test_blocks_keep_their_place_between_two_forwards_and_their_backward(
    monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """Activations are known after the first of them, and the second's input is larger."""
    rates = replace(TYPICAL_GPU, h2d=1e3, d2h=1e3, duplex=2e3)
    calls = itertools.count()

    def both(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        longer = torch.cat([tokens] * (1 + next(calls)), 1)
        return model(tokens) + model(longer)  # type: ignore[no-any-return]

    given: dict[str, Any] = {"full": full, "offload": True, "call": both}
    model, record, _ = run(monkeypatch, rates, 8.0, 6, **given)
    events = memory_report(model)["events"]
    moves = [event for event in events if event.startswith("plan: activations are known")]
    assert len(moves) > 1
    calls = itertools.count()
    _, kept, _ = run(monkeypatch, rates, 2e4, 6, param_offload=False, recompute=False, **given)
    assert kept.differences(record) == []


@pytest.mark.parametrize(("share", "said"), [(0.1, "from the first step"), (0.0, "from here on")])
def test_when_everything_fits_the_device_optimizes_and_nothing_is_left_in_the_way(
    monkeypatch: pytest.MonkeyPatch, share: float, said: str
) -> None:
    monkeypatch.setattr(residence, "SMALL_SHARE", share)
    model, _, _ = run(monkeypatch, TYPICAL_GPU, 60.0, 9, attention=None)
    session = model._trainstream_session
    assert session.optimizer.resident, session.events
    assert any(f"torch's fused AdamW {said}" in event for event in session.events)
    assert session.pager is None and not session.adapting
    for block in model.layers:
        assert "forward" not in vars(block)
        assert not (block._forward_hooks or block._forward_pre_hooks or block._backward_hooks)
    with torch.no_grad():
        before = [p.detach().clone() for p in model.parameters()]
    train(model, session.optimizer, 1)
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert changed == [p.requires_grad for p in model.parameters()]


def test_in_low_precision_the_device_keeps_an_fp32_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _ = run(monkeypatch, TYPICAL_GPU, 60.0, 5, torch.bfloat16)
    optimizer = model._trainstream_session.optimizer
    assert optimizer.resident
    for entry in optimizer.state_dict()["state"].values():
        assert entry["master"].dtype is torch.float32 and entry["step"] == 5


@pytest.mark.parametrize("clip", [None, 0.05])
def test_adapters_are_optimized_on_the_device_while_the_base_streams(
    monkeypatch: pytest.MonkeyPatch, clip: float | None
) -> None:
    """Same bits as with a base that does not stream; only norms cross the link for it."""
    monkeypatch.setattr(residence, "SMALL_SHARE", 1.0)  # a tiny model's adapters are no small part
    kept, expected, _ = run(monkeypatch, TYPICAL_GPU, 60.0, 9, max_grad_norm=clip)
    model, record, _ = run(monkeypatch, TYPICAL_GPU, 60.0, 9, max_grad_norm=clip, param_offload=0.5)
    for wrapped in (kept, model):
        session = wrapped._trainstream_session
        assert session.optimizer.resident
        assert any("from the first step" in event for event in session.events)
        assert session.plan.host["optimizer_and_gradients"] == 0
        stats = memory_report(wrapped)["optimizer"]
        assert stats["host_state_bytes"] == 0
        assert stats["d2h_bytes"] == (0 if clip is None else 9 * 4)
    assert model._trainstream_session.plan.paged and not kept._trainstream_session.plan.paged
    assert expected.differences(record) == []


def test_with_a_streamed_base_a_measured_peak_decides_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residence, "SMALL_SHARE", 0.0)
    kept = {"activation_offload": False}
    for room, moved, said in ((60.0, True, "from here on"), (3.0, False, "it needs")):
        model, _, _ = run(
            monkeypatch, TYPICAL_GPU, room, 3, param_offload=True, recompute=False, **kept
        )
        session = model._trainstream_session
        train_until_decided(model)
        assert len(session.plan.paged) == DEPTH and session.optimizer.resident is moved
        assert any(said in e for e in session.events if e.startswith("offload")), session.events


def test_a_plan_without_room_for_the_state_leaves_it_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the state takes is counted before any of it is moved."""
    params = [torch.nn.Parameter(torch.zeros(100, 10))]
    profile = ModelProfile(pageable=(10_000,) * 8, fixed_device=1000, host_state=16_000)
    needed = device_bytes_needed(params)
    assert needed == 1000 * (8 + 4 + 4)

    def decide(device_bytes: int) -> tuple[int, bool, int]:
        machine = MachineProfile(device_bytes, 1 << 30)
        options = PlanOptions(headroom=0.0, activation_share=0.0)
        found, plan, moved = residence.plan_with_state(profile, machine, options, params)
        assert found.fixed_device == (1000 + needed - 4000 if moved else 1000)
        assert plan.host["optimizer_and_gradients"] == (0 if moved else 16_000)
        return len(plan.paged), moved, plan.predicted["total"]

    assert decide(400_000) == (0, True, 81_000 + needed)
    assert decide(159_000) == (0, False, 81_000)  # more than a tenth of the memory
    monkeypatch.setattr(residence, "SMALL_SHARE", 1.0)
    assert decide(81_000 + needed)[:2] == (0, True)
    assert decide(90_000) == (0, False, 81_000)  # more than one block would have to stream


@pytest.mark.parametrize(
    ("device_bytes", "update_seconds", "pushed", "moved"),
    [
        (92_000, 1e-6, 5, True),  # every block would fit: host threads would make steps longer
        (60_000, 6e-6, 3, True),  # five of eight stream, whatever the plan: in 5 microseconds
        (60_000, 4e-6, 3, False),  # host threads are done before
    ],
)
def test_state_pushes_blocks_out_where_host_threads_would_be_slower(
    monkeypatch: pytest.MonkeyPatch,
    device_bytes: int,
    update_seconds: float,
    pushed: int,
    moved: bool,
) -> None:
    monkeypatch.setattr(residence, "SMALL_SHARE", 1.0)
    params = [torch.nn.Parameter(torch.zeros(1500, 1))]
    rates = replace(TYPICAL_GPU, h2d=2e10, host_adamw=1500 / update_seconds)
    profile = ModelProfile((10_000,) * 8, 1000, host_state=24_000, trained_values=1500)
    machine = MachineProfile(device_bytes, 1 << 30, rates=rates)
    options = PlanOptions(headroom=0.0, activation_share=0.1)
    without = residence.plan_with_state(profile, machine, options, [])[1]
    _, plan, found = residence.plan_with_state(profile, machine, options, params)
    assert found is moved
    assert len(plan.paged) - len(without.paged) == (pushed if moved else 0)


def test_blocks_leave_before_a_much_larger_input_and_the_bits_stay(
    monkeypatch: pytest.MonkeyPatch, plain: TrainingRecord
) -> None:
    """They are back, or as many as then fit, once it has been measured."""
    model, record, device = run(monkeypatch, TYPICAL_GPU, 12.0, 9, offload=True, recompute="auto")
    assert plain.differences(record) == []
    session = model._trainstream_session
    before = len(session.plan.paged)
    seen: list[int] = []
    handle = model.layers[0].register_forward_hook(lambda *_: seen.append(len(session.plan.paged)))
    longer = train(model, session.optimizer, 6, length=24)
    handle.remove()
    assert any("while it is measured" in event for event in session.events)
    assert seen[0] > before
    assert device.memory()["peak_allocated"] <= session.adapter.corrector.target

    reference = tiny_model(depth=DEPTH, dropout=0.1)
    trained = [p for p in reference.parameters() if p.requires_grad]
    reference, optimizer = wrap(
        reference, torch.optim.AdamW(trained, lr=1e-2), device="host", param_offload=False
    )
    train(reference, optimizer, 9)
    assert train(reference, optimizer, 6, length=24).differences(longer) == []


def test_a_resumed_run_with_a_streamed_base_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"max_grad_norm": 0.1, "param_offload": 0.5}
    whole, _, _ = run(monkeypatch, TYPICAL_GPU, 60.0, 4, **options)
    resumed, _, _ = run(monkeypatch, TYPICAL_GPU, 60.0, 0, **options)
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    optimizer = resumed._trainstream_session.optimizer
    optimizer.load_state_dict(copy.deepcopy(whole._trainstream_session.optimizer.state_dict()))
    assert optimizer.resident and optimizer.updates == 4
    records = [train(m, m._trainstream_session.optimizer, 3, seed=5) for m in (whole, resumed)]
    assert records[0].differences(records[1]) == []
    again, same = wrap(unwrap(resumed), optimizer, quantize="none", profile=False, **options)
    assert same is optimizer and optimizer.resident
    records = [train(whole, whole._trainstream_session.optimizer, 3), train(again, optimizer, 3)]
    assert records[0].differences(records[1]) == []


def test_while_trained_blocks_stream_the_optimizer_stays_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(residence, "SMALL_SHARE", 0.0)
    model, _, _ = run(monkeypatch, TYPICAL_GPU, 5.0, 5, full=True)
    train_until_decided(model)
    session = model._trainstream_session
    assert session.plan.paged and not session.optimizer.resident
    why = [event for event in session.events if event.startswith("offload")]
    assert any("blocks stream with weights that are trained" in event for event in why), why
