"""profile_hardware(): plausible rates, kept on disk, damaged files measured anew."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from ts_core import HardwareProfile, profile_hardware
from ts_core.device import HostDevice
from ts_core.errors import DataError, OptionError
from ts_core.schedule import hardware
from ts_core.schedule.rates import TYPICAL_GPU, TYPICAL_HOST

RATES = [field.name for field in fields(HardwareProfile) if field.type == "float"]


@pytest.fixture(autouse=True)
def small_and_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINSTREAM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(hardware, "_MIB", 1 << 12)
    monkeypatch.setattr(hardware, "_known", {})


def forget() -> None:
    """As a new process would start."""
    hardware._known.clear()


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry per real measurement."""
    made: list[Any] = []
    real = hardware._measure

    def measure(*arguments: Any) -> Any:
        made.append(arguments[1:])
        return real(*arguments)

    monkeypatch.setattr(hardware, "_measure", measure)
    return made


def test_every_rate_is_measured(measurements: list[Any]) -> None:
    found = profile_hardware("host")
    assert found.measured and len(measurements) == 1
    assert all(getattr(found, name) > 0 for name in RATES)
    text = found.summary()
    for words in ("host to device", "both at once", "host AdamW", "matmul bf16", "(measured)"):
        assert words in text
    assert "not measured" in TYPICAL_GPU.summary()


def test_it_is_kept_across_processes(measurements: list[Any]) -> None:
    first = profile_hardware("host")
    forget()
    assert profile_hardware("host") == first
    assert len(measurements) == 1
    path = Path(first.note.partition("kept in ")[2])
    assert path.parent == hardware.cache_folder()
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # no temporary left
    assert hardware.stored_profiles() == [first]


class OtherMemory(HostDevice):
    separate_memory = True


def test_rates_of_a_gpu_that_was_busy_are_measured_again(
    measurements: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else ran then made rates lower; one that is lower now stays as it was."""
    rate = {"now": 4e13}
    monkeypatch.setattr(hardware, "_matmul", lambda *_: rate["now"])
    busy = profile_hardware(OtherMemory())
    assert busy.matmul_bf16 == 4e13
    path = Path(busy.note.partition("kept in ")[2])
    stored = json.loads(path.read_text())
    stored["profile"]["h2d"] = 1e15
    path.write_text(json.dumps(stored))
    rate["now"] = 8e14
    assert profile_hardware(OtherMemory()) is busy  # looked at once in a process
    forget()
    found = profile_hardware(OtherMemory())
    assert (found.matmul_bf16, found.h2d) == (8e14, 1e15) and len(measurements) == 2
    rate["now"] = 1e13  # busy again
    forget()
    assert profile_hardware(OtherMemory()) == found and len(measurements) == 2


@pytest.mark.parametrize(("slow", "budget_s", "rate"), [(30, 1.0, 1.0), (30, 0.02, 0.25)])
def test_a_slow_start_of_products_does_not_count(
    monkeypatch: pytest.MonkeyPatch, slow: int, budget_s: float, rate: float
) -> None:
    """The first take 0.8 ms each, later ones 0.2; where time is short, there are no later ones."""
    now, done = [0.0], [0]

    def multiply(*_: Any, **__: Any) -> None:
        done[0] += 1
        now[0] += 8e-4 if done[0] <= slow else 2e-4

    monkeypatch.setattr(hardware.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(torch, "mm", multiply)
    found = hardware._matmul(HostDevice(), torch.bfloat16, budget_s)
    assert found == pytest.approx(rate * 2 * 256**3 / 2e-4)
    assert done[0] <= 101


def test_another_setting_is_another_measurement(measurements: list[Any]) -> None:
    profile_hardware("host")
    profile_hardware("host", threads=1)
    profile_hardware("host", quick=False)
    assert measurements == [(True, None), (True, 1), (False, None)]
    profile_hardware("host", threads=1)
    assert len(measurements) == 3
    profile_hardware("host", threads=1, force=True)
    assert len(measurements) == 4


@pytest.mark.parametrize("damage", ["", "{}", "[1]", '{"identity": {}, "profile": {"h2d": -1}}'])
def test_a_damaged_file_is_measured_anew(measurements: list[Any], damage: str) -> None:
    first = profile_hardware("host")
    path = Path(first.note.partition("kept in ")[2])
    path.write_text(damage, encoding="utf-8")
    forget()
    assert hardware.stored_profiles() == []
    assert profile_hardware("host").measured
    assert len(measurements) == 2
    assert json.loads(path.read_text(encoding="utf-8"))["profile"]["measured"] is True


def test_a_folder_that_cannot_be_written_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("TRAINSTREAM_CACHE_DIR", str(tmp_path / "file" / "below"))
    found = profile_hardware("host")
    assert found.measured and found.note.startswith("not kept: ")


@pytest.mark.parametrize(
    "options",
    [{"quick": 1}, {"force": None}, {"threads": 0}, {"threads": True}, {"device": "tpu"}],
)
def test_bad_values_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match="not accepted"):
        profile_hardware(**options)


@pytest.mark.parametrize("profile", [TYPICAL_GPU, TYPICAL_HOST])
def test_plain_data_there_and_back(profile: HardwareProfile) -> None:
    assert HardwareProfile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile
    for name in RATES:
        with pytest.raises(DataError, match=name):
            HardwareProfile.from_dict({**profile.to_dict(), name: "fast"})


@pytest.mark.gpu
def test_a_gpu_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    monkeypatch.undo()
    monkeypatch.setenv("TRAINSTREAM_CACHE_DIR", str(tmp_path))
    found = profile_hardware("cuda", force=True)
    assert found.device == torch.cuda.get_device_name(0)
    assert found.page_locked
    assert found.matmul_bf16 > found.matmul_fp32 > 0
    assert found.duplex > 0.8 * max(found.h2d, found.d2h)
