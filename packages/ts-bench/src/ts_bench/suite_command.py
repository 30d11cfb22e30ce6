"""The sub-command `suite` of `ts-bench`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add("name", nargs="?", help="which suite; without one, all are listed")
    add("--out", type=Path, help="append the records to this file of JSON lines")
    add("--time-limit", type=float, help="seconds for everything; the rest is noted as not run")
    add("--run-limit", type=float, default=120, help="seconds for one process (%(default)s)")
    add("--rounds", type=int, help="at most so many rounds")
    add("--only", action="append", default=[], metavar="TEXT", help="entries with it; repeatable")
    add("--profiled", type=int, default=2, help="steps profiled on a GPU (%(default)s)")
    add("--traces", type=Path, help="folder for traces of the profiled steps (see Perfetto)")
    add("--steps", type=int, help="timed steps, instead of the suite's")
    add("--no-preload", action="store_true", help="import everything anew in each process")
    add("--tiny", action="store_true", help="with toys, on the CPU, to see that it works")
    add("--threads", type=int, help="torch's CPU threads in each process")
    parser.set_defaults(_bench=run)


def run(args: argparse.Namespace) -> int:
    """Runs the suite and prints its tables; the exit status is 0 if anything succeeded."""
    import torch

    from ts_bench import records
    from ts_bench.cli import invoked, progress
    from ts_bench.records import Record
    from ts_bench.report import show
    from ts_bench.rounds import Settings, run_entries
    from ts_bench.suites import SUITES, get_suite, rounds_of, with_steps
    from ts_bench.summary import summarize
    from ts_core.errors import OptionError

    if args.name is None:
        for name, suite in SUITES.items():
            print(f"{name:8}{suite.note}")
            for entry in suite.entries:
                variant = f" ({entry.variant})" if entry.variant else ""
                print(f"    {entry.engine}{variant}: {', '.join(entry.scenarios)}")
        return 0
    suite = with_steps(get_suite(args.name), toy=args.tiny)
    if not args.tiny and not torch.cuda.is_available():
        raise OptionError("suite: torch sees no CUDA GPU; --tiny tries it out on a CPU.")
    rounds = rounds_of(suite, toy=args.tiny, rounds=args.rounds, only=args.only)
    if not rounds:
        raise OptionError(f"only: no entry of {args.name!r} has {' or '.join(args.only)} in it.")
    settings = Settings(
        device="cpu" if args.tiny else "cuda",
        warmup=suite.warmup,
        settling=suite.settling,
        steps=args.steps or suite.steps,
        threads=args.threads,
        run_limit_s=args.run_limit,
        time_limit_s=args.time_limit,
        profiled=args.profiled,
        traces=args.traces,
        link=suite.link,
        preload=not args.no_preload,
    )

    def on_record(record: Record) -> None:
        if args.out is not None:
            records.append(args.out, record)
        print(progress(record), file=sys.stderr, flush=True)

    found = run_entries(rounds, settings, on_record=on_record, command=invoked())
    show(summarize(found))
    return 0 if any(record.status == records.OK for record in found) else 1
