"""Suites, engines with options, several scenarios in one process, forked processes."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch

from ts_bench import adam_updates, records
from ts_bench.cli import main
from ts_bench.engines import get_engine, parse_spec, split_specs
from ts_bench.engines.ours import ENGINE
from ts_bench.engines.unsloth import checkpoint_folder, write_checkpoint
from ts_bench.rounds import Entry, Settings, run_entries
from ts_bench.scenarios import SCENARIOS, toy_of
from ts_bench.suites import OURS, SUITES, rounds_of
from ts_bench.workload import input_batches
from ts_core.errors import OptionError
from ts_core.registry import Registry

TINY = SCENARIOS["tiny"]
LONGER = dataclasses.replace(TINY, name="longer", tokens=64)
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_names_scenarios_of_one_model_and_cap(name) -> None:
    rounds = rounds_of(SUITES[name])
    assert len(rounds) > 1
    every = [entry for entries in rounds for entry in entries]
    for entry in every:
        first = entry.scenarios[0]
        for scenario in entry.scenarios:
            assert (scenario.shape, scenario.base) == (first.shape, first.base)
            assert (scenario.limit_bytes, scenario.mode) == (first.limit_bytes, first.mode)
            assert scenario.max_grad_norm == first.max_grad_norm
        assert parse_spec(entry.engine)[0]
    (toys,) = rounds_of(SUITES[name], toy=True)
    assert all(not scenario.needs_gpu for entry in toys for scenario in entry.scenarios)
    assert len(toys) == len(set(every))


def test_the_lora_suite_begins_with_what_is_compared() -> None:
    """Each rival once, our engine three times, before what is of less interest."""
    rounds = rounds_of(SUITES["lora"])
    first = {(entry.engine, s.name) for entry in rounds[0] for s in entry.scenarios}
    for size in ("1x512", "1x2048"):
        for limit in ("24g", "12g"):
            name = f"lora-14b-nf4-{size}-{limit}"
            rivals = {engine for engine, scenario in first if scenario == name}
            assert {"unsloth", "bitsandbytes", "bitsandbytes-liger", OURS} <= rivals
            times = [[e.engine for e in r if name in [s.name for s in e.scenarios]] for r in rounds]
            assert [engines.count(OURS) for engines in times] == [1, 1, 1, 0]
    assert [len(entries) for entries in rounds[1:3]] == [3, 2]
    last = rounds[-1][-1]
    assert [scenario.name for scenario in last.scenarios] == ["lora-14b-nf4-packed-2x2048-12g"]


def test_only_some_entries() -> None:
    packed = rounds_of(SUITES["lora"], only=["packed"])
    assert [len(entries) for entries in packed] == [1, 2]
    assert len(rounds_of(SUITES["lora"], only=["packed"], rounds=1)) == 1
    entries = rounds_of(SUITES["lora"], only=["unsloth"], rounds=1)[0]
    assert {entry.engine for entry in entries} == {"unsloth"}
    assert rounds_of(SUITES["lora"], only=["no such thing"]) == []


def test_options_of_engines() -> None:
    assert split_specs("torch, trainstream[kernels=True,fused_lora=auto]") == [
        "torch",
        "trainstream[kernels=True,fused_lora=auto]",
    ]
    options = {"kernels": True, "fused_lora": "auto", "threads": 2}
    spec = "trainstream[kernels=True, fused_lora=auto, threads=2]"
    assert parse_spec(spec) == ("trainstream", options)
    engine = get_engine("trainstream[kernels=True]")
    assert engine._options == {"kernels": True}
    assert "kernels=True" in engine.description
    assert ENGINE._options == {}


@pytest.mark.parametrize("spec", ["a[b]", "a[b=1", "a]b[", "", "a[=1]", "torch[fast=True]"])
def test_wrong_options_are_refused(spec) -> None:
    with pytest.raises(OptionError, match="engine: "):
        get_engine(spec)


def test_packed_rows_start_again_at_each_document() -> None:
    packed = dataclasses.replace(TINY, batch=2, tokens=12, documents=3)
    inputs = next(input_batches(packed, CPU))
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 3] * 3] * 2
    masked = inputs["labels"] == -100
    assert masked.tolist() == [[True, False, False, False] * 3] * 2
    assert torch.equal(inputs["labels"][~masked], inputs["input_ids"][~masked])


def _run(entries, **settings) -> list[records.Record]:
    defaults = {"device": "cpu", "warmup": 1, "steps": 1, "threads": 1}
    return run_entries(
        [entries], Settings(**{**defaults, **settings}), on_record=lambda record: None
    )


FORKING = """
import dataclasses, sys
from ts_bench import processes
from ts_bench.rounds import Entry, Settings, run_entries
from ts_bench.scenarios import SCENARIOS

processes.PRELOADED = ["torch"]
tiny = SCENARIOS["tiny"]
longer = dataclasses.replace(tiny, name="longer", tokens=64)
settings = Settings(device="cpu", warmup=1, steps=1, threads=1, preload=True)
for record in run_entries([[Entry("torch", (tiny, longer))]], settings, on_record=lambda r: None):
    print(record.to_json())
