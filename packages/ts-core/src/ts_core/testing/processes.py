"""Several processes of one test, as torchrun would start them.

A test calls `run_ranks` with a script; the script calls `fork_ranks` with what each process is to
do, once or several times. The script's process imports what is needed and forks, so that imports
are paid for once; ranks on GPUs are processes that are started each (`started`). The stores at
which the processes find each other live in the test's process, on ports that the operating system
picked when it bound them: no two tests can have the same.
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
_STARTED = "TRAINSTREAM_TEST_STARTED"
_GRACE_S = 20
_TAIL = 6000  # characters of the output that an error shows


def run_ranks(
    script: Path,
    *arguments: str,
    rounds: int = 1,
    timeout: float = 300,
    threads: int = 1,
    started: int = 0,
) -> str:
    """Run a script that calls `fork_ranks`.

    Args:
        script: a Python file.
        arguments: for it.
        rounds: how many times it may call `fork_ranks`.
        timeout: seconds after which it is killed, with all of its processes.
        threads: of each process, for torch's CPU kernels.
        started: start so many processes of the script, in each of which `fork_ranks` does the work
            of one rank, once; 0: one process, that forks them. CUDA does not survive a fork, where
            anything has so much as counted the GPUs before.

    Returns:
        What it wrote to stdout and stderr.

    Raises:
        ValueError: several rounds in started processes.
        AssertionError: it failed, or took too long; with the end of what it wrote.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if started and rounds != 1:
        raise ValueError(f"rounds={rounds}: processes that are started do their work once.")
    stores = [
        TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(rounds)
    ]
    ports = [store.port for store in stores]
    environments: list[dict[str, str]] = [{}]
    if started:
        environments = [
            {**_as_torchrun(rank, started, ports[0]), _STARTED: "1"} for rank in range(started)
        ]
    with tempfile.TemporaryFile() as output:
        processes = [
            subprocess.Popen(
                [sys.executable, str(script), *arguments],
                env={
                    **os.environ,
                    _PORTS: ",".join(map(str, ports)),
                    "OMP_NUM_THREADS": str(threads),
                    **environment,
                },
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that its children can be ended with it
            )
            for environment in environments
        ]
        try:
            failed = _wait(processes, timeout)
        finally:
            for process in processes:
                _end_group(process.pid)
                process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    if failed:
        raise AssertionError(f"{script} {failed}:\n{text[-_TAIL:]}")
    return text


def _wait(processes: list[subprocess.Popen[bytes]], timeout: float) -> str:
    """Wait for all, or some seconds longer once one has failed; what went wrong, if anything."""
    end = time.monotonic() + timeout
    failed = ""
    while True:
        statuses = [process.poll() for process in processes]
        if not failed and any(statuses):
            failed = f"ended with status {', '.join(map(str, statuses))}"
            end = min(end, time.monotonic() + _GRACE_S)  # the others may wait for it for ever
        if None not in statuses:
            return failed
        if time.monotonic() > end:
            return failed or f"took more than {timeout} s"
        time.sleep(0.01)


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

    To be called by a script of `run_ranks`, before anything has started threads. In a process that
    `run_ranks` has started for one rank, it does the work of that one, here.

    Args:
        work: called with the rank; its return value is dropped. A SystemExit gives the status.
        count: of processes.
        round: a number below `rounds` of `run_ranks`, another one for each call.
        check: whether a status other than 0 is an error.
        patience: seconds for which the others are left alone when one has ended badly; then they
            are killed.

    Returns:
        The exit status of each rank; the negative signal for one that was killed. Of a started
        process only its own.

    Raises:
        RuntimeError: a status is not 0.
    """
    if os.environ.get(_STARTED):
        if int(os.environ["WORLD_SIZE"]) != count or round:
            raise ValueError(f"count={count}, round={round}: not what run_ranks has started.")
        work(int(os.environ["RANK"]))
        return [0]
    port = int(os.environ[_PORTS].split(",")[round])
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


def _as_torchrun(rank: int, count: int, port: int) -> dict[str, str]:
    """The environment that torchrun gives to one rank."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        # The store is there already, as torchrun's is: nobody binds the port.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def _fork(work: Callable[[int], object], rank: int, count: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.environ.update(_as_torchrun(rank, count, port))
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
