"""What "auto" decides, on a device with memory of its own whose figures are made up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ts_core import ActivationOffloader, memory_report, wrap
from ts_core.device import HostDevice
from ts_core.engine import activation_memory as module
from ts_core.engine.activation_options import ActivationOptions
from ts_core.engine.activation_search import PolicySearch
from ts_core.errors import OptionError, StateError
from ts_core.schedule.activation_policy import (
    ActivationLimits,
    BlockActivations,
    extra_device_bytes,
)
from ts_core.testing import TinyModel, tiny_model, train
from ts_core.transfer import CopyEngine

DEPTH = 6


class Accelerator(HostDevice):
    """Host memory in the role of a GPU's: limit, peak and clock are what a test says.

    The peak is that of a step which recomputes everything, `base`, plus the share `shown` of what
    the policy in force is counted to hold beyond that.
    """

    separate_memory = True

    def __init__(self, limit: int = 10**9, base: int = 0) -> None:
        super().__init__()
        self.limit_now = limit
        self.base = base
        self.shown = 1.0
        self.held: Callable[[], int] = lambda: 0
        self.step_seconds: Callable[[], float] = lambda: 1.0
        self.clock = 0.0

    def usable_bytes(self) -> int | None:
        return self.limit_now

    def memory(self) -> dict[str, int]:
        peak = self.base + self.held()
        return {"allocated": 0, "reserved": 0, "peak_allocated": peak}

    def reset_peak(self) -> None:
        self.peaks += 1

    def timestamp(self) -> Any:
        self.clock += self.step_seconds()
        return Stamp(self.clock)


class Stamp:
    def __init__(self, at: float) -> None:
        self.at = at

    def seconds_since(self, earlier: Stamp) -> float | None:
        return self.at - earlier.at


def start(
    device: Accelerator, monkeypatch: pytest.MonkeyPatch, ram: int = 1 << 40, **options: Any
) -> tuple[TinyModel, ActivationOffloader]:
    monkeypatch.setattr(module, "ram_available_bytes", lambda: ram)
    monkeypatch.setattr(module, "ram_limit_bytes", lambda: 1 << 34)
    model = tiny_model(DEPTH, dropout=0.1)
    options = {"min_bytes": 0, "headroom": 0.0, "max_slowdown": 0.0, **options}
    offloader = ActivationOffloader(model, list(model.layers), device=device, **options)

    watch(device, offloader._activations, options.get("max_inflight_bytes", 1 << 30))
    return model, offloader


def watch(device: Accelerator, activations: Any, inflight: int) -> None:
    """Let the device's peak follow the policy."""
    limits = ActivationLimits(None, 0, inflight=inflight)
    device.held = lambda: int(
        device.shown * extra_device_bytes(activations.measured, activations.policy, limits)
    )


def steps(model: TinyModel, count: int, **options: Any) -> Any:
    trained = [p for p in model.parameters() if p.requires_grad]
    return train(model, torch.optim.AdamW(trained, lr=1e-2), count, **options)


def short(offloader: ActivationOffloader) -> str:
    return "".join(mode[0] for mode in offloader.policy)


def saved(length: int = 7) -> int:
    """Bytes that one block of the tiny model saves, measured on the host device."""
    model = tiny_model(DEPTH, dropout=0.1)
    offloader = ActivationOffloader(model, list(model.layers), False, recompute=False)
    steps(model, 2, length=length)
    return offloader.block_bytes[1]


def expected(count: int, **options: Any) -> Any:
    return steps(tiny_model(DEPTH, dropout=0.1), count, **options)


def test_the_probe_recomputes_and_everything_that_fits_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Accelerator()
    model, offloader = start(device, monkeypatch)
    assert short(offloader) == "rrrrrr" and offloader.block_bytes == [0] * DEPTH
    assert "recomputed), then decides" in offloader.events[0]
    record = steps(model, 1)
    assert offloader.stats["recomputed"] == DEPTH
    model(torch.zeros(2, 7, dtype=torch.long))
    assert short(offloader) == "kkkkkk"
    assert min(offloader.block_bytes) > 0
    assert "6 kept, 0 paged, 0 recomputed" in offloader.decision
    assert expected(1).differences(record) == []


