"""`ts-bench adam`: what is compared, its figures, and the command."""

from __future__ import annotations

import io
import json
import sys
import types
from collections.abc import Iterator

import pytest
import torch

from ts_bench import adam, adam_report, adam_updates
from ts_bench.adam import AdamRun, Timing, measure
from ts_bench.cli import main
from ts_core import _native
from ts_core.errors import OptionError


@pytest.fixture(autouse=True)
def _same_simd_level_afterwards() -> Iterator[None]:
    """The level belongs to the process, and single updates choose theirs."""
    before = _native.simd_level()
    yield
    _native.set_simd_level(before)


LAYOUTS = [(p, m) for p in ("fp32", "bf16 + fp32 master") for m in adam_updates.MOMENTS]


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(adam, "PAUSE_S", 0.0)


def a_run(**seconds: list[float]) -> AdamRun:
    timings = [
        Timing("plain stream", "fp32", "float32", "avx2", 28, seconds["stream"], [1.0, 1.0]),
        Timing("trainstream", "fp32", "float32", "avx2", 28, seconds["ours"], [1.0, 1.0]),
        Timing("torch fused", "fp32", "float32", "", 28, seconds["torch"], [2.0, 2.0]),
        Timing("trainstream", "fp32", "int8", "avx2", 16.03, seconds["ours"], [1.0, 1.0]),
    ]
    machine = {"cpu": "A CPU", "cores": 2}
    missing = {"DeepSpeed CPUAdam": "cannot be imported"}
    return AdamRun("2026-01-02T03", "ts-bench adam", machine, {}, 10**9, 2, 2, timings, missing)


def test_every_contestant_takes_part_and_updates() -> None:
    before = _native.simd_level()
    done: list[int] = []
    run = measure(count=1000, rounds=2, threads=1, on_round=done.append)
    assert _native.simd_level() == before
    assert done == [1, 2]
    levels = _native.available_simd_levels()
    expected = {("plain stream", *layout, levels[0]) for layout in LAYOUTS}
    expected |= {("trainstream", *layout, level) for layout in LAYOUTS for level in levels}
    expected |= {("torch fused", "fp32", "float32", "")}
    found = {(t.name, t.parameters, t.moments, t.level) for t in run.timings}
    assert found - {("DeepSpeed CPUAdam", "fp32", "float32", "")} == expected
    assert ("DeepSpeed CPUAdam" in run.missing) != (len(found) > len(expected))
    for timing in run.timings:
        assert len(timing.wall_s) == len(timing.cpu_s) == 2
        assert min(timing.wall_s) > 0


def test_bytes_are_those_an_update_reads_and_writes() -> None:
    updates = list(adam_updates.native_updates(256, ["scalar"], list(adam_updates.MOMENTS), 1))
    sizes = {(u.parameters, u.moments): u.bytes_each for u in updates}
    scales = 2 * 2 * 4 / 256
    assert [sizes[layout] for layout in LAYOUTS] == [
        28,
        20,
        12 + 4 + scales,
        28,
        20,
        12 + 4 + scales,
    ]


def test_each_update_changes_its_parameter_and_each_stream_nothing() -> None:
    for parameters, moments in LAYOUTS:
        state = adam_updates.NativeState(300, parameters, moments, threads=1)
        before = [state.param.clone(), *(stored.clone() for stored in state.stored)]
        state.stream("scalar")
        assert all(
            torch.equal(a, b) for a, b in zip(before, [state.param, *state.stored], strict=True)
        )
        state.update("scalar")
        assert not torch.equal(before[0], state.param)
        assert state.stored[1].bool().any()


def test_ratios_are_taken_within_a_round() -> None:
    # The machine was ten times slower in the second round.
    run = a_run(stream=[1.0, 10.0], ours=[2.0, 20.0], torch=[4.0, 40.0])
    stream, ours, rival, small = run.timings
    assert run.of_stream(ours) == 0.5 and run.of_torch(ours) == 2.0
    assert run.of_stream(stream) == 1.0 and run.of_torch(rival) == 1.0
    assert run.of_stream(small) is None
    assert run.params_per_s(ours) == 1e9 / 11 and run.bytes_per_s(ours) == 28e9 / 11


