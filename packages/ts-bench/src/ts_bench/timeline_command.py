"""The sub-command `timeline` of `ts-bench`."""

from __future__ import annotations

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add("trace", nargs="+", type=Path, help="traces of `ts-bench suite --traces`")
    add("--title", action="append", default=[], help="of a trace, in their order; its name if none")
    add("--out", type=Path, required=True, help="the picture, such as steps.png")
    parser.set_defaults(_bench=run)


def run(args: argparse.Namespace) -> int:
    """Draws the picture; returns 0."""
    from ts_bench.timeline import plot_timelines, read_trace
    from ts_core.errors import OptionError

    if len(args.title) > len(args.trace):
        raise OptionError(f"title: {len(args.title)} are given for {len(args.trace)} traces.")
    names = [path.name.removesuffix(".gz").removesuffix(".json") for path in args.trace]
    titles = [*args.title, *names[len(args.title) :]]
    traces = [(title, read_trace(path)) for title, path in zip(titles, args.trace, strict=True)]
    plot_timelines(traces, args.out)
    print(args.out)
    return 0