def test_a_small_gpu_pages_and_then_tries_recomputing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for two blocks beyond the probe; pages cost more than recomputation here."""
    device = Accelerator(limit=1000 + 2 * saved(), base=1000)
    model, offloader = start(device, monkeypatch, max_inflight_bytes=1)
    device.step_seconds = lambda: 1 + 0.5 * offloader.policy.count("offload")
    record = steps(model, 30)
    assert expected(30).differences(record) == []
    assert short(offloader).count("o") == 0 and short(offloader).count("r") >= 4
    times = [event for event in offloader.events if "by measured step time" in event]
    assert len(times) == 1 and "100% chosen" in times[0]


def test_pages_stay_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Accelerator(limit=1000 + 2 * saved(), base=1000)
    model, offloader = start(device, monkeypatch, max_inflight_bytes=1)
    device.step_seconds = lambda: 1 + 0.5 * offloader.policy.count("recompute")
    record = steps(model, 30)
    assert expected(30).differences(record) == []
    assert short(offloader).count("o") >= 4 and short(offloader).count("r") == 0
    assert short(offloader)[-1] == "k"


def test_little_ram_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six GiB available, of which four must stay: no room for pages after the made-up 2 GiB."""
    device = Accelerator(limit=1000 + 2 * saved(), base=1000)
    model, offloader = start(device, monkeypatch, ram=4 << 30, max_inflight_bytes=1)
    record = steps(model, 8)
    assert expected(8).differences(record) == []
    assert short(offloader).count("o") == 0 and short(offloader).count("r") >= 4


