"""`ts-bench machine`: what its rows say, and the command."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch

from ts_bench import machine_host, machine_link
from ts_bench.cli import main
from ts_bench.machine_rows import MIB, Row, size_of, text_of
from ts_core import _native
from ts_core.device import resolve_device
from ts_core.device.host import HostDevice
from ts_core.errors import StateError


class Slow(HostDevice):
    """A device whose copies take a known time each, and which counts them by stream."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.copies: dict[str, int] = {}

    def copy(self, dst, src, stream) -> None:
        self.copies[stream.name] = self.copies.get(stream.name, 0) + 1
        self.delay(stream, self.seconds)
        super().copy(dst, src, stream)


def test_a_row_is_one_line() -> None:
    row = Row("link", "GB/s", {"H2D": 54.98, "one": 1.0, "all": 4300.2}, "as said")
    assert text_of(row) == f"{'link, GB/s':42}H2D 55.0, one 1.000, all 4300 (as said)"
    assert [size_of(MIB // 4), size_of(MIB), size_of(1 << 30)] == ["0.25 MiB", "1 MiB", "1 GiB"]


def test_rates_of_the_link_are_bytes_of_both_directions_over_time(monkeypatch) -> None:
    monkeypatch.setattr(machine_link, "TIMES", 1)
    device = Slow(0.01)
    row = machine_link.page_locked(device, 1000, 3000)
    # 3 copies of 1000 bytes take 30 ms at least, in both directions at the same time.
    assert 0 < row.values["H2D"] <= 3000 / 0.03 / 1e9
    assert 0 < row.values["one D2H"] <= 1000 / 0.01 / 1e9
    assert row.values["H2D"] < row.values["both"] <= 2 * 3000 / 0.03 / 1e9
    # each twice (a first call and a timed one): 3 alone, 3 with both, 1 by itself
    assert device.copies == {"measured h2d": 14, "measured d2h": 14}


def test_updates_run_while_copies_do(monkeypatch) -> None:
    monkeypatch.setattr(machine_host, "PAUSE_S", 0.0)
    device = Slow(0.05)
    alone, beside = machine_host.adamw(device, 1000, 2, 16 * 1000)
    assert set(alone.values) == {"trainstream", "torch fused"}
    assert device.copies == {"measured h2d": 5, "measured d2h": 5}
    # 4 copies of 4000 bytes each way take 0.2 s, after one that warms up
    assert 0 < beside.values["link both ways, GB/s"] <= 2 * 16 * 1000 / 0.2 / 1e9
    assert beside.values["trainstream"] > 0
    assert "of the rate alone" in beside.note


def test_waits_count_the_time_of_every_thread() -> None:
    def spin_elsewhere() -> None:
        def spin() -> None:
            end = time.perf_counter() + 0.3
            while time.perf_counter() < end:
                pass

        thread = threading.Thread(target=spin)
        thread.start()
        thread.join()

    assert machine_host._cores(lambda: time.sleep(0.3)) < 0.1
    assert machine_host._cores(spin_elsewhere) > 0.1


def test_the_command_measures_everything(tmp_path, capsys) -> None:
    level, threads = _native.simd_level(), torch.get_num_threads()
    path = tmp_path / "new" / "machine.json"
    assert main(["machine", "--device", "host", "--tiny", "--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "cpu (host)"
    data = json.loads(path.read_text())
    assert data["kind"] == "machine" and data["machine"]["cpu"]
    rows = [Row(**row) for row in data["rows"]]
    assert lines[1:] == [text_of(row) for row in rows]
    assert len(rows) == 9
    assert all(value >= 0 for row in rows for value in row.values.values())
    waits = next(row for row in rows if row.unit == "cores")
    assert set(waits.values) == {"an event", "step() and synchronize()", "step() and a forward"}
    assert (_native.simd_level(), torch.get_num_threads()) == (level, threads)


def test_imports_that_fail_are_told(monkeypatch, tmp_path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no such torch')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(StateError, match="no such torch"):
        machine_host.imports(1)


@pytest.mark.gpu
def test_on_a_gpu_waits_leave_the_cores_alone() -> None:
    (row,) = machine_host.waits(resolve_device("cuda"), 0.5)
    assert row.values["torch.cuda.synchronize()"] >= 0
    ours = [value for name, value in row.values.items() if not name.startswith("torch")]
    assert max(ours) < 0.5


@pytest.mark.gpu
def test_on_a_gpu_memory_is_page_locked() -> None:
    row = machine_link.page_locking(resolve_device("cuda"), 64 * MIB)
    assert row.note == ""
    assert set(row.values) == {
        "arena",
        "arena, first",
        "torch pin_memory",
        "torch pin_memory, first",
    }
