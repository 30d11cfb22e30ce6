"""The process of one engine: `python -m ts_bench.worker JOB.json RESULT.json`.

Reads a job, runs it, writes what came of it. Whatever the engine prints goes to the process's
own output, never into the result.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import traceback
from pathlib import Path
from typing import Any

from ts_bench import records


def main(job_path: Path, result_path: Path) -> None:
    """Run the job and write the result, also when it fails."""
    job = json.loads(job_path.read_text(encoding="utf-8"))
    result = run(job)
    result_path.write_text(json.dumps(result), encoding="utf-8")


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Run a job: {engine, variant, scenario, device, warmup, steps, threads}.

    Returns:
        {status, reason, measurement, environment}.
    """
    import torch

    from ts_bench import environment
    from ts_bench.engines import UnsupportedError
    from ts_bench.measure import measure
    from ts_bench.scenarios import Scenario
    from ts_core.registry import bench_engines

    if job["threads"] is not None:
        torch.set_num_threads(job["threads"])
    device = torch.device(job["device"])
    if device.type == "cuda":  # some calls of torch want the index said
        device = torch.device("cuda", torch.cuda.current_device())
    status, reason, measurement = records.OK, "", None
    try:
        measurement = measure(
            bench_engines.get(job["engine"]),
            Scenario.from_dict(job["scenario"]),
            job["variant"],
            device=device,
            warmup=job["warmup"],
            steps=job["steps"],
        )
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
        "environment": {
            "versions": environment.versions(),
            "machine": environment.machine(),
            "device": environment.device(device.type),
        },
    }


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
