"""compare(): fresh processes, rotation, and every way in which an engine can fail."""

from __future__ import annotations

import psutil
import pytest

from ts_bench import records
from ts_bench.records import Record
from ts_bench.rounds import Settings, compare
from ts_bench.scenarios import SCENARIOS
from ts_core.errors import OptionError

TINY = SCENARIOS["tiny"]


def _compare(engines, scenarios=(TINY,), **settings) -> list[Record]:
    seen: list[Record] = []
    defaults = {"device": "cpu", "warmup": 1, "steps": 2, "threads": 1}
    found = compare(scenarios, engines, Settings(**{**defaults, **settings}), on_record=seen.append)
    assert seen == found
    return found


def test_processes_end_in_a_record_each_and_none_stops_the_others(odd_engines, capfd) -> None:
    found = _compare(["leaving", "greedy", "killed", "absent", "broken"], steps=3)
    told = [(record.engine, record.variant, record.status) for record in found]
    assert told == [
        ("leaving", "plain", "crashed"),
        ("greedy", "plain", "out of memory"),
        ("greedy", "small", "ok"),
        ("killed", "plain", "crashed"),
        ("absent", "", "not installed"),
        ("broken", "", "crashed"),
    ]
    reasons = {(record.engine, record.variant): record.reason for record in found}
    assert reasons["leaving", "plain"] == "exit status 3 without a result"
    assert "last words" in capfd.readouterr().err
    assert reasons["greedy", "plain"] == "CUDA out of memory. Tried to allocate 7 GiB"
    assert reasons["killed", "plain"].startswith("killed by SIGKILL (the system kills like this")
    assert reasons["absent", ""] == "needs a licence: pip install licence"
    assert "no_such_module_of_test" in reasons["broken", ""]
    assert all((record.measurement is None) == (record.status != "ok") for record in found)
    for record in found:
        assert record.scenario["name"] == "tiny"
        assert record.environment["versions"]["torch"]
        assert record.environment["device"]["type"] == "cpu"
        assert Record.from_json(record.to_json()) == record

    figures = found[2].measurement
    assert figures is not None
    assert len(figures.step_s) == 3
    assert all(0.01 <= seconds < 5 for seconds in figures.step_s)
    assert figures.losses == [32.0, 33.0, 34.0, 35.0]
    assert figures.details == {"threads": 1, "seed": 0}
    assert 50e6 < figures.host_rss_bytes <= figures.host_peak_rss_bytes


def test_a_hanging_engine_is_ended_and_the_time_limit_holds(odd_engines) -> None:
    found = _compare(["hanging", "good"], run_limit_s=3, time_limit_s=3)
    assert [record.status for record in found] == ["timed out", "not run"]
    assert found[0].reason == "still running after 3 s"
    assert found[1].reason == "the time limit of 3 s was used up"
    assert not psutil.Process().children()


@pytest.fixture
def no_process(monkeypatch) -> list[dict]:
    """Jobs are noted instead of run."""
    jobs: list[dict] = []

    def note(job, folder, limit_s, starter, own_interpreter):
        jobs.append(job)
        return records.CRASHED, "not run in this test", None

    monkeypatch.setattr("ts_bench.rounds._run_job", note)
    return jobs


def test_order_rotates_over_rounds(odd_engines, no_process) -> None:
    found = _compare(["good", "absent", "nan"], repeats=4)
    order = [(record.repeat, record.position, record.engine) for record in found]
    rounds = [["good", "absent", "nan"], ["absent", "nan", "good"]]
    rounds += [["nan", "good", "absent"], ["good", "absent", "nan"]]
    assert order == [(r, p, name) for r, names in enumerate(rounds) for p, name in enumerate(names)]
    assert len({record.run_id for record in found}) == 1
    assert [job["engine"] for job in no_process] == ["good", "nan"] + ["nan", "good"] * 2 + [
        "good",
        "nan",
    ]


def test_one_variant_only(odd_engines, no_process) -> None:
    (record,) = _compare(["good"], variant="small")
    assert record.variant == no_process[0]["variant"] == "small"


def test_an_engine_without_the_variant_runs_its_own(odd_engines, no_process) -> None:
    (record,) = _compare(["good"], variant="enormous")
    assert record.variant == "plain"


@pytest.mark.parametrize("option", ["warmup", "steps", "repeats"])
def test_counts_below_one_are_refused(option) -> None:
    with pytest.raises(OptionError, match=f"^{option}: 0 is not accepted"):
        Settings(device="cpu", **{option: 0})