@pytest.mark.parametrize("recompute", ["auto", False])
def test_a_larger_input_is_measured_again(recompute: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 6 * saved()
    device = Accelerator(limit=1000 + room, base=1000)
    model, offloader = start(
        device, monkeypatch, recompute=recompute, max_inflight_bytes=1, profile=False
    )
    records = [steps(model, 4, length=7)]
    assert short(offloader) == "kkkkkk"
    small = offloader.block_bytes
    records.append(steps(model, 4, length=40))
    assert sum("measuring again" in event for event in offloader.events) == 1
    assert offloader.block_bytes[1] > 3 * small[1]
    assert short(offloader) != "kkkkkk"
    kept = offloader.policy
    records.append(steps(model, 3, length=7))  # a smaller one keeps the policy
    assert offloader.policy == kept
    model = tiny_model(DEPTH, dropout=0.1)
    for record, length, count in zip(records, (7, 40, 7), (4, 4, 3), strict=True):
        assert steps(model, count, length=length).differences(record) == []


def test_blocks_return_while_the_measured_peak_leaves_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The probe's peak came from elsewhere (a loss, say), so that blocks cost less than counted."""
    device = Accelerator(limit=1000 + 2 * saved(), base=1000)
    model, offloader = start(device, monkeypatch, profile=False, max_inflight_bytes=1)
    steps(model, 2)
    model(torch.zeros(2, 7, dtype=torch.long))
    first = short(offloader).count("k")
    assert first < DEPTH
    device.shown = 0.1
    steps(model, 12)
    assert short(offloader) == "kkkkkk"
    assert any("corrected by the measured peak" in event for event in offloader.events)
    assert not offloader._activations.adapting


def test_a_peak_that_was_reset_since_the_last_step_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Blocks or state that have just moved start the peak again from what is allocated now."""
    device = Accelerator(limit=1000 + 2 * saved(), base=1000)
    model, offloader = start(device, monkeypatch, profile=False, max_inflight_bytes=1)
    steps(model, 2)
    first = short(offloader)
    device.shown = 0.1
    for _ in range(6):
        steps(model, 1)
        device.reset_peak()
    assert short(offloader) == first != "kkkkkk"
    steps(model, 6)
    assert short(offloader) == "kkkkkk"


@pytest.mark.parametrize("replayed", [False, True])
def test_what_recordings_keep_is_not_given_back_as_gradients_come(
    replayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager steps showed a peak below what was counted; replayed ones hold it all the time."""
    device = Accelerator(limit=1000 + 3 * 1000, base=1000)
    device.shown = 0.3
    monkeypatch.setattr(module, "ram_available_bytes", lambda: 1 << 40)
    said: list[str] = []
    options = ActivationOptions(
        offload="auto", recompute="auto", headroom=0.0, replayed=replayed, trials=False
    )
    memory = module.ActivationMemory(CopyEngine(device), options)
    search = PolicySearch(options, device, memory, DEPTH, said.append)
    measured = [BlockActivations(1000, 1000, 0)] * DEPTH
    search.begin(measured, 3000)
    first = search.current.blocks("keep")
    assert 0 < len(first) < DEPTH
    held = extra_device_bytes(measured, search.current.modes, ActivationLimits(None, 0))
    device.held = lambda: int(device.shown * held)
    search.adopted()
    for _ in range(4):
        search.look_at_peak()
    assert (len(search.current.blocks("keep")) > len(first)) == (not replayed)
    assert not (replayed and search.adapting)


def test_over_the_target_blocks_leave_again(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Accelerator(limit=1000 + 20 * saved(), base=1000)
    model, offloader = start(device, monkeypatch, profile=False, max_inflight_bytes=1)
    steps(model, 1)
    model(torch.zeros(2, 7, dtype=torch.long))
    assert short(offloader) == "kkkkkk"
    device.base = device.limit_now + 16 * saved()
    steps(model, 12)
    assert short(offloader).count("k") < DEPTH


@pytest.mark.parametrize(("free", "wanted"), [(0, 1), (2, 3), (9, 5)])
def test_own_use_pages_up_to_the_slowdown_allowed(
    free: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`free` pages cost nothing, each more a tenth of the step."""
    device = Accelerator()
    model, offloader = start(device, monkeypatch, max_slowdown=0.15)
    device.step_seconds = lambda: 1 + 0.1 * max(0, offloader.policy.count("offload") - free)
    record = steps(model, 40)
    assert expected(40).differences(record) == []
    assert short(offloader).count("o") == wanted
    assert "allowed" in offloader.decision


def test_adjusting_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    model, offloader = start(Accelerator(), monkeypatch)
    assert offloader.adjustable
    with pytest.raises(StateError, match="nothing is measured yet"):
        offloader.keep_resident(2)
    steps(model, 2)
    offloader.keep_resident(2)
    steps(model, 2)
    assert short(offloader) == "ooookk"
    offloader.keep_resident(6)
    steps(model, 1)
    assert short(offloader) == "kkkkkk"
    with pytest.raises(OptionError, match="from 1 to 6"):
        offloader.keep_resident(0)
    offloader.remove()
    fixed = ActivationOffloader(model, list(model.layers), True, recompute=False)
    assert not fixed.adjustable
    with pytest.raises(StateError, match="fixed values"):
        fixed.keep_resident(2)


@pytest.mark.parametrize("more", [0.5, 1.0, 1.5, 2.0, 2.5, 3.0])
def test_after_a_probe_that_pages_the_first_decision_fits(
    monkeypatch: pytest.MonkeyPatch, more: float
) -> None:
    """Such a probe takes less than recomputing every block would, and counts as what it is."""
    device = Accelerator()
    model, offloader = start(device, monkeypatch, recompute=False, max_inflight_bytes=1)
    assert short(offloader) == "oooook"

    def peak(policy: list[str]) -> int:
        """Of a step whose loss takes no memory, event by event."""
        blocks = offloader._activations.measured
        end = [
            b.saved if mode == "keep" else b.saved - b.pageable if mode == "offload" else b.boundary
            for b, mode in zip(blocks, policy, strict=True)
        ]
        found = sum(end)
        for k, block in enumerate(blocks):
            fetched = [
                b.pageable for b, mode in zip(blocks[:k], policy, strict=False) if mode[0] == "o"
            ]
            found = max(found, sum(end[:k]) + sum(fetched[-1:]) + block.saved)
        return found

    steps(model, 1)
    offloader._activations.measured = offloader._activations._probe.meter.result()
    every = peak(["recompute"] * DEPTH)
    device.held = lambda: peak(offloader.policy)
    device.limit_now = every + int(more * saved())
    steps(model, 1)
    assert peak(offloader.policy) <= device.limit_now
    assert "k" in short(offloader)


def test_on_the_host_auto_keeps_everything() -> None:
    model = tiny_model(DEPTH, dropout=0.1)
    offloader = ActivationOffloader(model, list(model.layers), min_bytes=0)
    record = steps(model, 3)
    assert expected(3).differences(record) == []
    assert short(offloader) == "kkkkkk" and min(offloader.block_bytes) > 0
    assert "memory is the host's" in offloader.events[0]
    assert not any("forward" in layer.__dict__ for layer in model.layers)
    offloader.keep_resident(2)
    steps(model, 1)
    assert short(offloader) == "ooookk" and offloader.stats["pages"] > 0


def test_removed_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(DEPTH, dropout=0.1)
    offloader = ActivationOffloader(
        model, list(model.layers), True, recompute=False, min_bytes=0, max_inflight_bytes=1
    )
    record = steps(model, 2)
    assert expected(2).differences(record) == []
    assert offloader.stats["fetches"] > 0
    with pytest.raises(StateError, match="remove\\(\\) it first"):
        ActivationOffloader(model, list(model.layers))
    offloader.remove()
    assert not model._forward_pre_hooks
    assert not any("forward" in layer.__dict__ for layer in model.layers)
    before = offloader.stats["pages"]
    steps(model, 1)
    assert offloader.stats["pages"] == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"offload": 1.5}, "offload=1.5"),
        ({"offload": "yes"}, "offload='yes'"),
        ({"min_bytes": -1}, "min_bytes=-1"),
        ({"prefetch_depth": 0}, "prefetch_depth=0"),
        ({"calibrate_steps": 0}, "calibrate_steps=0"),
        ({"tune_window": True}, "tune_window=True"),
        ({"max_slowdown": -0.1}, "max_slowdown=-0.1"),
        ({"max_inflight_bytes": 0}, "max_inflight_bytes=0"),
        ({"recompute": [7]}, r"recompute names blocks \[7\]"),
        ({"profile": 1}, "profile=1"),
        ({"headroom": 1.0}, "headroom=1.0"),
        ({"blocks": []}, "blocks is empty"),
        ({"blocks": [torch.nn.Linear(1, 1)]}, "not a module of the model"),
    ],
)
def test_bad_values_are_named(options: dict[str, Any], words: str) -> None:
    model = tiny_model(DEPTH)
    blocks = options.pop("blocks", list(model.layers))
    with pytest.raises(OptionError, match=words):
        ActivationOffloader(model, blocks, **options)


def test_a_wrapped_model_takes_the_options_of_wrap() -> None:
    model, _ = wrap(tiny_model(DEPTH), device="host")
    with pytest.raises(StateError, match="to wrap\\(\\) instead"):
        ActivationOffloader(model, list(model.layers))


class Split:
    """In the place of what moves optimizer state into device memory."""

    def __init__(self, session: Any) -> None:
        self.session = session
        self.asked: list[bool] = []
        self.left_out = 0

    def away(self, buckets: Any) -> tuple[int, float]:
        return 0, 0.0

    def after_step(self, optimizer: Any) -> None:
        self.asked.append(self.session.activations.adapting)

    def leave_out(self) -> None:
        self.left_out += 1


def test_wrap_decides_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of wrap() on a device with memory of its own and room for two blocks."""
    device = Accelerator(limit=1000 + 2 * saved(), base=1000)
    monkeypatch.setattr("ts_core.engine.wrapping._device_for", lambda *_: device)
    records = []
    for options in ({}, {"activation_offload": False, "recompute": False}):
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
            offload=True,
            **options,
        )
        session = model._trainstream_session
        assert session.adapting == (not options)
        split = Split(session)
        optimizer._updates.split = split
        watch(device, session.activations, 1)
        records.append(train(model, optimizer, 30))
        found = memory_report(model)["activations"]
        if not options:
            assert len(found["offloaded_blocks"]) + len(found["recompute_blocks"]) >= 3
            assert found["pages"] > 0 and found["recomputed"] > 0
            assert not session.activations.adapting
            assert 0 < len(split.asked) == 30 - split.left_out < 30 and not any(split.asked)
            assert memory_report(model)["plan"]["expected"] == device.memory()["peak_allocated"]
        else:
            assert len(split.asked) == 30
            assert found["policy"] == ["keep"] * DEPTH
    assert records[0].differences(records[1]) == []
