"""Start the process of a job, wait for it, and make sure that it is gone.

A job runs in a Python of its own, or, where many jobs follow each other, in a process forked from
one that has imported torch, transformers and PEFT before (and done nothing else: no CUDA, no
threads). That saves the seconds which every engine would spend on the same imports. Libraries that
ask for the GPU's properties while they are imported are told what another process saw.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing.context import ForkServerContext
from pathlib import Path

from ts_bench import cuda_facts, preload
from ts_core.interrupts import held_back

PRELOADED = [
    "torch",
    "transformers.models.qwen2.modeling_qwen2",
    "peft",
    "ts_hf",
    "ts_quant",
    "ts_kernels",
    "ts_bench.measure",
    "ts_bench.workload",
]
# Exit status of a forked worker that cannot use CUDA: something that was imported before had
# started it.
NO_CUDA = 77


class Starter:
    """Runs jobs.

    Args:
        preload: fork from a process with the imports done. With CUDA, the first job that finds
            it unusable turns this off, and is run again without.
        cuda: whether the jobs use CUDA.
    """

    def __init__(self, preload: bool = False, *, cuda: bool = False) -> None:
        self.preload = preload and os.name == "posix"
        self.cuda = cuda
        self._context: ForkServerContext | None = None

    def run(
        self, job: Path, result: Path, log: Path, limit_s: float, *, own_interpreter: bool = False
    ) -> int | None:
        """Run a worker on files; returns its exit status (negative: a signal), None for too slow.

        Args:
            job, result, log: the files of a worker; its output goes to `log`.
            limit_s: seconds it may take.
            own_interpreter: never fork it.
        """
        if self.preload and not own_interpreter:
            code = self._forked(job, result, log, limit_s)
            if code != NO_CUDA:
                return code
            told = log.read_text(encoding="utf-8", errors="replace").strip()
            print(f"preloading does not work with CUDA here: {told}", file=sys.stderr)
            self.preload = False
        return _interpreter(job, result, log, limit_s)

    def _forked(self, job: Path, result: Path, log: Path, limit_s: float) -> int | None:
        if self._context is None:
            try:
                facts = cuda_facts.gather() if self.cuda else None
            except RuntimeError as error:
                log.write_text(str(error), encoding="utf-8")
                return NO_CUDA
            self._context = multiprocessing.get_context("forkserver")
            self._context.set_forkserver_preload([preload.__name__])
            os.environ[preload.VARIABLE] = json.dumps({"modules": PRELOADED, "facts": facts})
        process = self._context.Process(target=_in_fork, args=(str(job), str(result), str(log)))
        try:
            with held_back:  # Ctrl-C finds it begun and known, or not begun
                process.start()
            os.environ.pop(preload.VARIABLE, None)  # the first start has started the server with it
            process.join(limit_s)
            return process.exitcode
        finally:
            if process.is_alive() and process.pid is not None:
                # It leads a process group of its own, unless it has only just begun.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()


def _in_fork(job: str, result: str, log: str) -> None:
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    from ts_bench import worker

    if json.loads(Path(job).read_text(encoding="utf-8"))["device"] == "cuda":
        import torch

        try:
            torch.zeros(1, device="cuda")
        except RuntimeError as error:
            print(error, flush=True)
            os._exit(NO_CUDA)
    worker.main(Path(job), Path(result))
    sys.stdout.flush()
    sys.stderr.flush()


def _interpreter(job: Path, result: Path, log: Path, limit_s: float) -> int | None:
    command = [sys.executable, "-m", "ts_bench.worker", str(job), str(result)]
    process = None
    with log.open("wb") as output:
        try:
            with held_back:  # Ctrl-C finds it begun and known, or not begun
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=os.name == "posix",
                )
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process is not None:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Make sure that a worker and what it started are gone, whatever interrupted the wait."""
    if process.poll() is not None:
        return
    if os.name == "posix":
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()
