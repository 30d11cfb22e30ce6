"""Several processes of one test, as torchrun would start them.

A test calls `run_ranks` with a script; the script calls `fork_ranks` with what each process is to
do, once or several times. The script's process imports what is needed and forks, so that imports
are paid for once. The stores at which the processes find each other live in the test's process, on
ports that the operating system picked when it bound them: no two tests can have the same.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

_PORTS = "TRAINSTREAM_TEST_PORTS"
_TAIL = 6000  # characters of the output that an error shows


def run_ranks(
    script: Path, *arguments: str, rounds: int = 1, timeout: float = 300, threads: int = 1
) -> str:
    """Run a script that calls `fork_ranks`.

    Args:
        script: a Python file.
        arguments: for it.
        rounds: how many times it may call `fork_ranks`.
        timeout: seconds after which it is killed, with all of its processes.
        threads: of each process, for torch's CPU kernels.

    Returns:
        What it wrote to stdout and stderr.

    Raises:
        AssertionError: it failed, or took too long; with the end of what it wrote.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    stores = [
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(rounds)
    ]
    environment = {
        **os.environ,
        _PORTS: ",".join(str(store.port) for store in stores),
        "OMP_NUM_THREADS": str(threads),
    }
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its children can be ended with it
        )
        try:
            status: int | None = process.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end_group(process.pid)
            process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    if status != 0:
        what = f"took more than {timeout} s" if status is None else f"ended with status {status}"
        raise AssertionError(f"{script} {what}:\n{text[-_TAIL:]}")
    return text


def _end_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


def fork_ranks(
    work: Callable[[int], object],
    *,
    count: int = 2,
    round: int = 0,
    check: bool = True,
    patience: float = 60,
) -> list[int]:
    """Do `work` in `count` forked processes, with the environment that torchrun gives.

    To be called by a script of `run_ranks`, before anything has started threads.

    Args:
        work: called with the rank; its return value is dropped. A SystemExit gives the status.
        count: of processes.
        round: a number below `rounds` of `run_ranks`, another one for each call.
        check: whether a status other than 0 is an error.
        patience: seconds for which the others are left alone when one has ended badly; then they
            are killed.

    Returns:
        The exit status of each rank; the negative signal for one that was killed.

    Raises:
        RuntimeError: a status is not 0.
    """
    port = os.environ[_PORTS].split(",")[round]
    sys.stdout.flush()
    sys.stderr.flush()
    running = {_fork(work, rank, count, port): rank for rank in range(count)}
    ended: dict[int, int] = {}
    deadline = None
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank = running.pop(pid)
            ended[rank] = os.waitstatus_to_exitcode(status)
            if ended[rank] != 0 and deadline is None:
                deadline = time.monotonic() + patience
        elif deadline is not None and time.monotonic() > deadline:
            for left in running:
                os.kill(left, signal.SIGKILL)
            deadline = float("inf")
        else:
            time.sleep(0.01)
    found = [ended[rank] for rank in range(count)]
    if check and any(found):
        raise RuntimeError(f"the processes ended with {found}")
    return found


def _fork(work: Callable[[int], object], rank: int, count: int, port: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            WORLD_SIZE=str(count),
            LOCAL_WORLD_SIZE=str(count),
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            # The store is there already, as torchrun's is: nobody binds the port.
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RESTART_COUNT="0",
        )
        work(rank)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # nothing of the parent's is to run twice
