"""The sub-command `page` of `ts-bench`."""

from __future__ import annotations

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add(
        "file",
        nargs="+",
        type=Path,
        help="records.jsonl, results.jsonl, kernels.json of one or more runs",
    )
    add("--out", type=Path, required=True, help="folder of the page, such as docs/benchmarks")
    add("--name", required=True, help="of the page, such as 2026-12-01-h200")
    parser.set_defaults(_bench=run)


def run(args: argparse.Namespace) -> int:
    """Writes the page; returns 0."""
    from ts_bench.page import read, write

    print(write(read(args.file), args.out, args.name))
    return 0
