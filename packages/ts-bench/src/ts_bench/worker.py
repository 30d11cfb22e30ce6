"""The process of one engine: `python -m ts_bench.worker JOB.json RESULT.json`.

Reads a job, runs it, writes what came of it, anew after each scenario, so that what was measured
before a crash or a time limit is kept. Whatever the engine prints goes to the process's own output,
never into the result.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ts_bench import records

Result = dict[str, Any]
PARENT_POLL_S = 1.0


def main(job_path: Path, result_path: Path) -> None:
    """Run the job and write the result, also when it fails."""
    job = json.loads(job_path.read_text(encoding="utf-8"))
    who = os.getppid(), job.get("starter")
    threading.Thread(target=_end_with, args=who, daemon=True).start()

    def write(result: Result) -> None:
        part = result_path.with_suffix(".part")
        part.write_text(json.dumps(result), encoding="utf-8")
        os.replace(part, result_path)

    write(run(job, write))


def run(job: dict[str, Any], on_result: Callable[[Result], None] = lambda result: None) -> Result:
    """Run a job.

    Args:
        job: engine, variant, scenario, device, warmup, steps, threads; and maybe `also` (more
            scenarios of the same model, run one after the other on what was prepared), `profiled`
            and `settling` (steps), `trace` (see `Counts`), `link` (whether to measure the link)
            and `starter` (the process that asked, which it does not outlive).
        on_result: called with what there is so far, after each scenario.

    Returns:
        {status, reason, measurement, environment, also}: `also` is a list of {status, reason,
        measurement}, one for each further scenario; it ends at the first that failed.
    """
    import torch

    from ts_bench import environment
    from ts_bench.engines import get_engine
    from ts_bench.measure import Counts, Run
    from ts_bench.scenarios import Scenario

    if job["threads"] is not None:
        torch.set_num_threads(job["threads"])
    device = torch.device(job["device"])
    if device.type == "cuda":  # some calls of torch want the index said
        device = torch.device("cuda", torch.cuda.current_device())
    counts = Counts(
        job["warmup"],
        job["steps"],
        job.get("profiled", 0),
        settling=job.get("settling", 0),
        trace=Path(job["trace"]) if job.get("trace") else None,
    )
    prepared: list[Run] = []

    def first() -> records.Measurement:
        scenario = Scenario.from_dict(job["scenario"])
        engine = get_engine(job["engine"])
        link = job.get("link", False)
        prepared.append(Run(engine, scenario, job["variant"], device, link=link))
        return prepared[0].measure(counts)

    def another(scenario: Scenario) -> records.Measurement:
        prepared[0].use(scenario)
        return prepared[0].measure(counts)

    result: Result = {**_outcome(first), "also": [], "environment": {}}
    result["environment"] = {
        "versions": environment.versions(),
        "machine": environment.machine(),
        "device": environment.device(device.type),
    }
    last = result
    for data in job.get("also", []):
        if last["status"] != records.OK:
            break
        on_result(result)
        scenario = Scenario.from_dict(data)
        last = _outcome(lambda scenario=scenario: another(scenario))  # type: ignore[misc]
        result["also"].append(last)
    return result


def _end_with(parent: int, starter: int | None = None) -> None:
    """End this process, and what it started, once its parent is no more.

    A parent that is killed cannot do it, and a worker that is left holds the device's memory.

    Args:
        parent: of this process, as it began.
        starter: who asked for it, and may have been gone by then.
    """
    import psutil

    while os.getppid() == parent and (starter is None or psutil.pid_exists(starter)):
        time.sleep(PARENT_POLL_S)
    if os.name == "posix" and os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _outcome(work: Callable[[], records.Measurement]) -> Result:
    """{status, reason, measurement} of what `work` measured or raised."""
    import torch

    from ts_bench.engines import UnsupportedError

    status, reason, measurement = records.OK, "", None
    try:
        measurement = work()
    except UnsupportedError as error:
        status, reason = records.UNSUPPORTED, str(error)
    except (torch.OutOfMemoryError, MemoryError) as error:
        status, reason = records.OUT_OF_MEMORY, _first_line(error)
    except Exception as error:  # a rival may raise anything; the record keeps it
        traceback.print_exc()
        status, reason = records.CRASHED, f"{type(error).__name__}: {_first_line(error)}"
    return {
        "status": status,
        "reason": reason,
        "measurement": None if measurement is None else dataclasses.asdict(measurement),
    }


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
