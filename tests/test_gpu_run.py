"""tools/gpu_run.py and its parts: tests shared by processes, and results kept as they come."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

TOOLS = Path(__file__).resolve().parent.parent / "tools"
MODULES = ("gpu_tests", "gpu_work", "gpu_stages", "gpu_run")

FILE = """
import pytest

@pytest.mark.parametrize("number", range(4))
def test_fine(number):
    assert True

def test_wrong():
    assert 1 == 2, "as said"

def test_left_out():
    pytest.skip("no reason")
"""


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    monkeypatch.syspath_prepend(str(TOOLS))
    found = {name: importlib.import_module(name) for name in MODULES}
    yield found
    for name in MODULES:
        sys.modules.pop(name, None)


def test_processes_share_the_tests_and_keep_every_result(tmp_path, tools) -> None:
    (tmp_path / "test_some.py").write_text(FILE)
    counter, lines = tmp_path / "next", tmp_path / "lines.jsonl"
    counter.write_text("0")
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TOOLS), os.environ.get("PYTHONPATH", "")]),
        "GPU_TESTS_NEXT": str(counter),
        "GPU_TESTS_LINES": str(lines),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "gpu_tests", "-p", "no:cacheprovider"]
    command += ["-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path / "test_some.py")]
    processes = [subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) for _ in range(2)]
    codes = [process.wait(120) for process in processes]
    assert set(codes) <= {0, 1, 5}
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    begun = [line["id"] for line in found if line["kind"] == "test-start"]
    ended = {line["id"]: line for line in found if line["kind"] == "test"}
    assert len(begun) == len(set(begun)) == len(ended) == 6
    ran = {line["id"]: line["process"] for line in found if line["kind"] == "test-start"}
    assert ran == {name: line["process"] for name, line in ended.items()}
    assert set(ran.values()) <= {process.pid for process in processes}
    outcomes = sorted(line["outcome"] for line in ended.values())
    assert outcomes == ["failed", "passed", "passed", "passed", "passed", "skipped"]
    assert "as said" in ended["test_some.py::test_wrong"]["text"]
    status, note = tools["gpu_stages"]._told_tests(found, [])
    assert status == "failed (1 tests, 0 cut)"
    assert note.startswith("1 failed, 4 passed, 1 skipped\nfailed: test_some.py::test_wrong:")


def test_tests_are_chosen_by_file_folder_or_name(tmp_path, tools, monkeypatch) -> None:
    stages = tools["gpu_stages"]
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    (tmp_path / "some").mkdir()
    for name in ("test_b.py", "test_a.py", "other.py"):
        (tmp_path / "some" / name).write_text("@pytest.mark.gpu")
    (tmp_path / "some" / "test_c.py").write_text("no mark")
    a, b = (str(tmp_path / "some" / name) for name in ("test_a.py", "test_b.py"))
    assert stages.gpu_tests_in(["some", "some/test_b.py"]) == [a, b]
    assert stages.gpu_tests_in(["some/test_b.py::T::x[1-2]"]) == [f"{b}::T::x[1-2]"]
    assert stages.gpu_tests_in(["some/test_c.py::x", "none"]) == []


def test_what_did_not_end_is_told(tools) -> None:
    begun = [{"kind": "test-start", "id": "a.py::hangs"}]
    status, note = tools["gpu_stages"]._told_tests(begun, ["timed out (9 s)"])
    assert status == "failed (0 tests, 1 cut)"
    assert "did not end: a.py::hangs" in note
    assert "timed out (9 s)" in note


def test_each_number_is_given_once(tmp_path, tools) -> None:
    counter = tmp_path / "next"
    counter.write_text("0")
    assert [tools["gpu_tests"].take(counter) for _ in range(12)] == list(range(12))


def test_a_script_that_hangs_or_fails_leaves_its_output(tmp_path, tools) -> None:
    runner = tools["gpu_work"].Runner(tmp_path, dict(os.environ), time.monotonic() + 100)
    hangs = "import time; print('begun', flush=True); time.sleep(600)"
    status, first = runner.script("some", [sys.executable, "-c", hangs], 3)
    assert status == "timed out (3 s)"
    assert "begun\n".startswith(first)  # a slow machine may not have come so far
    status, _ = runner.script("some", [sys.executable, "-c", "raise SystemExit(3)"], 60)
    assert status == "failed (exit 3)"
    kept = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [line["output"] for line in kept] == [first, ""]
    assert kept[0]["command"].startswith("python -c")
    assert f"{first}\n[timed out (3 s)]" in (tmp_path / "log.txt").read_text()
    runner.deadline = time.monotonic()
    assert runner.run([sys.executable, "-c", ""], 60) == ("no time left", "")


def test_deepspeed_is_named_and_not_on_the_path(tmp_path, tools, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "others")
    (tmp_path / "deepspeed" / "deepspeed").mkdir(parents=True)
    env = tools["gpu_run"]._environment(tmp_path)
    assert env["TS_BENCH_DEEPSPEED"] == str(tmp_path / "deepspeed")
    path = env["PYTHONPATH"].split(os.pathsep)
    assert path == [str(tmp_path / "link"), str(tmp_path / "packages"), str(TOOLS), "others"]


def test_scripts_of_stages_are_there() -> None:
    named = re.findall(r'"([a-z_]+\.py)[ "]', (TOOLS / "gpu_stages.py").read_text())
    assert len(set(named)) > 8
    root = TOOLS.parent
    assert [name for name in named if not list(root.glob(f"packages/*/benchmarks/{name}"))] == []
