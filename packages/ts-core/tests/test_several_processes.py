"""`ts_core.testing.processes`: ranks of a test, forked or started."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from ts_core.testing import processes
from ts_core.testing.processes import run_ranks

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="torch without distributed"
)

SCRIPT = """
import json, os, sys, time
from pathlib import Path

import torch

from ts_core.testing.processes import fork_ranks

folder, what = Path(sys.argv[1]), sys.argv[2]

def work(rank):
    if what == "fails" and rank == 1:
        raise SystemExit(3)
    if what == "fails":
        time.sleep(600)
    torch.distributed.init_process_group("gloo")
    total = torch.tensor(float(rank + 1))
    torch.distributed.all_reduce(total)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    found = {name: os.environ[name] for name in names}
    found |= {"total": total.item(), "parent": os.getppid(), "rank": rank}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()

fork_ranks(work, patience=0.5)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("started", [0, 2])
def test_ranks_find_each_other(started: int, script: Path, tmp_path: Path) -> None:
    run_ranks(script, str(tmp_path), "works", started=started, threads=3)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for rank, one in enumerate(found):
        assert one["total"] == 3.0 and one["rank"] == rank
        assert one["RANK"] == one["LOCAL_RANK"] == str(rank)
        assert one["WORLD_SIZE"] == "2" and one["OMP_NUM_THREADS"] == "3"
        # Started ones are no forks of a process that may have asked CUDA for something.
        assert (one["parent"] == os.getpid()) == (started == 2)


@pytest.mark.parametrize("started", [0, 2])
def test_a_rank_that_fails_ends_the_others(
    started: int, script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_GRACE_S", 0.5)
    with pytest.raises(AssertionError, match="ended with status"):
        run_ranks(script, str(tmp_path), "fails", started=started, timeout=100)


def test_what_started_processes_cannot_do(script: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="do their work once"):
        run_ranks(script, str(tmp_path), "works", started=2, rounds=2)
    with pytest.raises(AssertionError, match="not what run_ranks has started"):
        run_ranks(script, str(tmp_path), "works", started=3)
