"""The sub-command `adam` of `ts-bench`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options; loads neither torch nor what is measured."""
    add = parser.add_argument
    add("--millions", type=float, help="parameters, in millions (default: 4 per core, at least 16)")
    add("--rounds", type=int, default=15, help="timed turns of each (%(default)s)")
    add("--threads", type=int, default=0, help="0: all usable cores")
    add("--levels", type=_names, metavar="A,B", help="SIMD levels; default: all of this machine")
    add("--moments", type=_names, metavar="A,B", help="float32, bfloat16, int8; default: all")
    add("--json", type=Path, help="write every timing and the medians to this file")
    add("--plot", type=Path, help="draw a picture (png, svg, pdf)")
    parser.set_defaults(_bench=run)


def run(args: argparse.Namespace) -> int:
    """Measures, prints the table, writes the files; returns the exit status."""
    from ts_bench.adam import measure
    from ts_bench.adam_report import plot, show
    from ts_bench.cli import invoked
    from ts_core._native import usable_cores

    millions = args.millions if args.millions is not None else max(16, 4 * usable_cores())
    measured = measure(
        count=int(millions * 1e6),
        rounds=args.rounds,
        threads=args.threads,
        levels=args.levels,
        moments=args.moments,
        command=invoked(),
        on_round=lambda done: print(f"round {done} of {args.rounds}", file=sys.stderr, flush=True),
    )
    show(measured)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(measured.as_json(), indent=1) + "\n", encoding="utf-8")
    if args.plot is not None:
        plot(measured, args.plot)
    return 0


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]