"""


def test_one_forked_process_runs_several_scenarios() -> None:
    """The loss starts at ln(vocabulary) for each; and what the host did is told."""
    # In a process of its own, which takes the server of forks along when it ends.
    done = subprocess.run(
        [sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    first, second = (records.Record.from_json(line) for line in done.stdout.splitlines())
    assert [record.scenario["name"] for record in (first, second)] == ["tiny", "longer"]
    for record in (first, second):
        assert record.status == records.OK, record.reason
        figures = record.measurement
        assert figures is not None
        assert len(figures.host_s) == 1
        assert 0 < figures.host_s[0] <= figures.step_s[0]
        assert abs(figures.losses[0] - 5.545) < 0.2
    assert first.measurement.prepare_s == second.measurement.prepare_s


def test_scenarios_after_a_failure_are_not_left_out(odd_engines, monkeypatch) -> None:
    """Out of memory: the next variant, on what is left. Otherwise: not run, with the reason."""
    jobs = []

    def job(job, folder, limit_s, starter, own_interpreter):
        jobs.append((job["variant"], [TINY.name, *[s["name"] for s in job["also"]]]))
        fine = {"status": "ok", "reason": "", "measurement": None}
        bad = {"status": ended, "reason": "why", "measurement": None}
        return records.OK, "", {**fine, "environment": {}, "also": [bad]}

    monkeypatch.setattr("ts_bench.rounds._run_job", job)
    third = dataclasses.replace(TINY, name="third")
    ended = records.OUT_OF_MEMORY
    found = _run([Entry("greedy", (TINY, LONGER, third))])
    told = [(r.scenario["name"], r.variant, r.status) for r in found]
    assert told == [
        ("tiny", "plain", "ok"),
        ("longer", "plain", "out of memory"),
        ("longer", "small", "ok"),
        ("third", "small", "out of memory"),
    ]
    assert [variant for variant, _ in jobs] == ["plain", "small"]
    ended = records.CRASHED
    found = _run([Entry("greedy", (TINY, LONGER, third))])
    assert [r.status for r in found] == ["ok", "crashed", "not run"]
    assert found[-1].reason == "its process had ended with longer"


def test_suite_is_listed_and_refused_without_a_gpu(capsys, monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["suite"]) == 0
    assert "deepspeed-zero2: full-1.5b-4x512-24g" in capsys.readouterr().out
    assert main(["suite", "lora"]) == 2
    assert main(["suite", "lorry", "--tiny"]) == 2
    assert main(["suite", "lora", "--tiny", "--only", "nothing"]) == 2


def test_rivals_that_are_absent_say_what_they_need(monkeypatch) -> None:
    monkeypatch.setattr("ts_core.registry.bench_engines", Registry("trainstream.bench_engines"))
    monkeypatch.delenv("TS_BENCH_TRAINSTREAM_041", raising=False)
    monkeypatch.setattr("ts_bench.engines.unsloth.find_spec", lambda name: None)
    monkeypatch.delenv("TS_BENCH_DEEPSPEED", raising=False)
    monkeypatch.setattr("ts_bench.deepspeed_folder.find_spec", lambda name: None)
    for name in ("unsloth", "deepspeed-zero2", "deepspeed-zero3", "trainstream-0.4.1"):
        told = get_engine(name).available()
        assert told is not None
        assert "pip install" in told


def test_a_folder_of_deepspeed_is_on_the_path_only_of_who_uses_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("ts_bench.deepspeed_folder.find_spec", lambda name: None)
    monkeypatch.setattr("sys.path", list(sys.path))
    monkeypatch.setenv("TS_BENCH_DEEPSPEED", str(tmp_path))
    engine = get_engine("deepspeed-zero2")
    assert engine.available() is not None  # nothing in it yet
    (tmp_path / "deepspeed" / "ops").mkdir(parents=True)
    (tmp_path / "deepspeed" / "__init__.py").write_text("")
    assert engine.available() is None
    assert str(tmp_path) not in sys.path
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "deepspeed" / "ops" / "__init__.py").write_text("")
    (tmp_path / "deepspeed" / "ops" / "adam.py").write_text("raise ImportError('as written')")
    assert "as written" in str(adam_updates.deepspeed(10))
    assert sys.path[0] == str(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]


def test_checkpoint_for_unsloth_is_one_that_transformers_reads(tmp_path, monkeypatch) -> None:
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.setenv("TS_BENCH_CHECKPOINTS", str(tmp_path))
    toy = toy_of(SCENARIOS["lora-14b-nf4-1x512-24g"])
    folder = write_checkpoint(toy, CPU)
    assert folder == checkpoint_folder(toy)
    assert folder.parent == tmp_path
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    kinds = {type(module).__name__ for module in model.modules()}
    assert "Linear4bit" in kinds
    ids = next(input_batches(toy, CPU))
    assert abs(float(model(**ids).loss.detach()) - 5.545) < 0.3
    assert AutoTokenizer.from_pretrained(folder)("a b")["input_ids"] == [3, 4]
