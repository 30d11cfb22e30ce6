"""What "auto" does with activations while blocks are replayed: kept or recomputed, seldom paged."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from ts_core import ActivationOffloader, memory_report, wrap
from ts_core.device import HostDevice
from ts_core.engine.replay.host_recorder import HostRecorder
from ts_core.schedule.activation_policy import ActivationLimits, extra_device_bytes
from ts_core.testing import TinyModel, TrainingRecord, tiny_model, train

DEPTH = 6
BASE = 1000
STEPS = 12


class Accelerator(HostDevice):
    """Host memory in the role of a GPU's, filled as the policy in force is counted to fill it."""

    separate_memory = True

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.activations: Any = None
        self.longest = 0  # steps until nothing changed any more

    def usable_bytes(self) -> int | None:
        return self.limit

    def memory(self) -> dict[str, int]:
        peak = BASE
        if self.activations is not None:
            limits = ActivationLimits(None, 0, inflight=1)
            policy = self.activations.policy
            peak += extra_device_bytes(self.activations.measured, policy, limits)
        return {"allocated": 0, "reserved": 0, "peak_allocated": peak}


POOL = 64


def saved() -> int:
    """Bytes that one block of the tiny model saves."""
    model = tiny_model(DEPTH, dropout=0.1)
    offloader = ActivationOffloader(model, list(model.layers), False, recompute=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    train(model, torch.optim.AdamW(trained, lr=1e-2), 2)
    return offloader.block_bytes[1]


def run(
    monkeypatch: pytest.MonkeyPatch, graphs: bool, room: float, **options: Any
) -> tuple[TinyModel, TrainingRecord, list[set[str]]]:
    """Train on a device with room for `room` blocks' activations; also the modes of each step."""
    device = Accelerator(int(BASE + room * saved()))
    monkeypatch.setattr("ts_core.engine.wrapping._device_for", lambda *_: device)
    monkeypatch.setattr(
        HostRecorder, "pool_bytes", lambda _: POOL
    )  # a tape keeps all, a pool little
    model = tiny_model(DEPTH, dropout=0.1)
    trained = [p for p in model.parameters() if p.requires_grad]
    model, optimizer = wrap(
        model,
        torch.optim.AdamW(trained, lr=1e-2),
        quantize="none",
        param_offload=False,
        check_memory=False,
        min_offload_bytes=0,
        max_inflight_bytes=1,
        vram_headroom=0.0,
        attention=None,  # which looks for a call to time, and this model makes none
        offload=True,
        cuda_graphs=graphs,
        **options,
    )
    session = model._trainstream_session
    device.activations = session.activations
    modes: list[set[str]] = []

    def note(*_: Any) -> None:
        modes.append(set(session.activations.policy))
        device.longest += session.adapting

    handle = model.register_forward_hook(note)
    record = train(model, optimizer, STEPS)
    optimizer.synchronize()
    handle.remove()
    return model, record, modes


def test_nothing_is_paged_and_it_settles_soon(
    monkeypatch: pytest.MonkeyPatch, recorders: list[HostRecorder]
) -> None:
    """Room for four blocks, of which recordings take two: more would be kept or paged without."""
    _, eager, paged = run(monkeypatch, False, 4.0)
    assert any("offload" in modes for modes in paged)
    model, replayed, found = run(monkeypatch, True, 4.0)
    assert eager.differences(replayed) == []
    assert all("offload" not in modes for modes in found)
    report = memory_report(model)
    policy = report["activations"]["policy"]
    assert 2 <= policy.count("keep") <= 3 and policy.count("recompute") == DEPTH - policy.count(
        "keep"
    )
    session = model._trainstream_session
    assert session.device.longest <= 4  # the measured step, two that show the peak, a correction
    assert report["replay"]["recorded"] >= DEPTH and report["replay"]["eager"] == {}
    assert report["replay"]["replayed_backwards"] >= DEPTH * (STEPS - 6)


def test_where_every_block_fits_recording_begins_at_once(
    monkeypatch: pytest.MonkeyPatch, recorders: list[HostRecorder]
) -> None:
    model, _, modes = run(monkeypatch, True, 40.0)
    assert [set(m) for m in modes[1:]] == [{"keep"}] * (STEPS - 1)
    session = model._trainstream_session
    assert session.device.longest == 1  # the measured step
    report = memory_report(model)
    found, replay = report["plan"]["recordings"], report["replay"]
    assert found["measured"] == replay["scratch_bytes"] + replay["pool_bytes"] > 0
    gradients = sum(p.nbytes for p in model.layers[0].parameters() if p.requires_grad)
    assert found["predicted"] == 2 * (max(report["activations"]["block_bytes"]) + gradients) > 0
    # The second step is the first that keeps them, the third is watched.
    assert memory_report(model)["replay"]["replayed_forwards"] == DEPTH * (STEPS - 3)


def test_a_larger_input_drops_recordings_and_makes_new_ones(
    monkeypatch: pytest.MonkeyPatch, recorders: list[HostRecorder]
) -> None:
    """What smaller ones hold would be in its way, and count as a need of every step."""
    runs = []
    for graphs in (False, True):
        model, record, _ = run(monkeypatch, graphs, 40.0)
        optimizer = model._trainstream_session.optimizer
        replay = model._trainstream_session.replay
        held: list[int] = []
        handle = model.layers[0].register_forward_pre_hook(
            lambda *_, replay=replay, held=held: held.append(
                0 if replay is None else replay.size_bytes()
            )
        )
        longer = train(model, optimizer, 6, length=19)
        handle.remove()
        runs.append((record, longer))
    assert runs[0][0].differences(runs[1][0]) == []
    assert runs[0][1].differences(runs[1][1]) == []
    report = memory_report(model)["replay"]
    assert report["dropped"] == DEPTH and report["recorded"] == 2 * DEPTH
    assert held[0] == POOL < held[-1]


@pytest.mark.parametrize(
    "options", [{"recompute": False}, {"activation_offload": 0.5}, {"activation_offload": True}]
)
def test_what_was_asked_for_is_paged(
    monkeypatch: pytest.MonkeyPatch, recorders: list[HostRecorder], options: dict[str, Any]
) -> None:
    """Pages that an option names, or that are the only way to make room."""
    plain, eager, _ = run(monkeypatch, False, 4.0, **options)
    assert memory_report(plain)["plan"]["recordings"] is None
    model, replayed, _ = run(monkeypatch, True, 4.0, **options)
    assert eager.differences(replayed) == []
    assert memory_report(model)["activations"]["offloaded_blocks"]


def test_what_is_kept_may_use_half_of_the_headroom(
    monkeypatch: pytest.MonkeyPatch, recorders: list[HostRecorder]
) -> None:
    """It is there at a step's peak, recorded or not, so a few bytes over the plan's target are no
    reason to run blocks eagerly; the other half stays for what nobody counts."""
    model, _, _ = run(monkeypatch, True, 40.0)
    session = model._trainstream_session
    limit = session.device.limit
    session.config = dataclasses.replace(session.config, vram_headroom=0.2)
    assert session.replay._keeper._room_bytes() == int(limit * 0.9) - POOL
