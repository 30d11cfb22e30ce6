"""The commands: compare, list, show."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

import pytest
import torch

from ts_bench import records
from ts_bench.cli import main, parse_size
from ts_bench.scenarios import SCENARIOS

FAST = ["--device", "cpu", "--warmup", "1", "--steps", "1", "--threads", "1"]


def test_compare_records_draws_and_prints(odd_engines, tmp_path, capsys) -> None:
    out, picture = tmp_path / "run.jsonl", tmp_path / "run.png"
    arguments = ["compare", "--scenario", "tiny", "--engines", "good,absent"]
    arguments += [*FAST, "--tokens", "50", "--out", str(out), "--plot", str(picture)]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert "tiny [1x50, cap none]" in printed.out
    assert "not installed" in printed.out
    assert "needs a licence" in printed.out
    assert "[tiny [1x50, cap none], round 1] good (plain):" in printed.err
    found = records.read([out])
    assert [record.engine for record in found] == ["good", "absent"]
    assert found[0].scenario["tokens"] == 50
    assert picture.read_bytes().startswith(b"\x89PNG")

    assert main(["show", str(out), "--plot", str(tmp_path / "again.png")]) == 0
    assert capsys.readouterr().out == printed.out


@pytest.mark.parametrize(("engines", "status"), [("good,leaving", 1), ("absent", 1)])
def test_status_is_1_when_one_crashed_or_none_succeeded(
    odd_engines, capsys, engines, status
) -> None:
    assert main(["compare", "--scenario", "tiny", "--engines", engines, *FAST]) == status
    assert "tiny" in capsys.readouterr().out


def test_list_shows_all(odd_engines, capsys) -> None:
    assert main(["list"]) == 0
    printed = capsys.readouterr().out
    for name in [*SCENARIOS, "torch", "bitsandbytes", "bitsandbytes-liger", "trainstream", "good"]:
        assert f"\n  {name}" in printed
    assert "needs a licence: pip install licence" in printed
    assert "(broken)" in printed


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["compare", "--scenario", "huge"], "scenario: 'huge' is not accepted"),
        (["compare", "--scenario", "tiny", "--engines", "warp"], "benchmark engine 'warp'"),
        (["compare", "--scenario", "tiny", "--engines", "torch,torch"], "names one twice"),
        (["compare", "--scenario", "tiny", "--tokens", "1", *FAST], "tokens: 1 is not accepted"),
        (["compare", "--scenario", "tiny", "--steps", "0"], "steps: 0 is not accepted"),
        (
            ["compare", "--scenario", "lora-14b-nf4-1x512-24g", "--device", "cpu"],
            "is made for a GPU",
        ),
        (["show", "/no/such/file"], "cannot be read"),
    ],
)
def test_bad_input_is_one_message(capsys, arguments, told) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("ts-bench: error: ")
    assert told in printed
    assert "Traceback" not in printed


def test_cuda_without_a_gpu_is_refused(capsys, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["compare", "--scenario", "tiny", "--device", "cuda"]) == 2
    assert "torch sees no CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "size"),
    [("", ""), ("none", None), ("12GB", 12 * 10**9), ("12.5e9", 12_500_000_000), ("2gib", 2**31)],
)
def test_sizes(text, size) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["12 parsecs", "GB", "-1GB", "0", "1.2.3GB", "12"])
def test_wrong_sizes(text) -> None:
    with pytest.raises(
        argparse.ArgumentTypeError, match=r"is no size|is not above 0|did you mean 12GiB"
    ):
        parse_size(text)


def test_interrupt_ends_the_engines_too(odd_engines, tmp_path) -> None:
    """Ctrl-C: status 130, no worker left, the records so far kept."""
    import signal
    import time

    out = tmp_path / "run.jsonl"
    command = [sys.executable, "-m", "ts_bench", "compare", "--scenario", "tiny"]
    command += ["--engines", "absent,hanging", "--out", str(out), *FAST]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert "absent: not installed" in process.stderr.readline()
    deadline = time.monotonic() + 60
    while not _children(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    (worker,) = _children(process.pid)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.endswith("ts-bench: interrupted\n")
    assert not os.path.exists(f"/proc/{worker}")
    assert [record.engine for record in records.read([out])] == ["absent"]


def test_a_worker_ends_when_its_parent_is_killed(odd_engines) -> None:
    import time

    command = [sys.executable, "-m", "ts_bench", "compare", "--scenario", "tiny"]
    process = subprocess.Popen([*command, "--engines", "hanging", *FAST])
    deadline = time.monotonic() + 60
    while not _workers(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    (worker,) = _workers(process.pid)
    process.kill()
    process.wait(60)
    deadline = time.monotonic() + 60
    while _runs(worker) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _runs(worker)


def _workers(pid: int) -> list[int]:
    """Children that have come as far as to watch their parent (a thread of theirs does)."""
    import psutil

    return [c.pid for c in psutil.Process(pid).children() if c.num_threads() > 1]


def _runs(pid: int) -> bool:
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _children(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children()]