def test_the_table_has_each_row_and_what_is_missing() -> None:
    out = io.StringIO()
    adam_report.show(a_run(stream=[1.0, 1.0], ours=[2.0, 2.0], torch=[4.0, 4.0]), out)
    lines = out.getvalue().splitlines()
    assert lines[0] == "host AdamW, 1000 M parameters, 2 threads, A CPU, 2 rounds, 2026-01-02"
    assert [line.split("  ")[0] for line in lines[2:6]] == [
        "plain stream",
        "trainstream",
        "torch fused",
        "trainstream",
    ]
    assert lines[3].split()[-6:] == ["0.500", "14.0", "50", "%", "2.00x", "1.00"]
    assert lines[6] == "DeepSpeed CPUAdam: not measured, cannot be imported"


def test_deepspeeds_failures_are_reasons(monkeypatch) -> None:
    class Optimizer:
        def __init__(self, parameters, **options) -> None:
            self.parameter, self.lr = parameters[0], options["lr"]

        def step(self) -> None:
            with torch.no_grad():
                self.parameter.sub_(self.lr)

    class Broken(Optimizer):
        def step(self) -> None:
            raise RuntimeError("no compiler\nninja failed")

    class Idle(Optimizer):
        def step(self) -> None:
            pass

    def install(kind: type | None) -> None:
        module = types.ModuleType("deepspeed.ops.adam")
        if kind is not None:
            module.DeepSpeedCPUAdam = kind  # type: ignore[attr-defined]
        for name in ("deepspeed", "deepspeed.ops"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, "deepspeed.ops.adam", module)

    install(None)
    assert "cannot run: AttributeError" in adam_updates.deepspeed(10)
    monkeypatch.setitem(sys.modules, "deepspeed.ops.adam", None)
    assert "cannot be imported" in adam_updates.deepspeed(10)
    install(Broken)
    assert adam_updates.deepspeed(10) == "cannot run: RuntimeError: ninja failed"
    install(Idle)
    assert adam_updates.deepspeed(10) == "its step changed nothing"
    install(Optimizer)
    update = adam_updates.deepspeed(10)
    assert update.name == "DeepSpeed CPUAdam" and update.bytes_each == 28
    update.run()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"count": 0}, "count: 0 is not accepted"),
        ({"rounds": 0}, "rounds: 0 is not accepted"),
        ({"threads": -1}, "threads: -1 is not accepted"),
        ({"levels": ["sse9"]}, "levels: 'sse9' is not accepted here; use"),
        ({"moments": ["fp8"]}, "moments: 'fp8' is not accepted here; use float32, bfloat16, int8"),
    ],
)
def test_what_is_refused(options, told) -> None:
    with pytest.raises(OptionError, match=told):
        measure(**{"count": 10, "rounds": 1, "threads": 1, **options})


def test_the_command_prints_writes_and_draws(tmp_path, capsys) -> None:
    out, picture = tmp_path / "new" / "adam.json", tmp_path / "adam.png"
    arguments = ["adam", "--millions", "0.01", "--rounds", "2", "--levels", "scalar"]
    arguments += ["--moments", "int8,float32", "--json", str(out), "--plot", str(picture)]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert "host AdamW, 0.01 M parameters" in printed.out
    assert "round 2 of 2" in printed.err
    data = json.loads(out.read_text())
    assert data["kind"] == "adam" and data["count"] == 10_000
    # torch, and with each layout a stream and an update; DeepSpeed where it is installed
    assert len(data["timings"]) + len(data["missing"]) == 1 + 4 * 2 + 1
    (ours,) = [
        t
        for t in data["timings"]
        if (t["name"], t["parameters"], t["moments"]) == ("trainstream", "fp32", "float32")
    ]
    assert len(ours["wall_s"]) == 2
    assert ours["of_stream"] > 0 and ours["of_torch"] > 0
    assert ours["bytes_per_s"] == pytest.approx(28 * ours["params_per_s"])
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_wrong_level_is_one_message(capsys) -> None:
    assert main(["adam", "--millions", "0.01", "--levels", "sse9"]) == 2
    assert capsys.readouterr().err.startswith("ts-bench: error: levels: 'sse9'")
